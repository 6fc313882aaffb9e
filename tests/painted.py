"""Small pictures and masks, written as files."""

import numpy as np
from PIL import Image

RED = (255, 0, 0)


def save(path, colour=RED, size=(6, 4), **options):
    """A picture of one colour, its right half black."""
    image = Image.new("RGB", size, colour)
    image.paste((0, 0, 0), (size[0] // 2, 0, *size))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def save_mask(path, values, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.fromarray(np.array(values, np.uint8))
    if palette:
        mask.putpalette([7, 70, 170] * 256)
    mask.save(path)

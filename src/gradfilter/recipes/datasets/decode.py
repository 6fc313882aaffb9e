"""Picture and mask files as tensors of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

OUTSIDE = 254  # marks, in a table of mask values, a byte that means no class


class BadPicture(ValueError):
    """A picture or mask file that cannot be read, or whose values mean nothing."""

    def __init__(self, message: str):
        # A DataLoader makes a worker's exception anew from a traceback that ends with its message.
        super().__init__(message.rpartition("BadPicture: ")[2].strip())


def picture(path: Path) -> Tensor:
    """The picture in a file as uint8 [3, H, W], upright, whatever its colours were stored as.

    Transparent parts become white; of an animation the first frame counts.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            pixels = np.array(rgb(ImageOps.exif_transpose(image)))
    except MemoryError:
        raise
    except Exception as error:  # every decoder of Pillow has exceptions of its own
        raise unreadable(path, error) from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def mask(path: Path, values: dict[int, int]) -> Tensor:
    """The mask in a file as uint8 [H, W] of classes; `values` maps the file's bytes to them."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, stored = image.mode, np.array(image)
    except MemoryError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error
    if mode not in ("L", "P", "1"):
        raise BadPicture(f"{path}: a mask has one byte per pixel, its class; this one is {mode}")
    stored = stored.astype(np.uint8, copy=False)
    table = np.full(256, OUTSIDE, np.uint8)
    table[list(values)] = list(values.values())
    classes = table[stored]
    if (classes == OUTSIDE).any():
        bad = stored[classes == OUTSIDE][0]
        raise BadPicture(f"{path}: label {bad} is outside {spans(values)}")
    return torch.from_numpy(classes)


def shrink(image: Tensor, side: int) -> Tensor:
    """The picture, with a short side of at most `side` pixels."""
    from torchvision.transforms.v2 import functional as F

    return image if min(image.shape[1:]) <= side else F.resize(image, [side], antialias=True)


def rgb(image):
    """A Pillow image of any mode as RGB."""
    from PIL import Image

    if image.mode.startswith("I"):  # more than 8 bits of grey, which convert() would clip to 8
        grey = np.asarray(image)
        if image.mode != "I" or grey.max() > 255:  # "I" may hold bytes: those stay as they are
            grey = grey >> 8
        image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("its pixels are fractions of unknown range")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def spans(values: dict[int, int]) -> str:
    """`0..20, 255` for the numbers 0 to 20 and 255."""
    starts = [v for v in sorted(values) if v - 1 not in values]
    ends = [v for v in sorted(values) if v + 1 not in values]
    return ", ".join(f"{a}..{b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True))


def unreadable(path: Path, error: Exception) -> BadPicture:
    from PIL import UnidentifiedImageError

    if isinstance(error, FileNotFoundError):
        return BadPicture(f"{path}: no such file")
    if isinstance(error, UnidentifiedImageError):
        return BadPicture(f"{path}: cannot be read as a picture (of no known kind)")
    told = str(getattr(error, "strerror", None) or error).strip().partition("\n")[0]
    why = told.replace(str(path), "the file")
    return BadPicture(f"{path}: cannot be read as a picture ({why or type(error).__name__})")

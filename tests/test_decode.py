"""Pictures and masks from files: every way of storing them, and files that cannot be read."""

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
from painted import save, save_mask  # noqa: E402
from PIL import Image  # noqa: E402

from gradfilter.recipes.datasets import BadPicture, decode  # noqa: E402

STORED = {
    "grey.png": lambda im: im.convert("L"),
    "bits.png": lambda im: im.convert("1"),
    "palette.gif": lambda im: im.convert("P"),
    "alpha.png": lambda im: im.convert("RGBA"),
    "grey_alpha.png": lambda im: im.convert("LA"),
    "cmyk.tif": lambda im: im.convert("CMYK"),
    "deep.png": lambda im: Image.fromarray(np.asarray(im.convert("L")).astype(np.uint16) * 257),
    "rgb.bmp": lambda im: im,
    "rgb.webp": lambda im: im,
}


@pytest.mark.parametrize("file", STORED)
def test_every_way_of_storing_colours_is_read(tmp_path, file):
    image = Image.new("RGB", (6, 4), "white")
    image.paste((0, 0, 0), (3, 0, 6, 4))
    STORED[file](image).save(tmp_path / file, lossless=True)
    read = decode.picture(tmp_path / file)
    assert read.shape == (3, 4, 6) and read.dtype == torch.uint8
    assert (read[:, :, :3] == 255).all() and (read[:, :, 3:] == 0).all()


def test_sixteen_bits_of_grey_are_scaled(tmp_path):
    Image.fromarray(np.array([[0, 0x1234], [0x8000, 0xFFFF]], np.uint16)).save(tmp_path / "a.png")
    assert decode.picture(tmp_path / "a.png")[1].tolist() == [[0, 0x12], [0x80, 0xFF]]


def test_32_bits_of_grey_that_hold_bytes_stay_as_they_are(tmp_path):
    for name, grey, read in (("a.tif", [0, 200], [0, 200]), ("b.tif", [0, 0x1234], [0, 0x12])):
        Image.fromarray(np.array([grey], np.int32)).save(tmp_path / name)
        assert decode.picture(tmp_path / name)[1, 0].tolist() == read


def test_transparent_parts_are_white(tmp_path):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    image.save(tmp_path / "a.png")
    assert decode.picture(tmp_path / "a.png")[:, 0].T.tolist() == [[255] * 3, [10, 20, 30]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "p.png", transparency=0)
    assert decode.picture(tmp_path / "p.png")[:, 0].T.tolist() == [[255] * 3, [10, 20, 30]]


def test_pictures_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the left side of the file is the top
    path = save(tmp_path / "a.jpg", size=(32, 16), exif=exif, quality=95)
    read = decode.picture(path)
    assert read.shape == (3, 32, 16)
    assert read[0, :12].min() > 200 and read[0, 20:].max() < 50


def test_unreadable_pictures_are_named(tmp_path):
    whole = save(tmp_path / "whole.jpg", size=(64, 64)).read_bytes()
    for name, content in [("cut.jpg", whole[:-200]), ("empty.png", b""), ("text.gif", b"hello")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadPicture, match=rf"{name}: cannot be read as a picture") as caught:
            decode.picture(tmp_path / name)
        assert "\n" not in str(caught.value) and "the file" not in str(caught.value)
    with pytest.raises(BadPicture, match="gone.jpg: no such file"):
        decode.picture(tmp_path / "gone.jpg")


def test_masks_hold_classes_not_colours(tmp_path):
    save_mask(tmp_path / "m.png", [[0, 1], [2, 255]], palette=True)
    values = {0: 0, 1: 5, 2: 6, 255: 255}
    assert decode.mask(tmp_path / "m.png", values).tolist() == [[0, 5], [6, 255]]
    save_mask(tmp_path / "m.png", [[0, 1], [9, 255]])
    with pytest.raises(BadPicture, match=r"m\.png: label 9 is outside 0\.\.2, 255"):
        decode.mask(tmp_path / "m.png", values)
    save(tmp_path / "m.png")
    with pytest.raises(BadPicture, match="m.png: a mask has one byte per pixel"):
        decode.mask(tmp_path / "m.png", values)

"""gradfilter-device: large photographs, masks and turned pictures, files that are no pictures."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from on_device import SOURCE, module
from PIL import Image

from gradfilter.recipes import augment
from gradfilter.recipes.datasets import decode

ORIENTATION = 0x0112


def blobs(width: int, height: int, step: int = 16) -> Image.Image:
    """Smooth random colours."""
    small = np.random.RandomState(0).randint(0, 256, (height // step, width // step, 3))
    image = Image.fromarray(small.astype(np.uint8))
    return image.resize((width, height), Image.Resampling.BICUBIC)


def tiles(width: int, height: int) -> Image.Image:
    """Black and white squares at random: the hardest edges there are."""
    bits = np.random.RandomState(0).randint(0, 2, (height // 40, width // 40, 1))
    return Image.fromarray(255 * np.kron(bits, np.ones((40, 40, 3))).astype(np.uint8))


def turned(image: Image.Image, orientation: int) -> dict:
    """The option of `save` by which a camera says how it was held."""
    exif = image.getexif()
    exif[ORIENTATION] = orientation
    return {"exif": exif}


def feeder(size: int, varied: bool, masks: bool = False):
    """What prepares pictures for a network of two classes."""
    pictures = {"classes": ["a", "b"], "mean": [0, 0, 0], "std": [1, 1, 1], "ignore": 255}
    model = SimpleNamespace(
        size=(size, size), masks=masks, pictures=pictures, batch=None, dtype=np.float32
    )
    feeding = module("feeding")
    return feeding.Feeder(model, [], 0, varied, feeding.Skipped(Path()))


@pytest.mark.parametrize("kind", [blobs, tiles])
@pytest.mark.parametrize("size", [64, 96, 128, 200])
def test_a_large_jpeg_looks_nearly_as_in_gradfilter_train(kind, size, tmp_path):
    path = tmp_path / "large.jpg"
    kind(1600, 1200).save(path, quality=92)
    photo = feeder(size, False).picture(path)
    assert photo.size == (1600, 1200) and photo.image.size[0] <= 800
    expected, _ = augment.evaluation("classification", size)(decode.picture(path), 0)
    found = module("photos").cut(photo, (size, size), False)
    inner = np.s_[:, 2:-2, 2:-2]  # at its edge a cut is made small from what lies around it, too
    off = np.abs(found.astype(int) - expected.numpy())[inner]
    assert off.mean() < 2.5 and off.max() <= 16


def test_smaller_pictures_are_not_changed(tmp_path):
    for name in ("a.jpg", "a.png"):
        blobs(800, 400).save(tmp_path / name)
        expected = np.asarray(Image.open(tmp_path / name))
        found = module("photos").picture(tmp_path / name, 201)
        assert np.array_equal(np.asarray(found.image), expected)


@pytest.mark.parametrize("varied, masks", [(False, False), (True, False), (True, True)])
def test_no_cut_of_a_large_jpeg_has_fewer_pixels_than_twice_the_networks(varied, masks, tmp_path):
    path, own = tmp_path / "large.jpg", feeder(32, varied, masks)
    blobs(643, 641).save(path)
    photo, boxes = own.picture(path), []
    assert max(photo.image.size) < 400

    def part(box, size) -> np.ndarray:
        boxes.append(box)
        return np.zeros((3, *size))

    seen = SimpleNamespace(size=photo.size, part=part)
    for i in range(300):
        if own.cuts:
            own._varied(seen, np.random.default_rng(i))
        else:
            module("photos").cut(seen, (32, 32), masks)
    scale = photo.image.width / photo.size[0]
    for left, top, right, bottom in boxes:
        assert scale * min(right - left, bottom - top) >= 2 * 32 - 0.5
        assert left >= 0 and top >= 0 and right <= 643 and bottom <= 641


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_large_jpeg_is_turned_upright(orientation, tmp_path):
    image = blobs(800, 500, 100)
    image.save(tmp_path / "a.jpg", **turned(image, orientation))
    expected = Image.fromarray(decode.picture(tmp_path / "a.jpg").permute(1, 2, 0).numpy())
    photo = module("photos").picture(tmp_path / "a.jpg", 100)
    assert photo.size == expected.size and max(photo.image.size) == 200
    found = module("photos").cut(photo, (50, 50), True)
    wanted = np.asarray(expected.resize((50, 50), Image.Resampling.BILINEAR))
    assert np.abs(found.transpose(1, 2, 0).astype(int) - wanted).mean() < 2


READING = """
import sys
from pathlib import Path
from types import SimpleNamespace
from gradfilter_device import memory
from gradfilter_device.feeding import Feeder, Skipped
memory.keep()
pictures = {"mean": [0, 0, 0], "std": [1, 1, 1]}
model = SimpleNamespace(size=(224, 224), masks=False, pictures=pictures, batch=None, dtype="f4")
folder = Path(sys.argv[1])
own = Feeder(model, [(folder / name, 0) for name in sys.argv[2:]], 0, True, Skipped(folder))
own.read([0])
memory.release()
memory.forget()
before = memory.resident()
own.read([1])
print((memory.peak() - before) // memory.MIB, (memory.resident() - before) // memory.MIB)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="only Linux tells")
@pytest.mark.parametrize("name, most", [("photo.jpg", 24), ("photo.png", 64)])
def test_a_photo_of_a_phone_takes_little_memory_and_keeps_none(name, most, tmp_path):
    """Twelve million pixels are 46 MB in Pillow."""
    image = blobs(4000, 3000, 50)
    image.save(tmp_path / name, **({} if "png" in name else turned(image, 1)))
    blobs(300, 300).save(tmp_path / "small.png")
    command = [sys.executable, "-c", READING, str(tmp_path), "small.png", name]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    told = subprocess.check_output(command, env=environment, text=True)
    peak, kept = map(int, told.split())
    assert peak <= most and kept <= 16, told


def test_the_largest_pictures_come_first(tmp_path):
    own = feeder(32, True)
    for i, (name, side) in enumerate(
        [("a.png", 40), ("b.png", 400), ("c.jpg", 900), ("d.png", 300)]
    ):
        blobs(side, side, 10).save(tmp_path / name)
        own.examples.append((tmp_path / name, i))
    (tmp_path / "torn.png").write_bytes(b"no picture")
    own.examples.append((tmp_path / "torn.png", 4))
    assert own.largest() == [1, 3, 2, 0, 4]  # the JPEG is read at 225 pixels a side


def scene(folder: Path, orientation: int, size=(40, 20)) -> tuple[Path, np.ndarray]:
    """A picture that is turned to be upright, and a mask of the pixels that lie in its file."""
    image = blobs(*size, 5)
    image.save(folder / "a.png", **turned(image, orientation))
    return folder / "a.png", (np.asarray(image)[..., 0] > 128).astype(np.uint8)


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_mask_is_turned_as_its_picture(orientation, tmp_path):
    photos = module("photos")
    path, stored = scene(tmp_path, orientation)
    Image.fromarray(stored).save(tmp_path / "m.png")
    photo = photos.picture(path)
    found = photos.mask(tmp_path / "m.png", photo, photo.size[::-1], 2, 255)
    assert np.array_equal(found, np.asarray(photo.image)[..., 0] > 128)


def test_a_mask_of_the_upright_picture_is_taken_as_by_gradfilter_train(tmp_path):
    photos = module("photos")
    path, _ = scene(tmp_path, 6)
    photo = photos.picture(path)
    upright = (np.asarray(photo.image)[..., 0] > 128).astype(np.uint8)
    Image.fromarray(upright).save(tmp_path / "m.png")
    assert np.array_equal(photos.mask(tmp_path / "m.png", photo, upright.shape, 2, 255), upright)


def test_a_mask_of_another_size_is_broken(tmp_path):
    photos = module("photos")
    path, stored = scene(tmp_path, 1)
    Image.fromarray(stored[:, :30]).save(tmp_path / "m.png")
    why = "m.png: a mask of 30x20 pixels for a picture of 40x20"
    with pytest.raises(photos.Broken, match=why):
        photos.mask(tmp_path / "m.png", photos.picture(path), (8, 8), 2, 255)


@pytest.mark.parametrize(
    "values, seen", [((0, 90, 255), (0, 90, 255)), ((0, 256, 65535), (0, 1, 255))]
)
def test_grey_of_32_bits_that_holds_bytes_is_not_dark(values, seen, tmp_path):
    Image.fromarray(np.array([values], np.int32)).save(tmp_path / "grey.tif")
    assert Image.open(tmp_path / "grey.tif").mode == "I"
    found = np.asarray(module("photos").picture(tmp_path / "grey.tif").image)
    assert found[0, :, 0].tolist() == list(seen)


def test_dark_grey_of_16_bits_stays_dark(tmp_path):
    Image.fromarray(np.array([[0, 90, 255]], np.uint16)).save(tmp_path / "grey.png")
    assert not np.asarray(module("photos").picture(tmp_path / "grey.png").image).any()


def test_why_a_picture_is_broken_is_told_in_words(tmp_path):
    photos = module("photos")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "text.png").write_bytes(b"no picture")
    reasons = {
        "pipe.png": "not a regular file",  # which to open would wait for ever
        "text.png": "not a picture of a known kind",
        "gone.png": "No such file or directory",
    }
    for name, why in reasons.items():
        with pytest.raises(photos.Broken) as told:
            photos.picture(tmp_path / name)
        assert str(told.value) == f"{tmp_path / name}: {why}"
        assert photos.pixels(tmp_path / name, None) == 0

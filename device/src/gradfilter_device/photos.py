"""Folders of photographs, and a photograph as the network wants to see it.

The folders are those of `gradfilter train --data`, and so is what is cut out of a picture to test
on; the same files are held out.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from gradfilter_device.exported import Unusable

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
TESTS = ("test", "val", "valid")  # the first that has pictures is tested on
SHARE = 0.2  # of a folder without such a part
CENTRE = 7 / 8  # share of a photograph's short side that is looked at
SMALL = 64  # pixels a side; of such pictures all is looked at
IMAGES, MASKS = "images", "masks"  # folders side by side of a segmentation task
NOTHING = -100  # a label that has no part in the loss

Example = tuple[Path, int | Path]  # a picture, and its class or its mask


class Broken(Exception):
    """A picture that cannot be read."""


def open_folder(root: Path, classes: list[str], masks: bool) -> tuple[list[Example], list[Example]]:
    """What is to train on and what to test on."""
    if not root.is_dir():
        raise Unusable(f"{root} is no folder")
    read = mask_files if masks else class_files
    train = read(root, "train")
    test = next(filter(None, (read(root, part) for part in TESTS)), {}) if train else {}
    if not test:
        train, test = hold_out(train or read(root, ""))
    if not train:
        told = "images/ with masks/ beside it" if masks else "a folder of pictures for each class"
        raise Unusable(f"{root}: there is no picture to train on; needed: {told}")
    if not test:
        raise Unusable(f"{root}: there is no picture to test on; needed: two of a class, or test/")
    if masks:
        return pairs(root, train), pairs(root, test)
    number = numbers(root, [*train, *test], classes)
    return labelled(root, train, number), labelled(root, test, number)


def numbers(root: Path, folders: list[str], classes: list[str]) -> dict[str, int]:
    """Which class of the network a folder is, by its name or the one `cat_to_name.json` gives."""
    table, names = root / "cat_to_name.json", {}
    if table.is_file():
        try:
            names = dict(json.loads(table.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise Unusable(f"{table}: should be {{folder: name}}, but {error}") from error
    found = {}
    for folder in folders:
        name = str(names.get(folder) or names.get(folder.lstrip("0"), folder))
        if name not in classes:
            raise Unusable(
                f"{root}: class {name!r} is none of the network's {len(classes)} classes"
            )
        found[folder] = classes.index(name)
    return found


def labelled(root: Path, files: dict[str, list[str]], number: dict[str, int]) -> list[Example]:
    return [(root / path, number[name]) for name in sorted(files) for path in files[name]]


def class_files(root: Path, part: str) -> dict[str, list[str]]:
    """The picture files in every folder of `part`, at any depth, in the order of their names."""
    try:
        folders = sorted(entry.name for entry in os.scandir(root / part) if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {name: files_below(root, Path(part, name)) for name in folders if name[0] != "."}
    return {name: files for name, files in found.items() if files}


def files_below(root: Path, folder: Path) -> list[str]:
    found = []
    for place, _, files in os.walk(root / folder, followlinks=True):
        inside = Path(place).relative_to(root).as_posix()
        found += [f"{inside}/{file}" for file in files if is_picture(file)]
    return sorted(found)


def is_picture(file: str) -> bool:
    return file.lower().endswith(PICTURES) and not file.startswith(".")


def mask_files(root: Path, part: str) -> dict[str, list[str]]:
    """Pictures of `images/`, or of `part` itself, that have a mask; as one class."""
    for place in (Path(part, IMAGES), Path(part)) if part else (Path(IMAGES),):
        try:
            names = sorted(e.name for e in os.scandir(root / place) if is_picture(e.name))
        except (FileNotFoundError, NotADirectoryError):
            continue
        if kept := [n for n in names if mask_of(root / place / n).is_file()]:
            return {MASKS: [f"{place.as_posix()}/{n}" for n in kept]}
    return {}


def mask_of(picture: Path) -> Path:
    """A PNG of the same stem: in `masks/` for `images/`, in `trainannot/` for `train/`."""
    folder = picture.parent
    beside = MASKS if folder.name == IMAGES else f"{folder.name}annot"
    return folder.parent / beside / f"{picture.stem}.png"


def pairs(root: Path, files: dict[str, list[str]]) -> list[Example]:
    return [(root / path, mask_of(root / path)) for paths in files.values() for path in paths]


def hold_out(files: dict[str, list[str]]) -> tuple[dict, dict]:
    """A part of every class to test on, by a hash of the file's name."""
    train, test = {}, {}
    for name, paths in files.items():
        drawn = sorted(paths, key=draw)
        count = sum(draw(path) < SHARE for path in paths)
        count = min(max(count, 1), len(paths) - 1)
        test[name], train[name] = sorted(drawn[:count]), sorted(drawn[count:])
    kept = {name: paths for name, paths in test.items() if paths}
    return {name: paths for name, paths in train.items() if paths}, kept


def draw(path: str) -> float:
    """A number in [0, 1) that depends on the path alone."""
    return int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:6], "big") / 2**48


def picture(path: Path) -> Image.Image:
    """The picture in a file, upright and in RGB; transparent parts become white."""
    try:
        with Image.open(path) as image:
            return rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except Exception as error:  # every decoder of Pillow has exceptions of its own
        why = str(error).strip().partition("\n")[0].replace(str(path), "the file")
        raise Broken(f"{path}: {why or type(error).__name__}") from error


def rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would clip to 8
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("its pixels are fractions of unknown range")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def cut(image: Image.Image, size: tuple[int, int], all_of_it: bool) -> np.ndarray:
    """The middle of a photograph, or all of it, as bytes [3, H, W] of that size."""
    width, height = image.size
    box = (0, 0, width, height)
    if not all_of_it:
        share = 1 if max(width, height) <= max(SMALL, max(size) // 2) else CENTRE
        side = max(1, round(share * min(height, width)))
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side)
    resized = image.resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    return np.asarray(resized).transpose(2, 0, 1)


def mask(path: Path, size: tuple[int, int], classes: int, ignore: int | None) -> np.ndarray:
    """The classes of a mask file [H, W]; what is ignored has no part in the loss."""
    try:
        with Image.open(path) as image:
            mode = image.mode
            stored = np.asarray(image.resize(size[::-1], Image.Resampling.NEAREST))
    except MemoryError:
        raise
    except Exception as error:
        raise Broken(f"{path}: {error}") from error
    if mode not in ("L", "P", "1"):
        raise Broken(f"{path}: a mask has one byte per pixel, its class; this one is {mode}")
    found = stored.astype(np.int64)
    if ignore is not None:
        found[found == ignore] = NOTHING
    if found.max() >= classes:
        raise Broken(f"{path}: label {found.max()} is none of {classes} classes")
    return found

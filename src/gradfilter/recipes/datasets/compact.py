"""Small forms of known data sets: mosaics of tiles, lists of pets, street scenes with masks.

Every function reads one layout; it gives None where the folder is not of that layout.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradfilter.recipes.datasets import decode
from gradfilter.recipes.datasets.folder import is_picture
from gradfilter.recipes.datasets.pictures import (
    Data,
    FilePictures,
    MaskedPictures,
    TensorPictures,
)

COLUMNS = 100  # tiles in a row of a mosaic
CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CAMVID = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "cyclist",
)
TRIMAP = {1: 0, 2: 1, 3: 2}  # byte in the file -> class
TRIMAP_CLASSES = ("pet", "background", "border")


def cifar10(path: Path) -> Data | None:
    """`labels.npz` (arrays `train`, `test`) with one mosaic each, `train*.webp`, `test*.webp`."""
    table = path / "labels.npz"
    mosaics = [mosaic_of(path, part) for part in ("train", "test")]
    if not table.is_file() or None in mosaics:
        return None
    try:
        with np.load(table, allow_pickle=False) as stored:
            labels = [torch.from_numpy(stored[part].astype(np.int64)) for part in ("train", "test")]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{table}: should hold arrays 'train' and 'test' ({error})") from error
    train, test = (
        TensorPictures(f"cifar10 {part}", tiles(mosaic, len(classes)), classes)
        for part, mosaic, classes in zip(("train", "test"), mosaics, labels, strict=True)
    )
    return Data("cifar10", "classification", CIFAR10, train, test)


def mosaic_of(path: Path, part: str) -> Path | None:
    return next(iter(sorted([*path.glob(f"{part}*.webp"), *path.glob(f"{part}*.png")])), None)


def tiles(path: Path, count: int) -> Tensor:
    """The first `count` square tiles of a mosaic, row by row, as [count, 3, side, side]."""
    mosaic = decode.picture(path)
    _, height, width = mosaic.shape
    side = width // COLUMNS
    if width % COLUMNS or height % side or height // side * COLUMNS < count:
        raise ValueError(f"{path}: {width}x{height} pixels are not {count} tiles in rows of 100")
    rows = mosaic.reshape(3, height // side, side, COLUMNS, side)
    return rows.permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)[:count].contiguous()


def pets(path: Path) -> Data | None:
    """Breeds: `trainval.txt` and `test.txt` with `name class ...` a line, class from 1."""
    if not has_pet_lists(path):
        return None
    train, test = (pet_list(path / f"{part}.txt") for part in ("trainval", "test"))
    breeds = {name.rpartition("_")[0]: number for name, number in train + test}
    classes = tuple(breed.replace("_", " ").title() for breed in sorted(breeds, key=breeds.get))
    return Data(
        "oxford-pets",
        "classification",
        classes,
        FilePictures(path, pet_files("trainval", train), [number - 1 for _, number in train]),
        FilePictures(path, pet_files("test", test), [number - 1 for _, number in test]),
    )


def pet_trimaps(path: Path) -> Data | None:
    """The pets' outlines: pet, background and the border between them, from the same lists."""
    if not has_pet_lists(path):
        return None
    train, test = (
        MaskedPictures(path, pet_files(part, pets), pet_files(part, pets, "trimaps", "png"), TRIMAP)
        for part in ("trainval", "test")
        for pets in [pet_list(path / f"{part}.txt")]
    )
    return Data("pets-trimaps", "segmentation", TRIMAP_CLASSES, train, test)


def has_pet_lists(path: Path) -> bool:
    return all(
        (path / f"{part}.txt").is_file() and (path / part / "images").is_dir()
        for part in ("trainval", "test")
    )


def pet_list(path: Path) -> list[tuple[str, int]]:
    """(name, class from 1) of every line."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    try:
        return [(words[0], int(words[1])) for words in lines if words and words[0][0] != "#"]
    except (IndexError, ValueError) as error:
        raise ValueError(f"{path}: every line should be 'name class ...' ({error})") from error


def pet_files(part: str, pets: list[tuple[str, int]], kind="images", suffix="jpg") -> list[str]:
    return [f"{part}/{kind}/{name}.{suffix}" for name, _ in pets]


def camvid(path: Path) -> Data | None:
    """`train/` with masks of the same names in `trainannot/`; `test/` (or `val/`) likewise.

    CamVid's 11 classes, and 11 for what counts for nothing; other data of this layout names its
    classes in `classes.txt`, a line each, and marks with 255 what counts for nothing.
    """
    tests = [part for part in ("test", "val") if (path / f"{part}annot").is_dir()]
    if not (path / "trainannot").is_dir() or not tests:
        return None
    table = path / "classes.txt"
    if table.is_file():
        lines = table.read_text(encoding="utf-8").splitlines()
        name, classes, ignore = path.resolve().name, tuple(filter(None, map(str.strip, lines))), 255
        if len(classes) > decode.OUTSIDE:
            raise ValueError(f"{table}: {len(classes)} classes, and masks have {decode.OUTSIDE}")
    else:
        name, classes, ignore = "camvid", CAMVID, len(CAMVID)
    values = {value: value for value in (*range(len(classes)), ignore)}
    train, test = (annotated(path, part, values) for part in ("train", tests[0]))
    return Data(name, "segmentation", classes, train, test, ignore)


def annotated(path: Path, part: str, values: dict[int, int]) -> MaskedPictures:
    """The pictures of one part that have a mask; every picture must have one."""
    pictures = sorted(file.name for file in (path / part).glob("*") if is_picture(file.name))
    masks = {file.stem: file.name for file in (path / f"{part}annot").glob("*.png")}
    for name in pictures:
        if Path(name).stem not in masks:
            raise ValueError(f"{path / part / name}: has no mask in {part}annot/")
    return MaskedPictures(
        path,
        [f"{part}/{name}" for name in pictures],
        [f"{part}annot/{masks[Path(name).stem]}" for name in pictures],
        values,
    )

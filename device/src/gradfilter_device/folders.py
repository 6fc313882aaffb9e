"""Folders of pictures, as `gradfilter train --data` reads them; the same files are held out."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradfilter_device.exported import Unusable, reason

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
# Parts of a data set, in whatever case: the first of each that has pictures counts.
TRAINS = ("train", "training")
TESTS = ("test", "val", "valid", "testing", "validation")
RUN = {"config.yaml", "plan.yaml"}  # files by which the folder of a run is known
SHARE = 0.2  # of a folder without such a part
IMAGES, MASKS = "images", "masks"  # folders side by side of a segmentation task

Example = tuple[Path, int | Path]  # a picture, and its class or its mask
ByClass = dict[str, list[str]]  # class folder -> its picture files, relative to the root


def open_folder(root: Path, classes: list[str], masks: bool) -> tuple[list[Example], list[Example]]:
    """What is to train on and what to test on."""
    with readable(root):
        if not root.is_dir():
            raise Unusable(f"{root} is no folder")
        there = {name.lower(): name for name in sorted(os.listdir(root))}
    train, test = parts(root, there, mask_files if masks else class_files)
    if not train:
        told = "images/ with masks/ beside it" if masks else "a folder of pictures for each class"
        raise Unusable(f"{root}: there is no picture to train on; needed: {told}")
    if not test:
        raise Unusable(f"{root}: there is no picture to test on; needed: two of a class, or test/")
    if masks:
        return pairs(root, train), pairs(root, test)
    number = numbers(root, [*train, *test], classes)
    return labelled(root, train, number), labelled(root, test, number)


def parts(root: Path, there: dict[str, str], read: Callable) -> tuple[ByClass, ByClass]:
    """What is to train on and what to test on; `there` has the names in the folder, by lower case.

    Without a part to test on, some of what is to train on is held out.
    """

    def first(names: tuple[str, ...]) -> ByClass:
        return next(filter(None, (read(root, there[n]) for n in names if n in there)), {})

    train = first(TRAINS)
    if train and (test := first(TESTS)):
        return train, test
    return hold_out(train or read(root, ""))


@contextmanager
def readable(place: Path) -> Iterator[None]:
    """Refuses, in one line, what cannot be read in here."""
    try:
        yield
    except OSError as error:
        raise Unusable(f"cannot read {error.filename or place}: {reason(error)}") from error


def numbers(root: Path, folders: list[str], classes: list[str]) -> dict[str, int]:
    """Which class of the network a folder is, by its name or the one `cat_to_name.json` gives."""
    table, names = root / "cat_to_name.json", {}
    with readable(table):
        if table.is_file():
            try:
                names = dict(json.loads(table.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
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


def labelled(root: Path, files: ByClass, number: dict[str, int]) -> list[Example]:
    return [(root / path, number[name]) for name in sorted(files) for path in files[name]]


def class_files(root: Path, part: str) -> ByClass:
    """The picture files in every folder of `part`, at any depth, in the order of their names.

    Folders without pictures are no classes; where others have some, they are told.
    """
    with readable(root / part):
        try:
            folders = sorted(entry.name for entry in os.scandir(root / part) if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {name: files_below(root, Path(part, name)) for name in folders if name[0] != "."}
    empty = [name for name, files in found.items() if not files]
    if 0 < len(empty) < len(found):
        print(f"{root / part}: no pictures of: {', '.join(empty)}", file=sys.stderr, flush=True)
    return {name: files for name, files in found.items() if files}


def files_below(root: Path, folder: Path) -> list[str]:
    """The picture files below a folder; none of hidden folders and of runs, which draw curves."""
    found = []
    for place, folders, files in os.walk(root / folder, onerror=_fail, followlinks=True):
        if RUN.issubset(files):
            folders.clear()
            continue
        folders[:] = [f for f in folders if f[0] != "." and not leads_back(Path(place, f))]
        inside = Path(place).relative_to(root).as_posix()
        found += [f"{inside}/{file}" for file in files if is_picture(file)]
    return sorted(found)


def _fail(error: OSError) -> None:
    raise error


def leads_back(folder: Path) -> bool:
    """Whether a link goes to a folder that it lies in: all there would be found again and again."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def is_picture(file: str) -> bool:
    return file.lower().endswith(PICTURES) and not file.startswith(".")


def mask_files(root: Path, part: str) -> ByClass:
    """Pictures of `images/`, or of `part` itself, that have a mask; as one class."""
    for place in (Path(part, IMAGES), Path(part)) if part else (Path(IMAGES),):
        with readable(root / place):
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


def pairs(root: Path, files: ByClass) -> list[Example]:
    return [(root / path, mask_of(root / path)) for paths in files.values() for path in paths]


def hold_out(files: ByClass) -> tuple[dict, dict]:
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

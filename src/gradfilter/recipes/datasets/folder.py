"""A folder of photographs, one folder per class."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

from gradfilter.recipes import recording
from gradfilter.recipes.datasets.pictures import Data, FilePictures

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
UNREAD = (
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".jfif", ".psd", ".dng", ".cr2", ".nef", ".arw",
)  # fmt: skip
# Parts of a data set, in whatever case: the first of each that has pictures counts.
TRAINS = ("train", "training")
TESTS = ("test", "val", "valid", "testing", "validation")
RUN = {recording.CONFIG, recording.PLAN}  # files by which the folder of a run is known
SHARE = 0.2  # of a folder without such a part

ByClass = dict[str, list[str]]  # class folder -> its picture files, relative to one root


def image_folder(path: Path, fewest: int = 2) -> Data:
    """Class folders below `train/` and `test/` (or other names of these), or directly below `path`.

    Without a test part, a fifth of every class is held out. Folders without pictures are no
    classes, files that are no pictures do not count. `cat_to_name.json`, if there, names the
    classes: {folder: name}, leading zeros of the folder aside. `fewest` is 1 where the other
    classes lie elsewhere.
    """
    train, test = parts(path)
    unread = unread_below(path)
    if len(train) < fewest:
        found = f"only {next(iter(train))!r}" if train else "none"
        wanted = "two folders of pictures or more" if fewest == 2 else "folders of pictures"
        raise ValueError(
            f"{path}: needs {wanted}, one per class, directly or below "
            f"train/ and test/; found {found}{unread and f'; {unread}'}"
        )
    for folder, files in test.items():
        if folder not in train:
            raise ValueError(f"{path / files[0]}: class {folder!r} has no pictures to train on")
    if not test:
        raise ValueError(
            f"{path}: every class has one picture, and none is left to test on; two of a class "
            "are enough, or train/ and test/ with a folder per class each"
        )
    order = list(train)
    return Data(
        path.resolve().name,
        "classification",
        class_names(path, order),
        file_pictures(path, train, order),
        file_pictures(path, test, order),
        held_out=is_held_out(train, test),
        unread=unread,
    )


def parts(path: Path) -> tuple[ByClass, ByClass]:
    """What is to train on and what to test on."""
    folders = {name.lower(): name for name in folders_of(path)}

    def first(names: tuple[str, ...]) -> ByClass:
        found = (class_files(path, folders[name]) for name in names if name in folders)
        return next(filter(None, found), {})

    train = first(TRAINS)
    if train and (test := first(TESTS)):
        return train, test
    return hold_out(train or class_files(path, ""))


def is_held_out(train: ByClass, test: ByClass) -> bool:
    """Whether what is to test on lies in the same folder as what is to train on."""
    name, files = next(iter(test.items()))
    return Path(files[0]).parts[0] == Path(train[name][0]).parts[0]


def folders_of(path: Path) -> list[str]:
    """The folders in a folder, in the order of their names."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())


def class_files(root: Path, part: str) -> ByClass:
    """The picture files in every folder of `part`, at any depth, in the order of their names."""
    names = [name for name in folders_of(root / part) if name[0] != "."]
    found = {name: files_below(root, Path(part, name)) for name in names}
    return {name: files for name, files in found.items() if files}


def files_below(root: Path, folder: Path) -> list[str]:
    """The picture files below a folder; none of hidden folders and of runs, which draw curves."""
    found = []
    for place, folders, files in os.walk(root / folder, followlinks=True):
        if RUN.issubset(files):
            folders.clear()
            continue
        folders[:] = [f for f in folders if f[0] != "." and not leads_back(Path(place, f))]
        inside = Path(place).relative_to(root).as_posix()
        found += [f"{inside}/{file}" for file in files if is_picture(file)]
    return sorted(found)


def pictures_of(places: list[Path]) -> list[Path]:
    """The files that are named; of folders all pictures below them."""
    found = []
    for place in places:
        below = [place / file for file in files_below(place, Path())] if place.is_dir() else [place]
        if not below:
            raise ValueError(f"{place}: there are no pictures in it")
        found += below
    return found


def unread_below(folder: Path) -> str:
    """What is to be said of pictures of kinds that are not read; nothing where there are none."""
    count = Counter(Path(file).suffix.lower() for _, _, files in os.walk(folder) for file in files)
    kinds = ", ".join(f"{count[kind]:,} {kind}" for kind in UNREAD if count[kind])
    return kinds and f"passed over, being of kinds that are not read: {kinds}"


def leads_back(folder: Path) -> bool:
    """Whether a link goes to a folder that it lies in: all there would be found again and again."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def is_picture(file: str) -> bool:
    return file.lower().endswith(PICTURES) and not file.startswith(".")


def hold_out(files: ByClass) -> tuple[ByClass, ByClass]:
    """A part of every class to test on, by a hash of the file's name.

    A file stays on its side when others come or go, but where a class would be left without a
    picture on one side: there the nearest one changes over.
    """
    train, test = {}, {}
    for name, paths in files.items():
        drawn = sorted(paths, key=draw)
        count = sum(draw(path) < SHARE for path in paths)
        count = min(max(count, 1), len(paths) - 1)
        test[name], train[name] = sorted(drawn[:count]), sorted(drawn[count:])
    return train, {name: paths for name, paths in test.items() if paths}


def draw(path: str) -> float:
    """A number in [0, 1) that depends on the path alone."""
    return int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:6], "big") / 2**48


def file_pictures(root: Path, files: ByClass, order: list[str]) -> FilePictures:
    number = {name: i for i, name in enumerate(order)}
    pairs = [(path, number[name]) for name in sorted(files) for path in files[name]]
    return FilePictures(root, [path for path, _ in pairs], [label for _, label in pairs])


def class_names(path: Path, folders: list[str]) -> tuple[str, ...]:
    """The folders' names, or those that `cat_to_name.json` gives them."""
    table = path / "cat_to_name.json"
    if not table.is_file():
        return tuple(folders)
    try:
        names = dict(json.loads(table.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{table}: should be {{folder: name}}, but {error}") from error
    return tuple(str(names.get(f) or names.get(f.lstrip("0"), f)) for f in folders)

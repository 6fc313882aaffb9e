"""Checkpoints that survive a kill at any moment: written beside their name, flushed, renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gradfilter_device.exported import Exported, Unusable, Values, reason

LAST, PREVIOUS, BEST = "last.npz", "previous.npz", "best.npz"
ABOUT = "about"  # what is no tensor, as JSON
KEYS = {"step", "rows", "sums", "skipped", "options", "asked", "export", "pictures"}  # of that
Checkpoint = tuple[Values, dict]


def save(path: Path, values: Values, about: dict, previous: Path | None = None) -> None:
    """Put a checkpoint in place at once or not at all; the one before moves to `previous`."""
    told = {ABOUT: np.array(json.dumps(about))}
    put(path, lambda file: np.savez(file, **values, **told), previous)


def put(path: Path, write: Callable[[BinaryIO], object], previous: Path | None = None) -> None:
    """Have a file written, and put it in place at once or not at all."""
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(new, path)
        _flush(path.parent)
    except OSError as error:
        if new.is_file():
            new.unlink()
        raise Unusable(f"cannot write {path}: {reason(error)}") from error


def load(path: Path) -> Checkpoint | None:
    """A whole checkpoint, or None where the file is missing or torn.

    What the disk refuses to give is neither: it may be whole.
    """
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            values = {name: file[name] for name in file.files}
        return values, json.loads(str(values.pop(ABOUT)))
    except MemoryError:
        raise
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (None, errno.EINVAL):  # a place that torn bytes sent zipfile to
            return None
        raise Unusable(f"cannot read {path}: {reason(error)}") from error
    except Exception:  # NumPy and zipfile fail in many ways, depending on which byte is wrong
        return None


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run; None where nothing was saved."""
    places = [folder / name for name in (LAST, PREVIOUS)]
    for path in places:
        if (found := load(path)) is not None:
            return found
    if any(path.exists() for path in places):
        raise Unusable(f"the checkpoints in {folder} are damaged; remove them to start anew")
    return None


def check(model: Exported, folder: Path, found: Checkpoint, shapes: dict[str, list[int]]) -> None:
    """Refuse a checkpoint of another export, or one that lacks a tensor of these shapes."""
    values, about = found
    if not isinstance(about, dict) or KEYS - about.keys():
        raise Unusable(f"what is in {folder} is no checkpoint of a run")
    if about["export"] != model.digest:
        raise Unusable(f"the run in {folder} is of another export; give that, or another --run")
    if (wrong := model.unlike(values, shapes)) is not None:
        raise Unusable(f"the checkpoint in {folder} does not fit the network: {wrong}")


def _flush(folder: Path) -> None:
    """Make renames last: on POSIX the folder itself has to be flushed."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Checkpoints that survive a kill at any moment: written beside their name, flushed, renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gradfilter_device.exported import Unusable, Values

LAST, PREVIOUS, BEST = "last.npz", "previous.npz", "best.npz"
ABOUT = "about"  # what is no tensor, as JSON


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
        raise Unusable(f"cannot write {path}: {error.strerror or error}") from error


def load(path: Path) -> tuple[Values, dict] | None:
    """A whole checkpoint, or None where the file is missing or torn."""
    try:
        with np.load(path) as file:
            values = {name: file[name] for name in file.files}
        return values, json.loads(str(values.pop(ABOUT)))
    except MemoryError:
        raise
    except Exception:  # NumPy and zipfile fail in many ways, depending on which byte is wrong
        return None


def latest(folder: Path) -> tuple[Values, dict] | None:
    """The newest whole checkpoint of a run; None where nothing was saved."""
    places = [folder / name for name in (LAST, PREVIOUS)]
    for path in places:
        if (found := load(path)) is not None:
            return found
    if any(path.exists() for path in places):
        raise Unusable(f"the checkpoints in {folder} are damaged; remove them to start anew")
    return None


def _flush(folder: Path) -> None:
    """Make renames last: on POSIX the folder itself has to be flushed."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

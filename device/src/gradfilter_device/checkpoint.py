"""Checkpoints that survive a kill at any moment: written beside their name, flushed, renamed."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np

from gradfilter_device.exported import Unusable, Values

LAST, PREVIOUS, BEST = "last.npz", "previous.npz", "best.npz"
ABOUT = "about"  # what is no tensor, as JSON


def save(path: Path, values: Values, about: dict, previous: Path | None = None) -> None:
    """Put a checkpoint in place at once or not at all; the one before moves to `previous`."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            np.savez(file, **values, **{ABOUT: np.array(json.dumps(about))})
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(new, path)
        _flush(path.parent)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise Unusable(f"cannot write {path}: {error.strerror or error}") from error


def load(path: Path) -> tuple[Values, dict] | None:
    """A whole checkpoint, or None where the file is missing or torn."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as file:
            values = {name: file[name] for name in file.files}
        return values, json.loads(str(values.pop(ABOUT)))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
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

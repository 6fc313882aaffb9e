"""Checkpoints that survive a kill at any moment, a full disk and a torn file.

A file is written beside its name, flushed to the disk and renamed into place: under its name there
is always a whole one. The last but one is kept too. All are plain tensors, numbers and texts, and
load with `weights_only=True`.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from gradfilter.convert import Converted

LAST, PREVIOUS, BEST, DAMAGED = "last.pt", "previous.pt", "best.pt", "damaged.pt"
NEW = ".new"  # ending of a file that is being written


class NotWritten(ValueError):
    """A file of the run could not be written; what was there before still is."""


class Damaged(ValueError):
    """A file that is no whole checkpoint."""


def save(path: Path, content: dict, previous: Path | None = None) -> None:
    """Put a checkpoint in place at once or not at all; the one before moves to `previous`."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write(path, buffer.getbuffer(), previous)


def write(path: Path, data: bytes | memoryview, previous: Path | None = None) -> None:
    """Write a file so that its name never stands for a part of it."""
    new = path.with_name(path.name + NEW)
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(new, path)
        _flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        kept = f"; {path.name} from before is whole" if path.exists() else ""
        raise NotWritten(
            f"cannot write {path} ({len(data) / 2**20:.1f} MiB): {error.strerror or error}{kept}"
        ) from error


def load(path: Path) -> dict:
    """A checkpoint, on the CPU; `Damaged` where the file is torn or is something else."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"there is no {path}") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(content["model"], dict):
            raise TypeError
    except Exception as error:  # a torn file can fail anywhere in torch, zip or pickle
        raise Damaged(f"{path} is damaged: it was cut off, or is no checkpoint") from error
    return content


def saved(folder: Path) -> bool:
    """Whether there is something to go on from; a kill may have left only the last but one."""
    return any((folder / name).exists() for name in (LAST, PREVIOUS))


def latest(folder: Path) -> tuple[dict | None, str | None]:
    """The newest whole checkpoint of a run, and what is to be said if that is not the last."""
    problem = None
    for name in (LAST, PREVIOUS):
        if not (folder / name).exists():
            continue
        try:
            found = load(folder / name)
        except Damaged as error:
            problem = problem or str(error)
            continue
        return found, problem and f"{problem}; going on from {name}, step {found['step']}"
    if problem:
        raise Damaged(f"{problem}, and there is no whole one to go on from")
    return None, "nothing was saved yet: this run starts from its beginning"


def set_aside(folder: Path) -> None:
    """Take a damaged last checkpoint out of the way, lest it take the place of the whole one."""
    with suppress(FileNotFoundError):
        os.replace(folder / LAST, folder / DAMAGED)


def method_states(model: nn.Module) -> dict[str, dict[str, list[Tensor]]]:
    """What warm-started layers remember from batch to batch."""
    return {
        name: {"state": list(m.gf.state), "before": list(m.gf.before)}
        for name, m in model.named_modules()
        if isinstance(m, Converted) and m.gf.method.stateful
    }


def restore_methods(model: nn.Module, states: dict[str, dict[str, list[Tensor]]]) -> None:
    """Give layers back what `method_states` read."""
    for name, states_of in states.items():
        layer = model.get_submodule(name)
        device = next(layer.parameters()).device
        for key, tensors in states_of.items():
            setattr(layer.gf, key, tuple(t.to(device) for t in tensors))


def _flush_folder(folder: Path) -> None:
    """Make renames last: on POSIX the folder itself has to be flushed."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

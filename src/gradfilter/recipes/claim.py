"""The folder of a run, held while the run lasts: two runs in one would write over each other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gradfilter.recipes import recording
from gradfilter.recipes.checkpoint import NotWritten
from gradfilter.recipes.parallel import World
from gradfilter.recipes.settings import Settings

PATIENCE = 10.0  # seconds in which the worker processes of a killed run notice that it is gone


@contextmanager
def claimed(settings: Settings, world: World, resume: bool) -> Iterator[Path]:
    """The folder that is asked for, or a new one; the first process holds it for all."""
    with ExitStack() as held:
        found = None
        if world.first:
            try:
                found = held.enter_context(_held(settings, resume))
            except ValueError as error:  # which every process is to raise
                found = error
        found = world.share(found)
        if isinstance(found, ValueError):
            raise found
        yield found


@contextmanager
def _held(settings: Settings, resume: bool) -> Iterator[Path]:
    """The folder, made if need be; one that stays empty is taken away again."""
    asked = Path(settings.out) if settings.out else None
    folder = asked or recording.new_folder(settings.data, settings.model)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        while not _make(folder, new=asked is None):
            folder = recording.new_folder(settings.data, settings.model)
            made[0] = folder
        _check(folder, resume)
        told = f"another process trains in {folder}: let it end, or stop it"
        with locked(folder, PATIENCE, told):
            _check(folder, resume)  # once more: the run that was waited for may have begun
            yield folder
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()


def _make(folder: Path, new: bool) -> bool:
    """Make a folder; False where it has to be a new one and another run was faster."""
    try:
        folder.mkdir(parents=True, exist_ok=not new)
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            return False
        raise NotWritten(f"{folder}: {error.strerror or error}") from error
    return True


def _check(folder: Path, resume: bool) -> None:
    if not resume and (folder / recording.CONFIG).exists():
        raise ValueError(f"{folder} holds a run: --resume goes on with it, or change --out")


@contextmanager
def locked(folder: Path, patience: float, told: str) -> Iterator[None]:
    """The system's lock on a folder, which ends with the process however that ends.

    It is waited for so many seconds; `told` is what the error says then.
    """
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + patience
        while not _locks(fcntl, handle):
            if time.monotonic() > deadline:
                raise ValueError(told)
            time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def _locks(fcntl, handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks holds nobody off
        return True
    return True

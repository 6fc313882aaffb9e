"""One process at a time for the folder of a run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from gradfilter_device.exported import Unusable, reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "lock"


def lock(folder: Path) -> ExitStack:
    """Make a run's folder, and keep other processes out of it until what is given is closed.

    The system does that however the process ends. Where files cannot be locked (Windows, some file
    systems of networks) nobody is kept out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"cannot make the folder {folder}: {reason(error)}") from error
    with ExitStack() as held:
        try:
            file = held.enter_context(open(folder / LOCK, "ab"))
        except OSError as error:
            raise Unusable(f"cannot write {folder / LOCK}: {reason(error)}") from error
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unusable(f"the run in {folder} is in use by another process") from error
        except OSError:  # no locks there
            pass
        return held.pop_all()

"""Flower's programs as processes of ours: their environment, and how all of them end.

Everything works without a network and leaves the user's own Flower settings alone: telemetry,
update checks and installations are off unless the user's environment says otherwise, and
`FLWR_HOME` is a folder of the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
STOP = 15  # seconds in which a process has to end by itself
GONE = 15  # looks in a row that find nothing: a process that is being begun is seen by none
# In the environment of all that comes of a program: which one it is, and who began it.
MARK, BEGAN_BY = "GRADFILTER_PROGRAM", "GRADFILTER_BEGAN_BY"


def environment(home: Path) -> dict[str, str]:
    """For Flower's programs: quiet, and with each other on the path."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", "")])
    return QUIET | os.environ | {"FLWR_HOME": str(home), "PATH": path}


def program(name: str) -> str:
    """One of Flower's programs, beside this Python."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        raise ModuleNotFoundError(f"there is no {found}", name="flwr")
    return str(found)


class Program(subprocess.Popen):
    """One of Flower's programs as a process group of its own.

    What comes of it bears its mark in the environment, in whatever session and below whatever
    parent: the workers of a simulation outlive theirs.
    """

    def __init__(self, line: list[str], home: Path, output: IO | None):
        self.mark = uuid.uuid4().hex
        env = environment(home) | {MARK: self.mark, BEGAN_BY: _identity(os.getpid())}
        super().__init__(line, env=env, stdout=output, stderr=output, start_new_session=True)

    def family(self) -> list[int]:
        """The processes that bear the mark; none where there is no /proc."""
        return [pid for pid, own in _environments() if own.get(MARK) == self.mark]


def start(name: str, *arguments: str, home: Path, log: Path | None) -> Program:
    """Begin one of Flower's programs; `log` takes what it says."""
    home.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") if log else nullcontext() as output:
        return Program([program(name), *arguments], home, output)


def stop(process: Program) -> None:
    """End a program and all that came of it; come back when they are gone."""
    with _undisturbed():
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP)
        _end(process.family)


def end_orphans(home: Path) -> None:
    """End what a command that was killed has left running with this FLWR_HOME."""

    def orphans() -> list[int]:
        found = [(pid, own) for pid, own in _environments() if own.get("FLWR_HOME") == str(home)]
        return [pid for pid, own in found if BEGAN_BY in own and not _lives(own[BEGAN_BY])]

    if orphans():
        _end(orphans)


def _end(family: Callable[[], list[int]]) -> None:
    deadline, empty = time.monotonic() + STOP, 0
    while empty < GONE and time.monotonic() < deadline:
        found = family()
        empty = 0 if found else empty + 1
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Every process that we may look at, and what it was begun with; none without /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            words = os.fsdecode((process / "environ").read_bytes()).split("\0")
            yield int(process.name), dict(word.split("=", 1) for word in words if "=" in word)


def _identity(pid: int) -> str:
    """A process and when it began, since numbers are given again; the number alone elsewhere."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return str(pid)
    return f"{pid} {stat.rpartition(')')[2].split()[19]}"


def _lives(identity: str) -> bool:
    return _identity(int(identity.split()[0])) == identity


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Neither Ctrl-C nor a closed terminal interrupts for a while."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP are as Ctrl-C for a while: what we began is ended too.

    A hangup that is ignored, as under nohup, stays so.
    """

    def interrupt(*_):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGHUP]
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

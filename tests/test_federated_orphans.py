"""Ending one of Flower's programs ends all that came of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradfilter.federated import processes

# as the workers of a simulation: in a session of their own, and their parent gone
ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
os.wait()
time.sleep(float(sys.argv[2]))
"""
# a command of ours that is about to be killed
LAUNCHER = """
import sys, time
from pathlib import Path
from gradfilter.federated import processes
processes.program = lambda _: sys.executable
processes.start("any", "-c", *sys.argv[2:], "600", home=Path(sys.argv[1]), log=None)
time.sleep(600)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found in /proc")


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a program with an orphan; both."""

    def begin(stays: float) -> tuple[processes.Program, int]:
        monkeypatch.setattr(processes, "program", lambda _: sys.executable)
        told = tmp_path / "orphan"
        process = processes.start("any", "-c", ORPHAN, told, str(stays), home=tmp_path, log=None)
        return process, number_in(told)

    return begin


def number_in(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(path.read_text())


def lives(pid: int) -> bool:
    try:
        return bool((Path("/proc") / str(pid) / "environ").read_bytes())  # a zombie has none
    except OSError:
        return False


@pytest.mark.parametrize("stays", [0, 600])
def test_orphans_end_too(begin, stays):
    process, orphan = begin(stays)
    if not stays:
        process.wait(60)
    assert orphan in process.family()
    processes.stop(process)
    assert not process.family() and process.returncode is not None


def test_ctrl_c_again_does_not_keep_programs_from_ending(begin, monkeypatch):
    process, orphan = begin(0)
    process.wait(60)
    family, pressed = process.family, threading.Event()

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        pressed.set()
        return family()

    monkeypatch.setattr(process, "family", interrupted)
    before = signal.getsignal(signal.SIGINT)
    processes.stop(process)
    assert pressed.is_set() and not lives(orphan)
    assert signal.getsignal(signal.SIGINT) == before


def test_what_a_killed_command_left_ends_before_the_next_one(tmp_path):
    told, home = tmp_path / "orphan", tmp_path / "home"
    line = [sys.executable, "-c", LAUNCHER, home, ORPHAN, told]
    source = str(Path(processes.__file__).parents[2])
    launcher = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": source})
    orphan = number_in(told)
    processes.end_orphans(home)
    assert lives(orphan)  # as long as the command that began it does
    launcher.kill()
    launcher.wait(60)
    processes.end_orphans(tmp_path / "another")
    assert lives(orphan)
    processes.end_orphans(home)
    assert not lives(orphan)

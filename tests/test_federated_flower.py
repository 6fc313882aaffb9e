"""Ending one of Flower's programs ends all that came of it."""

import sys
import time

import pytest

from gradfilter.federated import flower

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


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found in /proc")
@pytest.mark.parametrize("stays", [0, 600])
def test_orphans_end_too(tmp_path, monkeypatch, stays):
    monkeypatch.setattr(flower, "program", lambda _: sys.executable)
    told = tmp_path / "orphan"
    process = flower.start("any", "-c", ORPHAN, str(told), str(stays), home=tmp_path, log=None)
    deadline = time.monotonic() + 60
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not stays:
        process.wait(60)
    orphan = int(told.read_text())
    assert orphan in process.family()
    flower.stop(process)
    assert not process.family() and process.returncode is not None

"""Federated learning by Flower's own processes: simulation, and a deployment on loopback.

A program of Flower's loads torch for every message, so these tests are few and slow.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

import tiny  # noqa: E402
from rounds import rows  # noqa: E402

from gradfilter.federated import flower, keys  # noqa: E402

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent.parent / "src"
QUICK = ["--model", "mobilenet_v2", "--weights", "none", "--size", "32", "--last", "4"]
PATIENCE = 420  # seconds for anything: a busy machine is no failure
# what makes a device's program answer wrongly: no numbers in odd rounds, too few in even ones
MAD = """
import sys

if any("flwr-clientapp" in word for word in sys.orig_argv):
    from flwr.app import ArrayRecord
    from gradfilter.federated import client, exchange

    honest = client.train

    def mad(content, context):
        answer, odd = honest(content, context), content[client.CONFIG]["server-round"] % 2
        arrays = {k: exchange.to_tensor(a) for k, a in answer[client.ARRAYS].items()}
        arrays = {k: t * float("nan") if odd else t[:-1] for k, t in arrays.items()}
        arrays = {k: exchange.to_array(t) for k, t in arrays.items()}
        answer[client.ARRAYS] = ArrayRecord(arrays)
        return answer

    client.train = mad
"""


class Programs:
    """Command lines of ours as processes, ended when the test is."""

    def __init__(self, folder: Path):
        self.folder, self.running = folder, {}

    def start(
        self, name: str, *arguments, before: Path | None = None, **options
    ) -> subprocess.Popen:
        """`before` is a folder whose modules are found first."""
        line = [sys.executable, "-m", "gradfilter", *map(str, arguments)]
        paths = os.pathsep.join(str(p) for p in (before, SOURCE) if p)
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{name}.log", "ab") as log:
            options |= {"cwd": self.folder, "env": env, "stdout": log, "stderr": log}
            process = subprocess.Popen(line, **options)
        self.running[name] = process
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait(self, name: str) -> int:
        """The exit code of a program, and what it said if that takes too long."""
        try:
            return self.running[name].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} goes on and on:\n{self.said(name)}") from None

    def wait_for(self, name: str, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.said(name):
            assert time.monotonic() < deadline, f"{name} never says {text!r}:\n{self.said(name)}"
            assert self.running[name].poll() is None, f"{name} ended:\n{self.said(name)}"
            time.sleep(0.2)

    def kill(self, name: str, program: str) -> None:
        """As by a power cut: the program of Flower's below a command of ours, and all with it."""
        child = self.child(name, program)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        self.running[name].wait(PATIENCE)

    def child(self, name: str, program: str) -> int:
        parent = str(self.running[name].pid)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                words = stat.read_text().rpartition(")")[2].split()
                line = (stat.parent / "cmdline").read_bytes()
                if words[1] == parent and program.encode() in line:
                    return int(stat.parent.name)
        raise AssertionError(f"{name} has no {program}")

    def has(self, name: str, program: str) -> bool:
        try:
            return bool(self.child(name, program))
        except AssertionError:
            return False

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(60)


@pytest.fixture
def programs(tmp_path):
    found = Programs(tmp_path)
    yield found
    found.stop()


@pytest.fixture
def pictures(tmp_path):
    return tiny.photographs(tmp_path / "photos", each=6, size=32)


def left_over(out: Path) -> list[str]:
    """Processes that still have the run's folder as Flower's home."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"FLWR_HOME={out / 'flower'}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().decode(errors="replace"))
    return found


def test_simulation(programs, pictures, tmp_path):
    out = tmp_path / "run"
    line = ["federate", "--simulate", 3, "--data", pictures, *QUICK, "--rounds", 2, "--out", out]
    programs.start("run", *line)
    programs.wait_for("run", "before training")
    assert len(left_over(out)) > 2  # it takes several processes
    assert programs.wait("run") == 0, programs.said("run")
    said = programs.said("run")
    assert "round 1/2: 3 of 3 clients" in said and "round 2/2: 3 of 3 clients" in said
    assert {(r["round"], r["client"]) for r in rows(out)} == {
        (i, part) for i in "12" for part in "012"
    }
    assert json.loads((out / "result.json").read_text())["finished"] is True
    assert not left_over(out)


def test_a_simulation_whose_command_was_killed_goes_on(programs, pictures, tmp_path):
    out = tmp_path / "run"
    line = ["federate", "--simulate", 2, "--data", pictures, *QUICK, "--rounds", 3, "--out", out]
    programs.start("run", *line)
    programs.wait_for("run", "round 1/3")
    programs.running["run"].kill()
    programs.wait("run")
    assert left_over(out)  # what it began goes on, until
    programs.start("again", "federate", "--resume", out)
    assert programs.wait("again") == 0, programs.said("again")
    assert "going on after round" in programs.said("again")
    assert [r["round"] for r in rows(out, "rounds.csv")] == ["0", "1", "2", "3"]
    assert not left_over(out)


def test_deployment(programs, pictures, tmp_path):
    """A key that is not known, a client killed, a late one, one that answers nonsense, a server
    killed and started again."""
    out, port = tmp_path / "run", flower.free_port()
    keys.make(tmp_path / "keys", ["127.0.0.1"], ["a", "b", "late", "mad"])
    (tmp_path / "madness").mkdir()
    (tmp_path / "madness" / "sitecustomize.py").write_text(MAD)
    keys.make(tmp_path / "others", ["127.0.0.1"], ["stranger"])
    stranger = tmp_path / "others" / "stranger"
    (stranger / "ca.pem").write_bytes((tmp_path / "keys" / "ca.pem").read_bytes())
    address = f"127.0.0.1:{port}"
    serve = ["federate-server", "--keys", "keys", "--host", "127.0.0.1", "--port", port]
    programs.start("server", *serve)
    programs.wait_for("server", "mad may take part")

    def join(name: str, folder, part: int, before: Path | None = None) -> None:
        where = ["--server", address, "--keys", folder, "--state", f"{name}-state"]
        parts = ["--part", part, "--parts", 3, "--name", name]
        programs.start(name, "federate-client", *where, *parts, before=before)

    join("stranger", stranger, 0)
    join("a", "keys/a", 0)
    join("b", "keys/b", 1)
    line = ["--server", address, "--keys", "keys", "--data", pictures, *QUICK, "--rounds", 3]
    programs.start("run", "federate", *line, "--out", out)

    programs.wait_for("b", "Start `flwr-clientapp` process")
    programs.kill("b", "flower-supernode")  # in the middle of the first round
    join("late", "keys/late", 2)
    join("mad", "keys/mad", 2, before=tmp_path / "madness")
    assert programs.wait("stranger") != 0
    assert "Failed to activate SuperNode" in programs.said("stranger")

    programs.wait_for("run", "round 2/3")
    programs.kill("server", "flower-superlink")  # in the middle of the third round
    assert programs.wait("run") == 1
    assert f"gradfilter federate --resume {out}" in programs.said("run")
    assert not (out / "result.json").exists()

    programs.start("restarted", *serve)
    programs.wait_for("restarted", "serving on")
    programs.start("again", "federate", "--resume", out)
    assert programs.wait("again") == 0, programs.said("again")
    assert "going on after round 2 of 3" in programs.said("again")

    status = {(r["round"], r["client"]): r["status"] for r in rows(out)}
    assert status["1", "a"] == status["2", "a"] == status["3", "a"] == "used"
    assert status["2", "late"] == status["3", "late"] == "used"
    assert status["2", "mad"].startswith("dropped: an array should be")
    assert status["3", "mad"].startswith("dropped: ") and "no numbers" in status["3", "mad"]
    assert not any("stranger" in client for _, client in status)
    lost = [s for (i, client), s in status.items() if i == "1" and client != "a"]
    assert len(lost) == 1 and lost[0].startswith(("failed", "no answer"))
    assert [r["round"] for r in rows(out, "rounds.csv")] == ["0", "1", "2", "3"]


def runs(out: Path) -> list[str]:
    """The states of all runs of the server that a run was handed to."""
    link = flower.Link("", None, out / "flower")
    return [run["status"] for run in link.flwr("list", flower.CONNECTION)["runs"]]


@pytest.mark.parametrize("moment", ["handing over", "waiting"])
def test_ctrl_c_leaves_no_run_on_the_server(programs, pictures, tmp_path, moment):
    """As a terminal sends it: to all processes of its group."""
    out, port = tmp_path / "run", flower.free_port()
    programs.start("server", "federate-server", "--insecure", "--host", "127.0.0.1", "--port", port)
    programs.wait_for("server", "serving on")
    line = ["--server", f"127.0.0.1:{port}", "--data", pictures, *QUICK, "--out", out]
    run = programs.start("run", "federate", *line, start_new_session=True)
    if moment == "waiting":
        programs.wait_for("run", "waiting for 2 clients")
    else:
        deadline = time.monotonic() + PATIENCE
        while not programs.has("run", "bin/flwr\0run"):
            assert time.monotonic() < deadline and run.poll() is None, programs.said("run")
            time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    assert programs.wait("run") == 130
    assert "on the server too; go on with: gradfilter federate --resume" in programs.said("run")
    assert runs(out) == ["finished:stopped"]

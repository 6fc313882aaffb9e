"""Ctrl-C, and a closed terminal, while a run is on a server."""

import os
import signal
import sys
from contextlib import nullcontext

import pytest

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

from commands import gradfilter  # noqa: E402

from gradfilter.federated import flower, launch, processes  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_networks", "fresh_clients")


class Server:
    """A server that is told to stop runs; `answer` may raise."""

    def __init__(self, home, answer=lambda: {}):
        self.home, self.told, self.answer = home, [], answer

    def flwr(self, *arguments):
        self.told.append(arguments)
        return self.answer()


def press_ctrl_c(*_):
    os.kill(os.getpid(), signal.SIGINT)


def refuse(why):
    def answer():
        raise flower.FlowerError(f"flwr stop: {why}")

    return answer


@pytest.mark.parametrize("moment", ["handing over", "following"])
@pytest.mark.parametrize(
    "answer, told",
    [
        (lambda: {}, "stopped, and run 7 on the server too; go on with"),
        (refuse("no answer"), "run 7 may go on on the server (flwr stop: no answer); stop it with"),
        (refuse("Run is already finished."), "run 7 on the server had ended already; go on with"),
        (press_ctrl_c, "stopped, and run 7 on the server too"),  # it goes on to the end
    ],
)
def test_ctrl_c_stops_the_run_on_the_server(
    photos, tmp_path, monkeypatch, capsys, moment, answer, told
):
    server = Server(tmp_path / "home", answer)

    def submit(both, link):
        if moment == "handing over":
            press_ctrl_c()
        return "7"

    monkeypatch.setattr(launch, "runtime", lambda both: nullcontext(server))
    monkeypatch.setattr(launch, "submit", submit)
    monkeypatch.setattr(launch.Watch, "look", press_ctrl_c)
    line = ["--data", photos, "--server", "x:1", "--out", tmp_path / "run"]
    assert gradfilter("federate", *line) == 130
    assert server.told == [("stop", "7", flower.CONNECTION)]
    err = capsys.readouterr().err
    assert told in err and f"--resume {tmp_path / 'run'}" in err
    by_hand = f"FLWR_HOME={server.home} {processes.program('flwr')} stop 7 {flower.CONNECTION}"
    assert (by_hand in err) == ("stop it with" in told)


def test_ctrl_c_twice_while_a_run_is_handed_over(photos, tmp_path, monkeypatch, capsys):
    def submit(both, link):
        raise KeyboardInterrupt

    server = Server(tmp_path / "home")
    monkeypatch.setattr(launch, "runtime", lambda both: nullcontext(server))
    monkeypatch.setattr(launch, "submit", submit)
    line = ["--data", photos, "--server", "x:1", "--out", tmp_path / "run"]
    assert gradfilter("federate", *line) == 130 and not server.told
    assert "the server may have taken the run just before: FLWR_HOME=" in capsys.readouterr().err


def test_ctrl_c_does_not_reach_the_programs_of_flower(tmp_path, monkeypatch):
    """A terminal sends it to all processes of its group."""
    asked = tmp_path / "flwr"
    asked.write_text(f"#!{sys.executable}\nimport os\nprint(os.getpgid(0))\n")
    asked.chmod(0o700)
    monkeypatch.setattr(flower, "program", lambda name: str(asked))
    found = flower.Link("x:1", None, tmp_path).call("run")
    assert int(found.stdout) != os.getpgid(0)


def test_a_terminal_that_is_closed_is_as_ctrl_c():
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt), processes.terminable():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        with processes.terminable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

"""federate and its companions, as a user meets them."""

import json
import os
import shutil
import signal
import ssl
import sys
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

import tiny  # noqa: E402
from commands import gradfilter, mistake  # noqa: E402

from gradfilter.federated import client, flower, keys, launch, settings  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_networks", "fresh_clients")

QUICK = ["--simulate", 2, "--in-process", "--model", "tiny", "--batch", 6, "--rounds", 2]


def federate(*arguments) -> int:
    return gradfilter("federate", *QUICK, *arguments)


def test_a_run_and_what_can_be_done_with_it(photos, tmp_path, capsys):
    out = tmp_path / "run"
    assert federate("--data", photos, "--out", out, "--split", "non-iid") == 0
    said, err = capsys.readouterr()
    assert "round 2/2: 2 of 2 clients" in said and f"run: {out}" in said
    assert "\x1b" not in said and "whole networks" in said
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["rounds"], written["simulate"], written["split"]) == (2, 2, "non-iid")
    assert gradfilter("evaluate", out) == 0
    found = json.loads((out / "evaluation.json").read_text())
    best = torch.load(out / "best.pt", weights_only=True)["metrics"]
    assert found["pictures"] == 27 and found["top1"] == pytest.approx(best["test_top1"])
    assert gradfilter("predict", out, photos / "test" / "class1" / "0.png") == 0


def test_without_a_name_a_run_gets_a_folder_of_its_own(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert federate("--data", photos, "--rounds", 1) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == [
        "photos-federated",
        "photos-federated-2",
    ]


def test_options_before_the_file_before_the_defaults(photos, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"data": str(photos), "rounds": 5, "server-lr": 0.5}))
    out = tmp_path / "run"
    assert federate("--config", config, "--out", out) == 0
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["rounds"], written["server_lr"], written["mu"]) == (2, 0.5, 0.01)


def test_stop_and_resume(photos, tmp_path, monkeypatch, capsys):
    assert federate("--data", photos, "--out", tmp_path / "whole") == 0
    step, calls = Trainer.step, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert federate("--data", photos, "--out", tmp_path / "run") == 130
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    monkeypatch.setattr(Trainer, "step", step)
    assert gradfilter(*told.strip().partition("gradfilter ")[2].split()) == 0
    assert tiny.same(tiny.weights(tmp_path / "whole"), tiny.weights(tmp_path / "run"))


def test_a_run_goes_on_where_it_was_moved_to(photos, tmp_path, monkeypatch):
    out, moved = tmp_path / "run", tmp_path / "moved"
    assert federate("--data", photos, "--out", out) == 0
    out.rename(moved)
    monkeypatch.chdir(photos.parent)  # the same pictures by another name
    assert gradfilter("federate", "--resume", moved, "--rounds", 3, "--data", photos.name) == 0
    assert json.loads((moved / "result.json").read_text())["rounds"] == 3
    assert not out.exists()


def test_more_rounds_later(photos, tmp_path):
    out = tmp_path / "run"
    assert federate("--data", photos, "--out", out) == 0
    assert gradfilter("federate", "--resume", out, "--rounds", 3) == 0
    assert json.loads((out / "result.json").read_text())["rounds"] == 3


def test_a_run_that_fails_has_an_exit_code(photos, tmp_path, monkeypatch, capsys):
    def diverges(*_):
        raise ValueError("the loss stopped being a number")

    monkeypatch.setattr(client, "train", diverges)
    assert federate("--data", photos, "--out", tmp_path / "run") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the loss stopped being a number" in err
    assert f"--resume {tmp_path / 'run'}" in err


MISTAKES = [
    ("federate", "which pictures? --data"),
    ("federate --data {photos}", "--simulate N clients here, or --server"),
    ("federate --data {photos} --simulate 2 --server x:1", "choose"),
    ("federate --data {photos} --in-process --server x:1", "--simulate N"),
    ("federate --data {photos} --server here", "'here' is not HOST:PORT"),
    ("federate --data {photos} --simulate 2 --cpus 100000", "cpus: 100000 a client, there are"),
    ("federate --data {photos} --simulate 2 --gpus 1000", "gpus: 1000 a client, there are"),
    ("federate --data {photos} --simulate 0", "whole number"),
    ("federate --data {photos} --simulate 2 --strategy fedsgd", "invalid choice"),
    ("federate --data {photos} --simulate 2 --fraction 0", "0 of the clients"),
    ("federate --data {photos} --simulate 2 --strategy fedprox --capture", "no capture"),
    ("federate --data {photos} --simulate 2 --strategy fedadam --norm batch", "norm: frozen"),
    ("federate --data nowhere --simulate 2", "nowhere"),
    ("federate --data {photos} --simulate 2 --method galerkn", "did you mean"),
    ("federate --data {photos} --simulate 2 --in-process --last 99", "last=99"),
    ("federate --data {photos} --simulate 28 --in-process", "27 pictures are too few"),
    ("federate --data {photos} --simulate 2 --in-process --alpha 0", "alpha must be above 0"),
    ("federate --data {photos} --simulate 2 --plan none.yaml", "none.yaml"),
    ("federate --data {photos} --server 127.0.0.1:1 --keys {photos}", "no ca.pem"),
    ("federate --resume {photos}", "holds no run"),
    ("federate --data {photos} --simulate 2 --config {photos}/c.yaml", "c.yaml"),
    ("federate-keys a", "--address"),
    ("federate-keys ../a --address x", "cannot be the name of a device"),
    ("federate-keys .. --address x", "cannot be the name of a device"),
    ("federate-keys a --address server.lan:8000", "no address"),
    ("federate-keys a --address https://server.lan", "no address"),
    ("federate-keys a --address x --days 0", "whole number"),
    ("federate-keys a --address x --days 40000", "1 to 36500 days"),
    ("federate-server", "--keys DIR"),
    ("federate-server --keys {photos}", "has no ca.pem"),
    ("federate-client --server x:1 --part 0", "--keys DIR"),
    ("federate-client --server x:1 --insecure", "which pictures?"),
    ("federate-client --server x --insecure --part 0", "'x' is not HOST:PORT"),
    ("federate-client --server x:1 --insecure --part 2", "part must be 0 to 1"),
    ("federate-client --server x:1 --insecure --data nowhere", "no folder and no data set"),
    ("federate-client --server x:1 --insecure --part 0 --weights none.pt", "none.pt"),
    ("federate-client --server x:1 --keys {photos} --part 0", "no folder of a device"),
]


@pytest.mark.parametrize("asked, says", MISTAKES)
def test_mistakes_get_one_line_and_exit_code_2(asked, says, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert says in mistake(capsys, *asked.format(photos=photos).split())
    assert not list(tmp_path.rglob("last.pt"))


def test_a_resumed_run_keeps_what_it_must(photos, tmp_path, capsys):
    out = tmp_path / "run"
    assert federate("--data", photos, "--out", out) == 0
    capsys.readouterr()
    for option in (["--seed", 5], ["--strategy", "fedadam"], ["--simulate", 3]):
        assert gradfilter("federate", "--resume", out, *option) == 2
        assert "which a resumed run keeps" in capsys.readouterr().err
    assert federate("--data", photos, "--out", out) == 2
    assert "holds a run" in capsys.readouterr().err


def test_a_server_that_is_not_there(photos, tmp_path, capsys):
    out = tmp_path / "run"
    line = ["--data", photos, "--server", f"127.0.0.1:{flower.free_port()}", "--out", out]
    assert gradfilter("federate", *line) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "flwr run" in err and f"--resume {out}" in err


def elsewhere(monkeypatch, **result):
    """Runs go on elsewhere: they say something at once, and end with this result."""

    def submit(both, link):
        out = Path(both[0].out)
        (out / "log.txt").write_text("first words\n")
        (out / "result.json").write_text(json.dumps(result))
        return "7"

    monkeypatch.setattr(launch, "runtime", lambda both: nullcontext())
    monkeypatch.setattr(launch, "submit", submit)


def test_the_end_of_a_run_elsewhere_is_the_exit_code(photos, tmp_path, monkeypatch, capsys):
    line = ["--data", photos, "--simulate", 2]
    for number, result in enumerate(({"finished": True}, {"error": "x", "mistake": False})):
        elsewhere(monkeypatch, **result)
        assert gradfilter("federate", *line, "--out", tmp_path / str(number)) == number
        assert capsys.readouterr().out == "first words\n"
    elsewhere(monkeypatch, finished=False, error="no such network", mistake=True)
    assert "no such network" in mistake(capsys, "federate", *line, "--out", tmp_path / "2")


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
    by_hand = f"FLWR_HOME={server.home} {flower.program('flwr')} stop 7 {flower.CONNECTION}"
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
        with pytest.raises(KeyboardInterrupt), flower.terminable():
            os.kill(os.getpid(), signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        with flower.terminable():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_app_is_one_that_flower_takes(photos, tmp_path):
    from flwr.cli.config_utils import load_and_validate
    from flwr.supercore.object_ref import load_app

    out = tmp_path / "résumé \N{PARTY POPPER}"
    both = settings.of({"data": str(photos), "out": str(out), "simulate": 2, "mean": "1,2,3"})
    app = launch.write_app(both)
    config, warnings = load_and_validate(app / "pyproject.toml", check_module=True)
    found = config["tool"]["flwr"]["app"]["config"]
    assert not warnings
    assert settings.from_config(found, tmp_path / "plan.yaml") == both
    assert load_app("gradfilter_client:app", ImportError, app) is not None


def test_help_names_every_option(capsys):
    assert gradfilter("federate", "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    for name in settings.names():
        assert "--" + name.replace("_", "-") in told
    assert "--cache-features" not in told and "--part " not in told


def test_without_flower(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flwr", None)
    for name in [n for n in sys.modules if n.startswith(("flwr.", "gradfilter.federated."))]:
        monkeypatch.delitem(sys.modules, name)
    assert federate("--data", photos, "--out", tmp_path / "run") == 2
    assert "pip install 'gradfilter[federated]'" in capsys.readouterr().err


def test_the_environment_is_quiet_unless_the_user_wants_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_HOME", "/somewhere/else")  # its config knows nothing of our server
    found = flower.environment(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "1" and found["RAY_USAGE_STATS_ENABLED"] == "0"
    assert found["FLWR_HOME"] == str(tmp_path)


def handshake(context: ssl.SSLContext, folder: Path, name: str) -> None:
    """A TLS connection between two objects in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    pipes = [ssl.MemoryBIO() for _ in range(4)]
    here = context.wrap_bio(pipes[0], pipes[1], server_hostname=name)
    there = server.wrap_bio(pipes[2], pipes[3], server_side=True)
    for _ in range(4):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            finally:
                pipes[2].write(pipes[1].read())
                pipes[0].write(pipes[3].read())
    assert here.version() == "TLSv1.3" and here.getpeercert()


def test_keys(tmp_path, capsys):
    folder = tmp_path / "keys"
    line = ["federate-keys", "pi", "--out", folder, "--address", "10.0.0.7", "server.lan"]
    assert gradfilter(*line) == 0
    for secret in (folder / "ca.key", folder / "server.key", folder / "pi" / "pi.key"):
        assert secret.stat().st_mode & 0o777 == 0o600
    trusting = ssl.create_default_context(cafile=folder / "pi" / "ca.pem")
    for name in ("10.0.0.7", "server.lan", "localhost"):
        handshake(trusting, folder, name)
    for context, name in ((trusting, "other.lan"), (ssl.create_default_context(), "server.lan")):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(context, folder, name)
    before = (folder / "pi" / "pi.key").read_bytes(), (folder / "ca.pem").read_bytes()
    assert gradfilter("federate-keys", "pi", "phone", "--out", folder) == 0
    assert gradfilter(*line) == 0
    assert "not for new.lan" in mistake(capsys, *line, "new.lan")
    assert (folder / "phone" / "ca.pem").read_bytes() == before[1]
    assert before == ((folder / "pi" / "pi.key").read_bytes(), (folder / "ca.pem").read_bytes())


def test_certificates_end_on_a_day_that_is_told(tmp_path, capsys):
    folder, now = tmp_path / "keys", datetime.now(timezone.utc)
    line = ["federate-keys", "pi", "--out", folder]
    assert gradfilter(*line, "--address", "server.lan", "--days", "90") == 0
    for name in ("ca.pem", "server.pem", "pi/ca.pem"):
        assert abs(keys.ends(folder / name) - now - timedelta(days=90)) < timedelta(minutes=5)
    day = f"certificates end on {keys.ends(folder / 'server.pem'):%Y-%m-%d}\n"
    assert capsys.readouterr().out.endswith(day)
    assert gradfilter(*line) == 0
    assert capsys.readouterr().out.endswith(day)
    assert "are there already, and end on" in mistake(capsys, *line, "--days", "9")
    keys.make(tmp_path / "usual", ["server.lan"], [])
    end = keys.ends(tmp_path / "usual" / "server.pem")
    assert abs(end - now - timedelta(days=365)) < timedelta(minutes=5)
    keys.make(tmp_path / "short", ["server.lan"], [], days=20)
    assert "to renew" in keys.told(tmp_path / "short") and "to renew" not in keys.told(folder)


def test_certificates_that_have_ended(photos, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "keys"
    past = lambda hours=0, days=0: timedelta(days=-1 if days else 2)  # noqa: E731
    monkeypatch.setattr(keys, "timedelta", past)
    keys.make(folder, ["127.0.0.1"], ["pi"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flower, "start", lambda *_, **__: pytest.fail("it was started"))
    where = ["--server", "127.0.0.1:1", "--data", photos]
    for line in (
        ["federate-server", "--host", "127.0.0.1", "--port", flower.free_port(), "--keys", folder],
        ["federate-client", *where, "--keys", folder / "pi"],
        ["federate", *where, "--keys", folder, "--out", tmp_path / "run"],
    ):
        told = mistake(capsys, *line)
        assert "ended on" in told and "to renew" in told


def test_certificates_are_renewed_and_devices_keep_their_keys(tmp_path):
    folder = tmp_path / "keys"
    keys.make(folder, ["server.lan"], ["pi", "moved"])
    shutil.move(folder / "moved", tmp_path / "moved")
    before = {p: p.read_bytes() for p in (folder / "pi" / "pi.key", folder / "pi.pub")}
    old = (folder / "ca.pem").read_bytes()
    for path in [*folder.glob("ca.*"), *folder.glob("server.*")]:
        path.unlink()
    assert gradfilter("federate-keys", "--out", folder, "--address", "server.lan") == 0
    assert all(p.read_bytes() == content for p, content in before.items())
    assert (folder / "pi" / "ca.pem").read_bytes() == (folder / "ca.pem").read_bytes() != old
    assert (folder / "moved" / "ca.pem").exists()
    handshake(ssl.create_default_context(cafile=folder / "pi" / "ca.pem"), folder, "server.lan")

"""federate and its companions, as a user meets them."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

import tiny  # noqa: E402
from commands import gradfilter, mistake  # noqa: E402

from gradfilter.federated import client, flower, launch, processes, settings  # noqa: E402
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
    found = processes.environment(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "1" and found["RAY_USAGE_STATS_ENABLED"] == "0"
    assert found["FLWR_HOME"] == str(tmp_path)

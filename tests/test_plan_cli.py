"""gradfilter plan, as a user meets it."""

import shlex
from dataclasses import replace

import pytest
import yaml
from commands import gradfilter, mistake

from gradfilter.plan import Plan

pytestmark = pytest.mark.usefixtures("quick_stopwatch")


def run(command):
    return gradfilter("plan", *command.split())


def test_the_command_plans_and_train_takes_the_plan(tiny_networks, photos, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "plan.yaml"
    data = f"--data {photos} --size 16 --device cpu"
    code = run(f"mobilenet_v2 --memory 30KB {data} --batch 4 --save {saved} --out {tmp_path}/o")
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "measured / budget" in out.out and str(saved) in out.out
    assert "not written" not in out.out
    assert {p.name for p in (tmp_path / "o").iterdir()} == {
        "plan.yaml",
        "report.json",
        "report.png",
    }
    plan = Plan.load(saved)
    told = next(line for line in out.out.splitlines() if line.startswith(f"plan: {saved}"))
    command = shlex.split(told.partition("train with it: gradfilter ")[2])
    assert gradfilter(*command, "--epochs", 1, "--out", tmp_path / "run") == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (kept["model"], kept["batch"], kept["size"]) == ("mobilenet_v2", 4, 16)
    used = Plan.load(tmp_path / "run" / "plan.yaml")
    assert used.converted == plan.converted and used.frozen == plan.frozen


def test_a_plan_over_the_budget_is_written_and_ends_with_1(
    tiny_networks, photos, tmp_path, monkeypatch, capsys
):
    from gradfilter.planning import outcome

    held = outcome.Outcome.held
    more = lambda self, model: replace(held(self, model), kept=40 * 1024)  # noqa: E731
    monkeypatch.setattr(outcome.Outcome, "held", more)
    saved = tmp_path / "plan.yaml"
    line = f"mobilenet_v2 --memory 30KB --data {photos} --size 16 --device cpu --save {saved}"
    assert run(line) == 1
    out = capsys.readouterr()
    assert Plan.load(saved) and str(saved) in out.out
    assert out.err.count("\n") == 1 and "KB of memory over the budget of 30 KB" in out.err


def test_the_command_without_data_says_what_it_weighs(capsys):
    pytest.importorskip("timm")
    code = run("squeezenet1_1 --memory 8MB --size 64 --batch 2 --pictures 2 --device cpu")
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "random weights, noise as pictures" in out.out
    assert "the plan was not written: --save plan.yaml keeps it" in out.out


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("mobilenet_v2", "give a budget: --memory, --time or both"),
        ("mobilnet_v2 --memory 8MB", "near names: mobilenet_v2"),
        ("mobilenet_v2 --memory 8MB --data nowhere/", "nowhere"),
        ("mobilenet_v2 --memory 8MB --methods galerkin:grid=x", "NAME:KNOB=NUMBER"),
        ("mobilenet_v2 --memory 8MB --methods galerkn", "did you mean galerkin"),
        ("inception_v3 --memory 8MB --size 16", "cannot take 16x16 images"),
        ("squeezenet1_1 --memory 1KB --size 64 --pictures 2", "gradfilter plan: a memory"),
        ("squeezenet1_1 --memory 1KB --size 64 --pictures 2", "smallest possible is"),
    ],
)
def test_mistakes_are_told_in_one_line(command, told, capsys):
    pytest.importorskip("timm")
    assert told in mistake(capsys, "plan", *command.split())


def test_an_amount_that_is_none_is_told_at_once(capsys):
    assert "64XB" in mistake(capsys, "plan", "mobilenet_v2", "--memory", "64XB")


def test_an_empty_folder_is_told(tmp_path, capsys):
    pytest.importorskip("timm")
    (tmp_path / "cats").mkdir()
    mistake(capsys, "plan", "mobilenet_v2", "--memory", "8MB", "--data", tmp_path)


def test_a_folder_that_is_not_there_is_told_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gradfilter.plan", lambda *_, **__: pytest.fail("it was planned"))
    saved = tmp_path / "nowhere" / "plan.yaml"
    asked = ["squeezenet1_1", "--memory", "8MB", "--size", "64", "--save", saved]
    assert f"--save: there is no folder {saved.parent}" in mistake(capsys, "plan", *asked)

"""gradfilter compare, as a user meets it: trained, measured, stopped, gone on with."""

import csv
import io
import json
import os
import shlex
import signal

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("rich")

import tiny  # noqa: E402
from commands import gradfilter, mistake  # noqa: E402

import gradfilter as gf  # noqa: E402
from gradfilter.recipes import comparing, models, recording, training  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402

RUNS = 8  # of QUICK: two methods, two depths, two seeds
QUICK = ["--model", "still", "--batch", 6, "--epochs", 2, "--lr", 1, "--no-tensorboard"]
QUICK += ["--methods", "exact", "galerkin:patch=2", "--last", 2, "all", "--seeds", 0, 1]


def compare(photos, out, *arguments) -> int:
    return gradfilter("compare", "--data", photos, "--out", out, *QUICK, *arguments)


def numbers(out) -> dict:
    return json.loads((out / comparing.NUMBERS).read_text())


def scores(out) -> dict[str, list[float]]:
    return {e["name"]: e["scores"] for e in numbers(out)["entries"]}


@pytest.fixture
def steps(monkeypatch):
    """Counts the steps that are taken."""
    taken, step = [], Trainer.step

    def counted(trainer, *args):
        taken.append(trainer.settings.method)
        return step(trainer, *args)

    monkeypatch.setattr(Trainer, "step", counted)
    return taken


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """A comparison that went through, with the networks of `tiny_networks`."""
    out, threads = tmp_path_factory.mktemp("compare") / "comparison", torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build", tiny.build)
        patch.setattr(training.Run, "_draw", lambda run, headline: None)
        assert compare(photos, out) == 0
    torch.set_num_threads(threads)
    return out


def test_all_runs_are_trained_and_written(finished):
    found = numbers(finished)
    assert found["counts"] == {"done": RUNS, "failed": 0, "started": 0, "waiting": 0}
    assert [e["name"] for e in found["entries"]] == [
        "exact-last2", "exact-all", "galerkin-patch2-last2", "galerkin-patch2-all"
    ]  # fmt: skip
    assert all(len(e["scores"]) == 2 for e in found["entries"])
    rows = list(csv.DictReader(io.StringIO((finished / comparing.LINES).read_text())))
    assert len(rows) == RUNS and {r["seed"] for r in rows} == {"0", "1"}
    page = (finished / comparing.PAGE).read_text()
    assert page.startswith("<!doctype html>") and "galerkin patch=2" in page


def test_a_run_is_that_of_gradfilter_train(finished, photos, tmp_path, tiny_networks):
    entry = next(e for e in numbers(finished)["entries"] if e["name"] == "galerkin-patch2-last2")
    run = entry["runs"][1]
    assert gradfilter(*shlex.split(run["command"])[1:], "--out", tmp_path / "run") == 0
    alone = tiny.weights(tmp_path / "run")
    assert tiny.same(alone, tiny.weights(finished / run["folder"]))
    assert run["rows"][-1]["test_top1"] == recording.read_metrics(tmp_path / "run")[-1]["test_top1"]


def test_masks_are_compared_by_their_own_metric(scenes, tmp_path, tiny_networks):
    few = ["--methods", "exact", "galerkin:patch=2", "--last", "all"]
    assert compare(scenes, tmp_path / "c", *few) == 0
    found = numbers(tmp_path / "c")
    assert found["metric"] == "miou" and found["counts"]["done"] == 4
    noise = {e["name"]: (e["noise"], e["deviation"]) for e in found["entries"]}
    exact, other = noise["exact-all"], noise["galerkin-patch2-all"]
    assert other[0] == pytest.approx(2 * ((exact[1] ** 2 + other[1] ** 2) / 2) ** 0.5)


def test_costs_are_those_of_the_instruments(finished, photos):
    entry = next(e for e in numbers(finished)["entries"] if e["name"] == "exact-last2")
    trained = tiny.build("still", 3).model
    gf.convert(trained, gf.Exact(), last=2, norm="frozen")
    counted = gf.cost(trained, torch.zeros(6, 3, tiny.SIZE, tiny.SIZE))
    measured = entry["measured"]
    assert measured["pictures"] == 6  # the batch
    assert measured["backward_macs"] == counted.total.backward_macs
    assert measured["kept_bytes"] == counted.total.kept_bytes
    layers = measured["layers"]
    assert sum(r["kept_bytes"] + r["beside_bytes"] for r in layers) == measured["kept_bytes"]
    assert [r["name"] for r in layers if r["trained"]] == ["3", "5", "9"]
    assert measured["gradient"] is None and layers[0]["weight"] is None


def test_gradients_are_judged_where_they_are_filtered(finished):
    entry = next(e for e in numbers(finished)["entries"] if e["name"] == "galerkin-patch2-all")
    assert 0 < entry["measured"]["gradient"]["cosine"] < 1
    first, *_, last = entry["measured"]["layers"]
    assert 0 < first["weight"]["cosine"] < 1 and first["input"] is None
    exact = next(e for e in numbers(finished)["entries"] if e["name"] == "exact-all")
    assert entry["costs"]["kept_bytes"] < exact["costs"]["kept_bytes"]
    assert entry["costs"]["backward_macs"] < exact["costs"]["backward_macs"]


def test_what_is_done_is_not_done_again(finished, photos, tiny_networks, steps, capsys):
    before = (finished / comparing.MEASURED).read_bytes()
    assert compare(photos, finished) == 0
    assert steps == [] and "0 of 8 runs to train" in capsys.readouterr().out
    assert (finished / comparing.MEASURED).read_bytes() == before


def test_ctrl_c_and_the_same_command_goes_on(
    finished, photos, tmp_path, tiny_networks, monkeypatch, capsys
):
    step, taken = Trainer.step, []

    def interrupted(trainer, *args):
        taken.append(1)
        if len(taken) == 33:  # in the fourth run of ten steps
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer, *args)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert compare(photos, tmp_path / "c") == 130
    assert "the same command goes on" in capsys.readouterr().err
    found = numbers(tmp_path / "c")
    assert found["counts"] == {"done": 3, "failed": 0, "started": 0, "waiting": 5}
    assert found["reference"] is None and found["verdicts"] == []
    monkeypatch.setattr(Trainer, "step", step)
    assert compare(photos, tmp_path / "c") == 0
    assert len(taken) == 33
    assert scores(tmp_path / "c") == scores(finished)


def test_more_seeds_and_methods_join_in(finished, photos, tmp_path, tiny_networks, steps):
    out, few = tmp_path / "c", ["--methods", "exact", "--last", "all", "--seeds", 0]
    assert compare(photos, out, *few) == 0
    assert len(steps) == 10
    assert compare(photos, out) == 0
    assert len(steps) == 10 * RUNS
    assert scores(out) == scores(finished)


def test_a_plan_is_compared_with_methods(photos, tmp_path, tiny_networks):
    saved = gf.convert(tiny.build("still", 3).model, gf.GalerkinFilter(patch=2), last=1)
    saved.save(tmp_path / "mine.yaml")
    asked = ["--methods", "exact", f"plan:{tmp_path / 'mine.yaml'}", "--last", "all"]
    assert compare(photos, tmp_path / "out", *asked, "--seeds", 0) == 0
    exact, planned = numbers(tmp_path / "out")["entries"]
    assert (planned["title"], planned["depth"]) == ("plan mine", "as planned")
    trained = [[row["trained"] for row in e["measured"]["layers"]] for e in (exact, planned)]
    assert all(trained[0]) and sum(trained[1]) < len(trained[1])


def test_the_command_of_a_comparison_with_plans_trains_the_same(photos, tmp_path, tiny_networks):
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text("'*': {method: galerkin, patch: 2}\n")
    asked = ["--methods", "exact", f"plan:{file}", "--last", 2, "--seeds", 0]
    assert compare(photos, out, *asked) == 0
    before = list(scores(out))
    assert gradfilter(*shlex.split(numbers(out)["command"])[1:], "--no-tensorboard") == 0
    assert list(scores(out)) == before
    rows = list(csv.DictReader(io.StringIO((out / comparing.LINES).read_text())))
    assert [row["last"] for row in rows] == ["2", "as planned"]


def test_a_plan_that_is_written_anew_on_the_way_is_trained_as_it_was(
    photos, tmp_path, tiny_networks, monkeypatch
):
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text("'*': {method: galerkin, patch: 2}\n")
    step = Trainer.step

    def spoiling(trainer, *args):
        file.write_text("'*': {method: hosvd, energy: 0.8}\n")
        return step(trainer, *args)

    monkeypatch.setattr(Trainer, "step", spoiling)
    assert compare(photos, out, "--methods", f"plan:{file}", "--seeds", 0, 1) == 0
    (planned,) = numbers(out)["entries"]
    for run in planned["runs"]:
        methods = gf.Plan.load(out / run["folder"] / recording.PLAN).converted.values()
        assert set(methods) == {gf.GalerkinFilter(patch=2)}


def test_a_run_that_diverges_is_shown_and_the_others_go_on(
    photos, tmp_path, tiny_networks, monkeypatch, capsys
):
    step = Trainer.step

    def diverging(trainer, batch, number, rate):
        if trainer.settings.method == "galerkin" and trainer.settings.seed == 1 and number == 7:
            trainer.healthy.fill_(False)
            trainer.check(number)
        return step(trainer, batch, number, rate)

    monkeypatch.setattr(Trainer, "step", diverging)
    assert compare(photos, tmp_path / "c") == 0
    found = numbers(tmp_path / "c")
    assert found["counts"] == {"done": 6, "failed": 2, "started": 0, "waiting": 0}
    run = next(e for e in found["entries"] if e["name"] == "galerkin-patch2-all")["runs"][1]
    assert run["failure"].startswith("the loss or its gradient stopped being a number at step 8")
    assert "go on with" not in run["failure"] and len(run["rows"]) == 2
    assert "galerkin patch=2, all layers, seed 1: failed: the loss" in capsys.readouterr().out
    assert not any(v["entry"].startswith("galerkin") for v in found["verdicts"])


def test_other_settings_need_another_folder(finished, photos, tiny_networks, capsys):
    assert compare(photos, finished, "--epochs", 3) == 2
    err = capsys.readouterr().err
    assert "holds a comparison with epochs: 2, now 3; change --out" in err
    assert err.count("\n") == 1


MISTAKES = [
    ("--data {empty} --model squeezenet1_1", "{empty}: needs two folders of pictures"),
    ("--data {photos} --model squeezenet1_11 --weights none", "near names: squeezenet1_1"),
    ("--data {photos} --model alexnet --weights none --size 16", "alexnet cannot take 16x16"),
    ("--data {photos} --model alexnet --weights none --size 64 --last 99", "last=99"),
    ("--data {photos} --methods galerkn", "did you mean galerkin?"),
    ("--data {photos} --last 0", "neither a whole number >= 1 nor all"),
    ("--data {photos} --seeds -1", "whole number >= 0"),
    ("--data {photos} --config {config}", "compare does not take method"),
    ("--data nowhere", "'nowhere' is no folder and no data set"),
    ("", "which pictures?"),
    ("--data {photos} --model alexnet --weights none --out /dev/null/x", "/dev/null/x"),
]


@pytest.mark.parametrize("asked, says", MISTAKES)
def test_mistakes_get_one_line_and_exit_code_2(asked, says, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    places = {"photos": photos, "empty": tmp_path / "empty", "config": tmp_path / "c.yaml"}
    places["empty"].mkdir()
    places["config"].write_text("method: exact\n")
    err = mistake(capsys, "compare", *asked.format(**places).split())
    assert says.format(**places) in err
    assert not (tmp_path / "comparison").exists()


def test_torchrun_is_refused(photos, tmp_path, tiny_networks):
    from gradfilter.recipes.settings import Settings

    def child(rank: int) -> None:
        with pytest.raises(ValueError, match="without torchrun"):
            comparing.compare(
                Settings(data=str(photos)), ["exact"], [None], [0], out=tmp_path, quiet=True
            )

    assert tiny.forked(child, processes=2) == [0, 0]

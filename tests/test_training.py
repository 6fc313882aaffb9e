"""Runs: what they write, what they learn, and that the seed decides everything."""

import csv
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("rich")

import tiny  # noqa: E402

import gradfilter as gf  # noqa: E402
from gradfilter.recipes import report  # noqa: E402
from gradfilter.recipes.loading import Changed, InTurn, Shuffled, loader  # noqa: E402
from gradfilter.recipes.parallel import World  # noqa: E402
from gradfilter.recipes.settings import Settings  # noqa: E402
from gradfilter.recipes.trainer import Trainer, rate  # noqa: E402
from gradfilter.recipes.training import Run, train  # noqa: E402

CPU = torch.device("cpu")
DRAW = Run._draw
pytestmark = pytest.mark.usefixtures("tiny_networks")


def test_a_run_writes_its_folder(photos, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(Run, "_draw", DRAW)
    result = tiny.go(photos, tmp_path / "run", tensorboard=True)
    files = {p.name for p in (tmp_path / "run").iterdir()}
    assert files >= {"config.yaml", "plan.yaml", "metrics.csv", "best.pt", "last.pt"}
    assert files >= {"curves.png", "confusion.png", "tensorboard"}
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["epoch"]) for row in rows] == [0, 1, 2, 3]
    assert [float(r["test_top1"]) for r in rows] == pytest.approx(
        [r["test_top1"] for r in result.rows]
    )
    assert next((tmp_path / "run" / "tensorboard").iterdir()).stat().st_size > 200
    best = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert best["metrics"] == result.best and best["classes"] == ["class0", "class1", "class2"]
    assert isinstance(gf.Plan.load(tmp_path / "run" / "plan.yaml"), gf.Plan)


def test_a_run_learns(photos, tmp_path):
    result = tiny.go(photos, tmp_path / "run", model="still", epochs=20, lr=4, augment="none")
    assert result.before < 0.7 and result.after > 0.9
    assert result.rows[-1]["train_loss"] < 0.5 * result.rows[1]["train_loss"]


def test_segmentation_learns(scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_draw", DRAW)
    result = tiny.go(scenes, tmp_path / "run", model="still", epochs=25, lr=4, augment="light")
    assert result.headline == "miou" and result.after > 0.8 > result.before
    assert (tmp_path / "run" / "predictions.png").exists()


def test_the_seed_decides_everything(photos, tmp_path):
    runs = {name: tmp_path / name for name in "abc"}
    for name, seed in zip(runs, (1, 1, 2), strict=True):
        torch.manual_seed(seed + len(name))
        tiny.go(photos, runs[name], seed=seed, epochs=1)
    a, b, c = (tiny.weights(out) for out in runs.values())
    assert tiny.same(a, b) and not tiny.same(a, c)


def test_workers_change_nothing(photos, tmp_path):
    for workers in (0, 2):
        tiny.go(photos, tmp_path / str(workers), workers=workers, epochs=1)
    assert tiny.same(*(tiny.weights(tmp_path / name) for name in ("0", "2")))


def test_the_order_of_an_epoch():
    alone = World(CPU)
    whole = list(Shuffled(10, 4, 0, range(6), alone))
    assert [len(b) for b in whole] == [4, 4, 2, 4, 4, 2]
    for epoch in (0, 1):
        seen = [key for batch in whole[3 * epoch : 3 * epoch + 3] for key in batch]
        assert sorted(seen) == [(epoch, i) for i in range(10)]
    assert [i for _, i in sum(whole[:3], [])] != [i for _, i in sum(whole[3:], [])]
    assert list(Shuffled(10, 4, 0, range(4, 6), alone)) == whole[4:]
    assert list(Shuffled(10, 4, 1, range(6), alone)) != whole


def test_a_last_batch_of_one_picture_may_be_left_out():
    pairs = list(Shuffled(9, 4, 0, range(4), World(CPU), fewest=2))
    assert [len(b) for b in pairs] == [4, 4, 4, 4]
    assert [{epoch for epoch, _ in b} for b in pairs] == [{0}, {0}, {1}, {1}]
    assert len(list(Shuffled(10, 4, 0, range(3), World(CPU), fewest=2))[2]) == 2


@pytest.mark.parametrize("norm, steps", [("batch", 2), ("frozen", 3)])
def test_batch_statistics_are_never_those_of_one_picture(
    photos, tmp_path, monkeypatch, capsys, norm, steps
):
    """27 pictures, 13 a step: one is left, of which torch would refuse maps of one pixel."""
    seen = set()
    step = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda self, b, *rest: (seen.add(len(b[1])), step(self, b, *rest))
    )
    chosen = tiny.settings(photos, tmp_path / "run", norm=norm, batch=13, epochs=2)
    result = train(chosen)
    assert [row["step"] for row in result.rows] == [0, steps, 2 * steps]
    assert seen == ({13} if norm == "batch" else {13, 1})
    told = " ".join(capsys.readouterr().out.split())
    assert ("every epoch leaves one picture out" in told) == (norm == "batch")


def test_batch_statistics_need_two_pictures(photos, tmp_path):
    with pytest.raises(ValueError, match="one picture is too few: 2 or more"):
        tiny.go(photos, tmp_path / "run", norm="batch", batch=1)
    assert not (tmp_path / "run" / "config.yaml").exists()
    front = {"norm": "batch", "batch": 1, "last": 1}  # its batch norm is in the frozen front
    assert len(tiny.go(photos, tmp_path / "front", steps=2, **front).rows) == 2


def test_a_picture_changes_by_seed_epoch_and_number_alone():
    drawn = lambda image, target: (torch.rand(3), target)  # noqa: E731
    dataset = Changed([(None, 0)] * 4, drawn, seed=5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = dataset[1, 2][0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(dataset[1, 2][0], first)
    others = [dataset[0, 2], dataset[1, 3], Changed([(None, 0)] * 4, drawn, seed=6)[1, 2]]
    assert not any(torch.equal(first, other[0]) for other in others)


def test_a_loader_hands_on_mistakes(photos):
    def broken(image, target):
        raise ValueError("this one")

    dataset = Changed([(None, 0)] * 3, broken, 0)
    (batch,) = loader(dataset, InTurn(3, 3, World(CPU)), World(CPU), workers=1)
    assert isinstance(batch, ValueError) and str(batch) == "this one"


def test_the_rate_rises_and_falls():
    s = Settings(lr=0.1, warmup=0.2)
    rates = [rate(step, 50, s, 64) for step in range(51)]
    assert max(rates) == rates[10] == 0.05  # half the reference batch
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0 and rates[30] == pytest.approx(0.025) and rates[50] == pytest.approx(0)


def test_a_part_of_the_data(photos, tmp_path):
    chosen = []
    for part in (0, 1):
        out = tmp_path / str(part)
        split = {"split": "non-iid", "parts": 2, "part": part, "per_part": 1, "seed": part}
        result = tiny.go(photos, out, epochs=1, **split)
        chosen.append(json.loads((out / "split.json").read_text()))
        assert result.rows[-1]["step"] == -(-len(chosen[-1]["train"]) // 6)
    assert not set(chosen[0]["train"]) & set(chosen[1]["train"])
    assert len(chosen[0]["train"]) + len(chosen[1]["train"]) == 27
    assert len(chosen[0]["test"]) == 18  # its own two classes of three


def test_masks_cannot_be_split_by_class(scenes, tmp_path):
    with pytest.raises(ValueError, match="masks have none; --split iid works"):
        tiny.go(scenes, tmp_path / "run", split="dirichlet")
    tiny.go(scenes, tmp_path / "run", split="iid", epochs=1)


def test_train_goes_on_from_the_weights_of_another_run(photos, tmp_path):
    tiny.go(photos, tmp_path / "before", method="exact", epochs=2)
    result = tiny.go(
        photos, tmp_path / "after", weights=str(tmp_path / "before" / "best.pt"), epochs=1
    )
    best = torch.load(tmp_path / "before" / "best.pt", weights_only=True)["metrics"]
    assert result.rows[0]["test_loss"] == pytest.approx(best["test_loss"])


def test_a_plan_file(photos, tmp_path):
    (tmp_path / "plan.yaml").write_text(
        "'0': frozen\n'[35]': {method: gradient-filter, patch: 2}\n"
    )
    result = tiny.go(photos, tmp_path / "run", plan=str(tmp_path / "plan.yaml"), epochs=1)
    assert result.plan.frozen == ["0"]
    assert set(result.plan.converted.values()) == {gf.GradientFilter(patch=2)}
    (tmp_path / "plan.yaml").unlink()  # the run has its own copy
    again = tiny.go_on(tmp_path / "run", epochs=2)
    assert again.plan.frozen == ["0"] and again.rows[-1]["step"] == 10


def test_last_trains_only_the_end(photos, tmp_path):
    torch.manual_seed(0)
    start = tiny.build("tiny", 3).model.state_dict()
    tiny.go(photos, tmp_path / "run", last=1)
    after = tiny.weights(tmp_path / "run")
    moved = {name for name in after if not torch.equal(after[name], start[name])}
    assert moved == {"5.weight", "5.bias", "10.weight", "10.bias"}


def test_nothing_random_happens_in_the_frozen_part():
    trainer = Trainer(Settings(model="wild", last=1), "classification", ("a", "b"))
    drops = [m.training for m in trainer.model if isinstance(m, torch.nn.Dropout)]
    assert drops == [False, True]
    trainer.outputs(trainer.noise(1))
    assert [m.training for m in trainer.model if isinstance(m, torch.nn.Dropout)] == drops


def test_bfloat16(photos, tmp_path):
    result = tiny.go(photos, tmp_path / "run", amp=True)
    exact = tiny.go(photos, tmp_path / "exact")
    assert result.rows[-1]["test_loss"] == pytest.approx(exact.rows[-1]["test_loss"], rel=0.05)
    assert result.rows[-1]["test_loss"] != exact.rows[-1]["test_loss"]


def test_what_a_run_gains_is_measured_without_touching_it(photos, tmp_path, capsys):
    tiny.go(photos, tmp_path / "plain", epochs=5)
    result = train(tiny.settings(photos, tmp_path / "run", epochs=5, compare=True))
    assert result.gain.exact_kept > result.gain.kept > 0
    assert "top1" in (said := capsys.readouterr().out) and "exact" in said.splitlines()[-2]
    assert tiny.same(tiny.weights(tmp_path / "plain"), tiny.weights(tmp_path / "run"))


def test_another_loop_can_drive_a_trainer(photos):
    from gradfilter.recipes.datasets import open_data

    data = open_data(str(photos))
    trainer = Trainer(Settings(model="still", batch=9, lr=1.0), data.task, data.classes)
    before, _ = trainer.evaluate(data.test)
    assert list(trainer.steps(data.train, range(12), total=12)) == [*range(1, 13)]
    after, _ = trainer.evaluate(data.test)
    assert after["loss"] < before["loss"]


def test_all_but_the_output_layer_may_learn_more_slowly(photos):
    from gradfilter.recipes.datasets import open_data

    data, moved = open_data(str(photos)), []
    for share in (1.0, 0.25):
        settings = Settings(model="still", batch=9, lr=1.0, weight_decay=0.0, backbone_lr=share)
        trainer = Trainer(settings, data.task, data.classes)
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        list(trainer.steps(data.train, range(1), total=4))
        own = trainer.model.named_parameters()
        moved.append({n: p.detach() - before[n] for n, p in own if p.requires_grad})
    full, part = moved
    head = {n for n, t in full.items() if len(t) == len(data.classes)}
    assert head and len(full) > len(head)
    for name, step in full.items():
        torch.testing.assert_close(part[name], step * (1.0 if name in head else 0.25))
    assert all(step.any() for step in full.values())


@pytest.mark.parametrize("after, gained", [(0.6, True), (0.5, False), (0.2, False)])
def test_a_run_that_gained_nothing_says_so(after, gained):
    rows = [
        {"epoch": i, "step": i, "test_top1": top1, "test_loss": 1.0}
        for i, top1 in enumerate((0.5, after))
    ]
    told = report.summary(report.Result(Path("run"), "top1", rows, rows[1], 1.0, None, gf.Plan()))
    assert ("nothing gained" in told) == (not gained)


def test_a_run_that_could_gain_nothing_gets_no_advice():
    rows = [{"epoch": i, "step": i, "test_top1": 1.0, "test_loss": 1.0} for i in range(2)]
    told = report.summary(report.Result(Path("run"), "top1", rows, rows[1], 1.0, None, gf.Plan()))
    assert "all was right before training" in told and "train more" not in told


@pytest.mark.parametrize(
    "frozen, greets, advises",
    [
        ([], "4 of 4 layers trained, all exactly", "smaller --lr, or fewer layers with --last"),
        (["?"], "1 of 4 layers trained", "of 4 layers only 10 was trained; train more, with"),
        (["*"], "0 of 4 layers trained, only norms", "no layer was trained; train more, with"),
    ],
)
def test_a_plan_that_freezes_almost_everything(
    photos, tmp_path, monkeypatch, capsys, frozen, greets, advises
):
    plan = {"*": {"method": "exact"}} | dict.fromkeys(frozen, "frozen")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr(report.Result, "after", 0.0)
    train(tiny.settings(photos, tmp_path / "run", plan=str(tmp_path / "plan.json"), steps=1))
    told = " ".join(capsys.readouterr().out.split())
    assert greets in told and f"nothing gained: {advises}" in told.replace("try a ", "")


def test_a_plan_that_freezes_everything_is_refused(photos, tmp_path):
    model = tiny.build("tiny", 3).model
    names = [name for name, _ in model.named_modules()]
    plan = gf.convert(model, {"*": "frozen"})
    gf.Plan(plan.entries, names).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="the plan freezes everything"):
        tiny.go(photos, tmp_path / "run", plan=str(tmp_path / "plan.json"))

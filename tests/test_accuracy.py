"""The accuracy benchmark: its rows, its plans, its tables, and one row run on made pictures."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("timm")
import torch  # noqa: E402
from PIL import Image  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import accuracy  # noqa: E402
import runs  # noqa: E402


def test_rows_have_names_of_their_own_and_the_telling_ones_come_first():
    rows = accuracy.rows()
    assert len({r.name for r in rows}) == len(rows)
    assert all(r.last is None and r.data != "camvid" for r in rows[:108])
    assert {r.data for r in rows[108:132]} == {"camvid"}


def test_a_plan_is_exact_from_one_layer_on_and_coarse_on_the_large_maps():
    names = ["encoder.features.0.0", "encoder.features.7.conv.2", "decoder.narrow", "decoder.conv"]
    plan = accuracy.plan_of(names, exact_from="decoder.conv", fine=2, coarse=4)
    assert list(plan.values()) == [
        {"method": "galerkin", "patch": 4},
        {"method": "galerkin", "patch": 2},
        {"method": "galerkin", "patch": 2},
        {"method": "exact"},
    ]


def test_the_blocks_that_count_as_early_can_be_chosen():
    names = ["encoder.features.9.conv.2", "encoder.features.10.conv.2"]
    plan = accuracy.plan_of(names, exact_from=None, fine=2, coarse=1, early=10)
    assert [layer["patch"] for layer in plan.values()] == [1, 2]


def test_every_row_is_run_at_every_rate(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(accuracy.runs, "run_all", lambda runs, args: taken.extend(runs))
    options = ["--lr", "0.05", "0.02", "--backbone-lr", "1", "0.1"]
    folders = ["--shared", str(tmp_path), "--results", str(tmp_path)]
    assert accuracy.main([*folders, *options, "--only", "pets-mobilenet_v2-all-exact-seed0"]) == 0
    rates = [(run.settings.lr, run.settings.backbone_lr) for run in taken]
    assert rates == [(0.05, 1.0), (0.05, 0.1), (0.02, 1.0), (0.02, 0.1)]
    assert len({run.path for run in taken}) == 4


def test_rows_are_chosen_by_name_and_rate_in_the_order_asked_for(capsys):
    one, other = "pets-mobilenet_v2-last4-asi-seed1", "pets-mobilenet_v2-all-exact-seed0"
    options = ["--list", "--backbone-lr", "1", "0.1"]
    assert accuracy.main([*options, "--only", f"{one}$", f"{other}-backbone", one]) == 0
    listed = capsys.readouterr().out.split()
    assert listed == [one, f"{other}-backbone0.1", f"{one}-backbone0.1"]


def write(folder, data, method, seed, headline):
    row = accuracy.Row(data, "mobilenet_v2", None, method, seed)
    about = {"headline": headline, "command": "python benchmarks/accuracy.py"}
    (folder / f"{row.name}.json").write_text(json.dumps(about))


def test_the_table_gives_means_differences_and_what_was_not_run(tmp_path):
    for seed, (exact, ours) in enumerate([(0.80, 0.79), (0.82, 0.83)]):
        write(tmp_path, "pets", "exact", seed, exact)
        write(tmp_path, "pets", "galerkin-grid7", seed, ours)
    args = accuracy.parser().parse_args(["--table", "--results", str(tmp_path)])
    (args,) = accuracy.at_each_rate(args)
    table = accuracy.table(args).splitlines()
    ours = next(line for line in table if line.startswith("| galerkin-grid7"))
    assert "81.0 ± 2.8" in ours and "+0.00 (1 of 6)" in ours
    assert ours.count("not run") == 5


def test_what_a_row_tells(tmp_path, monkeypatch):
    folder = tmp_path / "shared" / "pets_subset"
    for part in ("train", "test"):
        for kind in ("cat", "dog"):
            (folder / part / kind).mkdir(parents=True)
            for i in range(4):
                colour = (255, 10 * i, 0) if kind == "cat" else (0, 10 * i, 255)
                Image.new("RGB", (40, 40), colour).save(folder / part / kind / f"{i}.png")
    weights = tmp_path / "shared" / "w.pt"
    from gradfilter.recipes import models

    torch.save(models.create("mobilenet_v2").state_dict(), weights)
    monkeypatch.setitem(accuracy.WEIGHTS, "mobilenet_v2", "w.pt")
    command = ["--shared", str(tmp_path / "shared"), "--results", str(tmp_path / "results")]
    options = ["--size", "32", "--steps", "2"]
    args = accuracy.parser().parse_args([*command, *options])
    (args,) = accuracy.at_each_rate(args)
    args.until = float("inf")
    args.results.mkdir()
    row = accuracy.Row("pets", "mobilenet_v2", None, "galerkin-grid7", 0)
    result = runs.train(accuracy.run_of(row, args), args)
    assert result["steps"] == 2 and len(result["losses"]) == 2
    assert result["headline"] == result["metrics"]["top1"]
    assert result["where"]["region"] == 52
    assert result["settings"]["data"] == "pets_subset"  # not where it lay
    assert str(tmp_path) not in json.dumps(result["settings"])

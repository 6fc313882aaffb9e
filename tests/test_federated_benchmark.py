"""The benchmark of federated training: its rows, its table, and one row run on made pictures."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

import tiny  # noqa: E402

from gradfilter.federated import client  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import federated as benchmark  # noqa: E402


@pytest.fixture
def asked(tmp_path, tiny_networks, monkeypatch):
    """The benchmark's arguments, over a folder with pictures and weights as it wants them."""
    for cached in (client._trainer, client.opened):
        cached.cache_clear()
    shared = tmp_path / "shared"
    tiny.photographs(shared / "cifar10", each=20)
    (shared / benchmark.WEIGHTS).parent.mkdir()
    torch.save(tiny.build("still", 3).model.state_dict(), shared / benchmark.WEIGHTS)
    monkeypatch.setattr(benchmark, "MODEL", "still")
    monkeypatch.setattr(benchmark, "CLIENTS", 3)
    line = ["--shared", shared, "--results", tmp_path / "results", "--work", tmp_path / "work"]
    return benchmark.parser().parse_args([*map(str, line), "--rounds", "2", "--size", "16"])


def test_a_row(asked):
    row = benchmark.Row("galerkin-grid7", 1)
    result = benchmark.run(row, asked)
    assert result["used"] == result["asked"] == 6 and len(result["rounds"]) == 3
    assert result["top1"] == result["rounds"][-1]["test_top1"]
    assert result["bytes a round"] > 0 and result["settings"]["split_seed"] == 1
    assert str(asked.shared) not in json.dumps(result)
    assert not list(asked.work.iterdir())


def test_the_table(asked):
    assert benchmark.table(asked).count("not run") == 5 * len(benchmark.METHODS)
    asked.results.mkdir()
    for seed, top1 in ((0, 0.5), (2, 0.6)):
        path = benchmark.file_of(benchmark.Row("exact", seed).name, asked)
        numbers = {"bytes a round": 2**20, "bytes a round, whole networks": 3 * 2**20}
        path.write_text(json.dumps({"top1": top1} | numbers))
    times = {name: {"cpu": [0.02, 0.01, 0.03]} for name in benchmark.METHODS}
    steps = {"seconds": times, "peak bytes": {"exact": 5 * 2**20}}
    benchmark.file_of("steps-cpu", asked).write_text(json.dumps(steps))
    line = next(s for s in benchmark.table(asked).splitlines() if s.startswith("| exact "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["exact", "55.0 ± 7.1 (2 seeds)", "20.0", "5", "1.0", "3.0"]


def test_steps_are_measured(asked, monkeypatch):
    few = {"exact": {"method": "exact"}, "last": {"method": "galerkin", "grid": 7, "last": 1}}
    monkeypatch.setattr(benchmark, "METHODS", few)
    torch.save(tiny.build("still", 10).model.state_dict(), asked.shared / benchmark.WEIGHTS)
    asked.repeats = 1
    found = benchmark.measured(asked)
    assert found["seconds"].keys() == few.keys() and found["batch"] == 32
    assert all(t > 0 for clocks in found["seconds"].values() for t in clocks["cpu"])


def test_every_row_has_a_file_of_its_own(asked):
    files = {benchmark.file_of(row.name, asked) for row in benchmark.rows()}
    assert len(files) == len(benchmark.METHODS) * len(benchmark.SEEDS)
    asked.size = None
    assert benchmark.file_of("x", asked) not in files

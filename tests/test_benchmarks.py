"""The benchmarks measure what they say; tiny runs of each."""

import gc
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import layers  # noqa: E402
import measure  # noqa: E402
import plan as plans  # noqa: E402
import step  # noqa: E402
import suite  # noqa: E402
import variants  # noqa: E402

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def tiny(name: str) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Runs on a tiny network, in this process, which is not tied to a core."""
    monkeypatch.setattr(variants, "network", tiny)
    monkeypatch.setattr(measure, "use_cpu", lambda threads: None)

    def child(command, environment):
        args = step.parser().parse_args(command[2:])
        return step.resident_peak(variants.Bench(args), args.peak_of)

    monkeypatch.setattr(step, "_child", child)


ARGV = ["--model", "tiny", "--batch", "2", "--size", "28", "--repeats", "2"]


def test_calls_take_turns_and_every_turn_starts_with_another():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    samples = measure.in_turns(calls, 3)
    assert "".join(order) == "aabbcc" "bbccaa" "ccaabb"
    assert all(len(seconds) == 6 for s in samples.values() for seconds in s.values())


def test_cpu_clock_tells_waiting_from_working():
    waited = measure.cpu_clock(lambda: time.sleep(0.05))
    assert waited["wall"] >= 0.05 > waited["cpu"]


def test_ratios_by_clock_and_statistic():
    above, below = {"wall": [6.0, 2.0, 8.0]}, {"wall": [1.0, 2.0, 3.0]}
    assert measure.ratios(above, below) == {"wall best": 2.0, "wall median": 3.0}


def test_kept_bytes_by_hand():
    linear, x = nn.Linear(4, 3, bias=False), torch.randn(2, 4, requires_grad=True)

    def forward():
        y = linear(x).relu()  # keeps x [2, 4]; the weight does not count; y [2, 3]
        return (y * y).sum()  # keeps y again

    assert measure.kept_bytes(forward, linear) == {"saved": 4 * (2 * 4 + 2 * 3), "hidden": 0}


def test_kept_bytes_finds_tensors_on_a_context():
    class Hiding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.hidden = {"a": (torch.zeros(10), "text")}
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    x = torch.randn(2, requires_grad=True)
    assert measure.kept_bytes(lambda: Hiding.apply(x).sum(), nn.Identity())["hidden"] == 40


@LINUX
def test_resident_peak_sees_what_was_freed_again():
    gc.collect()  # garbage of other tests, collected in between, would be taken off
    watch = measure.ResidentPeak()
    watch.reset()
    torch.ones(2**24)  # 64 MiB
    assert 60 * 2**20 < watch.read() < 80 * 2**20
    watch.reset()
    assert watch.read() < 20 * 2**20


def randomize_norms(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(std=0.1)
            m.running_var.uniform_(0.5, 2)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, std=0.1)


@pytest.mark.parametrize("name", ["mobilenet_v2", "tf_efficientnet_lite0", "resnet18"])
def test_folding_leaves_the_output_and_no_batch_norm(name):
    pytest.importorskip("timm")
    torch.manual_seed(0)
    model, x = variants.network(name).eval(), torch.randn(2, 3, 40, 40)
    randomize_norms(model)
    fold = variants.folded(model)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fold.modules())
    with torch.no_grad():
        torch.testing.assert_close(fold(x), model(x), rtol=1e-3, atol=1e-4)


def test_a_convolution_that_others_read_too_is_not_folded():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y

    model, x = Both().eval(), torch.randn(2, 3, 4, 4)
    randomize_norms(model)
    with torch.no_grad():
        torch.testing.assert_close(variants.folded(model)(x), model(x))


def test_settled_norms_give_maps_of_unit_variance():
    torch.manual_seed(0)
    model, x = tiny("tiny"), torch.randn(4, 3, 28, 28)
    variants.settle(model, x)
    assert not model.training and model[1].momentum == 0.1
    y = model[:2](x).detach()
    torch.testing.assert_close(y.var((0, 2, 3)), torch.ones(8), rtol=0.01, atol=0)


@LINUX
@pytest.mark.parametrize("more", [[], ["--last", "1", "--momentum", "0.9"], ["--amp", "bf16"]])
def test_step_measures_every_variant(small, tmp_path, capsys, more):
    out = tmp_path / "r.json"
    assert step.main([*ARGV, *more, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert list(result["variants"]) == ["inference", "folded", "exact", "layer", "engine"]
    for name, v in result["variants"].items():
        assert len(v["seconds"]["wall"]) == len(v["seconds"]["cpu"]) == 4
        assert (v["kept"] is None) == (name in ("inference", "folded"))
        trained = 5 * 8 + 5 + 8 * 8 * 9 + 8 + 16  # the head, the last convolution and its norm
        if "--last" in more and v["kept"]:
            assert v["peak"]["gradients"] == v["peak"]["optimizer state"] == 4 * trained
    best = {n: min(v["seconds"]["cpu"]) for n, v in result["variants"].items()}
    found = result["ratios"]["step / folded inference"]["cpu best"]
    assert found == pytest.approx(best["engine"] / best["folded"])
    assert result["layers"] == {"in a region": 1 if "--last" in more else 2}
    text = capsys.readouterr().out
    assert "speed-up over exact" in text and "kept bytes: exact / engine" in text


def test_step_without_peaks(small, capsys):
    assert step.main([*ARGV, "--no-peak"]) == 0
    assert "peak" not in capsys.readouterr().out


def test_step_refuses_variants_that_differ(small, monkeypatch):
    wrong = variants.folded

    def broken(model):
        fold = wrong(model)
        fold.get_parameter("0.bias").data += 1
        return fold

    monkeypatch.setattr(variants, "folded", broken)
    with pytest.raises(AssertionError, match="folded output is off"):
        step.main(ARGV)


def test_activations_are_never_less_than_a_first_forward_pass():
    class Watch:
        marks = iter([100, 130] + [90, 120] * 7)

        def reset(self):
            pass

        def read(self):
            return next(self.marks)

    model = nn.Linear(5, 1, bias=False)  # 20 bytes of gradient
    x, t = torch.randn(2, 5), torch.zeros(2, dtype=torch.long)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = variants.Training(model, x, t, nullcontext(), sgd)
    found = step.peak(run, Watch())
    assert (found["raw"], found["gradients"], found["optimizer state"]) == (130, 20, 20)
    assert found["activations"] == 100


def test_suite_runs_what_is_missing_and_judges_it(small, tmp_path, monkeypatch, capsys):
    ran = []

    def fake(model, options, args, path):
        ran.append(path.name)
        measure.write(path, {
            "headline": "cpu best",
            "ratios": {
                "step / folded inference": {"cpu best": 1.5},
                "speed-up over exact": {"cpu best": 2.5},
                suite.PEAK: {"activations": 1.1, "activations, mapped": 1.3},
                suite.KEPT: {"bytes": 13.0},
            },
        })  # fmt: skip
        return True

    monkeypatch.setattr(suite, "_step", fake)
    argv = ["--suite", "--model", "mobilenet_v2", "--results", str(tmp_path)]
    assert step.main(argv) == 0
    assert ran == [
        "step-cpu-mobilenet_v2-b8-galerkin-grid7.json",
        "step-cpu-mobilenet_v2-b1-galerkin-grid7.json",
        "step-cpu-mobilenet_v2-b8-gradient-filter-patch4.json",
        "step-cpu-mobilenet_v2-b8-galerkin-grid7-last4.json",
    ]
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    met = [row[-1].strip() for row in rows[2:]]
    assert met == ["yes", "NO", "NO", "NO", "NO", "yes", "NO", "yes"]
    assert step.main(argv) == 0 and len(ran) == 4
    assert step.main([*argv, "--force"]) == 0 and len(ran) == 8


def test_layers_smoke(small, tmp_path, capsys):
    out = tmp_path / "l.json"
    argv = ["--batch", "1", "--repeats", "1", "--shapes", "256@14x14", "--out", str(out)]
    assert layers.main(argv) == 0
    found = json.loads(out.read_text())["shapes"]["256@14x14"]
    assert found["backward"].keys() == found["forward"].keys() == layers.METHODS.keys()
    assert "256@14x14" in capsys.readouterr().out


def test_the_layer_that_is_timed_has_the_method():
    x = g = torch.randn(1, 4, 8, 8)
    method = layers.METHODS["galerkin patch=4"]
    exact = layers.Layer(None, x, g, "auto")
    engine, layer = (layers.Layer(method, x, g, engine) for engine in ("auto", "layer"))
    torch.testing.assert_close(exact.forward(), engine.forward())
    assert not torch.allclose(exact.backward()[0], engine.backward()[0])
    torch.testing.assert_close(engine.backward(), layer.backward())


@pytest.mark.slow
@LINUX
def test_step_as_a_command(tmp_path):
    pytest.importorskip("torchvision")
    out = tmp_path / "r.json"
    command = [sys.executable, ROOT / "benchmarks" / "step.py", "--model", "mobilenet_v2"]
    command += ["--batch", "2", "--size", "32", "--repeats", "1", "--out", out]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    result = json.loads(out.read_text())
    assert result["layers"] == {"in a region": 52}
    assert all(v["peak"]["raw"] > 0 for v in result["variants"].values())
    assert result["variants"]["engine"]["mapped"]["raw"] > 0


def test_plan_measures_every_plan_on_a_fresh_model(monkeypatch):
    monkeypatch.setattr(plans, "network", lambda name: torch.manual_seed(0) and tiny(name).train())
    monkeypatch.setattr(plans, "batch", lambda n: (torch.randn(n, 3, 16, 16), torch.arange(n)))
    monkeypatch.setattr(plans, "BUDGETS", {"tiny": (0.01, 0.1)})
    monkeypatch.setattr(plans, "SHARES", ())  # a tiny network's time is mostly noise
    monkeypatch.setattr(plans, "STEPS", 1)
    found = plans.run("tiny", 4)
    assert len(found["rows"]) == 2 and found["exact step of all layers, s"] > 0
    for row in found["rows"]:
        assert row["measured"] == row["measured by the plan"] <= row["budget"]
        assert row["predicted"] == pytest.approx(row["measured"], rel=1e-3)
        cells = plans.told("tiny", row)
        assert len(cells) == len(plans.HEAD) and cells[0] == "tiny"

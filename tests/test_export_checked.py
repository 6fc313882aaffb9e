"""What is held against PyTorch while a network is exported, and what its manifest says."""

import hashlib
import json

import numpy as np
import pytest
import torch
from exported import assert_close, exported, in_pytorch, runtime
from torch import nn

import gradfilter as gf
from gradfilter.export import Runner, lower, selfcheck


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(16, 3)), torch.randn(2, 3, 16, 16)
    gf.convert(model, gf.GalerkinFilter(grid=4), example=x)
    return model, x, torch.tensor([0, 2])


def runner(**recipe) -> Runner:
    return Runner((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), ("a", "b", "c"), recipe=recipe)


@pytest.mark.parametrize("what", ["a half", "the other way"])
def test_a_graph_that_computes_something_else_is_refused(what, monkeypatch, tmp_path):
    model, x, target = small()
    times = {"a half": 0.5, "the other way": -1.0}[what]
    right = lower.OPERATORS["grid_backward"]

    def wrong(c, *args):
        gx, gw = right(c, *args)
        return gx, c.graph.binary("Mul", gw, torch.tensor(times))

    gf.export(model, x, target, tmp_path)
    monkeypatch.setitem(lower.OPERATORS, "grid_backward", wrong)
    with pytest.raises(ValueError, match="does not change 0.weight as PyTorch does"):
        gf.export(model, x, target, tmp_path)
    assert not (tmp_path / "manifest.json").exists()  # so no runner takes what is there


def test_what_is_no_number_in_pytorch_cannot_be_compared():
    nothing, some = torch.tensor([float("nan")]), torch.ones(1)
    start, end = {"a": some, "b": some}, {"a": nothing, "b": some}
    check = selfcheck.Check(start, some, some, 0.1, [1.0], end)
    assert check.apart({"a": some, "b": nothing}, 0.25) == ["b"]


def test_the_rate_is_one_at_which_steps_can_be_followed():
    """Above 0.005 the smallest change of an image takes this one anywhere."""

    def wild(x, rate, images, targets):
        return x - rate + (rate > 0.005) * torch.sin(1e9 * images.mean()), rate

    start, images = {"x": torch.ones(4)}, torch.zeros(2, 3, 4, 4)
    for step, rate in ((wild, 1e-3), (lambda x, rate, *_: (x - rate, rate), 1e-2)):
        assert selfcheck.check(step, start, images, torch.zeros(2), 3).rate == rate


def test_a_manifest_has_a_digest_of_all_that_it_says(tmp_path):
    model, x, target = small()
    gf.export(model, x, target, tmp_path, runner=runner(lr=0.1))
    found = json.loads((tmp_path / "manifest.json").read_text())
    digest = found.pop("digest")
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


@pytest.mark.parametrize(
    "recipe, why",
    [
        ({"lr": "x"}, "lr of a recipe must be a number"),
        ({"lr": -0.1}, "from 0 on"),
        ({"warmup": 5}, "from 0 to 1"),
        ({"batch": 0}, "from 1 on"),
        ({"epochs": 1.5}, "whole number"),
        ({"seed": "one"}, "whole number"),
        ({"augment": "no"}, "True or False"),
        ({"momentum": 0.9}, "no 'momentum'"),
    ],
)
def test_a_recipe_that_no_runner_could_follow_is_refused(recipe, why, tmp_path):
    model, x, target = small()
    with pytest.raises(ValueError, match=why):
        gf.export(model, x, target, tmp_path, runner=runner(**recipe))


def test_a_runner_is_told_what_it_can_use(tmp_path):
    model, x, target = small()
    mean = tuple(np.float32(v) for v in (1, 2, 3))
    twice = Runner(mean, mean, ("a", "b", "a"))
    with pytest.raises(ValueError, match="the same name"):
        gf.export(model, x, target, tmp_path, runner=twice)
    with pytest.raises(ValueError, match="ignore must be"):
        gf.export(model, x, target, tmp_path, runner=Runner(mean, mean, ("a", "b", "c"), "x"))
    with pytest.raises(ValueError, match="float32"):
        gf.export(model.double(), x.double(), target, tmp_path, runner=runner())
    with pytest.raises(ValueError, match="batch is 4, the graph's 2"):
        gf.export(model.float(), x, target, tmp_path, batch=2, runner=runner(batch=4))
    with pytest.raises(ValueError, match="clip must be"):
        gf.export(model, x, target, tmp_path, clip=float("inf"))
    recipe = {"lr": np.float32(0.5), "epochs": np.int64(2)}
    numbers = Runner(mean, mean, ("a", "b", "c"), np.int64(255), recipe)
    gf.export(model, x, target, tmp_path, runner=numbers)
    found = json.loads((tmp_path / "manifest.json").read_text())
    assert found["pictures"]["mean"] == [1, 2, 3] and found["pictures"]["ignore"] == 255
    assert found["recipe"] == {"lr": 0.5, "epochs": 2}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_groups_have_weight_decays_of_their_own(kind, tmp_path):
    model, x, target = small()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=0.05)
    folder = exported(model, x, target, tmp_path, optimizer=optimizer, by=runtime)
    for _ in range(2):
        folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer, steps=2)
    expected.pop("loss")
    assert_close(folder.values, expected, 1e-5)
    assert folder.manifest["optimizer"]["weight_decay"] == [0.0, 0.3]

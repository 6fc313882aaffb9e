"""What a forward pass does beside calling layers, against plain PyTorch.

A graph is written once and does the same at every call; the engine and the layer level share it,
so that only the model itself can tell whether it is right. With patches of one pixel the engine's
gradients are PyTorch's.
"""

import copy
import random
import warnings

import numpy as np
import passes
import pytest
import torch
from passes import KINDS, Two
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.region import engine as engine_module

EXACT = gf.GalerkinFilter(patch=1)


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach()} | {n: p.grad for n, p in model.named_parameters()}


def both(kind: type[Two], x: Tensor) -> tuple[nn.Module, nn.Module]:
    plain = kind()
    engine = copy.deepcopy(plain)
    gf.convert(engine, EXACT, example=x)
    engine.calls, engine.last = 0, None  # to be converted, a model is run
    return engine, plain


def assert_like_plain(engine: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Output, gradients, buffers and random numbers of three steps."""
    for i in range(3):
        found, expected = [], []
        for model, seen in ((engine, found), (plain, expected)):
            torch.manual_seed(i)
            random.seed(i)
            np.random.seed(i)
            seen += [step(model, x), torch.rand(1), random.random(), dict(model.named_buffers())]
        f, e = found[0] | found[3], expected[0] | expected[3]
        for name in e:
            assert (f[name] is None) == (e[name] is None), name
            assert e[name] is None or torch.allclose(f[name], e[name], rtol=1e-4, atol=1e-5), name
        assert found[1:3] == expected[1:3]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_a_forward_pass_does_what_pytorch_does(kind):
    x = images(2, 3, 12, 12)
    engine, plain = both(kind, x)
    assert set(vars(engine)) <= {*vars(plain), "gf_engine"}
    assert torch.equal(engine.std, plain.std)
    assert_like_plain(engine, plain, x)
    assert engine.calls == plain.calls
    gf.revert(engine)
    assert vars(engine).keys() == vars(plain).keys()


REASONS = {
    passes.WithoutGradient: "WithoutGradient switches gradients on or off",
    passes.SwitchedOff: "SwitchedOff switches gradients on or off",
    passes.InAutocast: "InAutocast switches autocast on or off",
    passes.Island: "Island switches autocast on or off",
    passes.Drawing: "Drawing draws random numbers",
    passes.Skipping: "Skipping draws random numbers",
    passes.SkippingByNumpy: "SkippingByNumpy draws random numbers",
    passes.Counting: "Counting writes its 'calls'",
    passes.Remembering: "Remembering writes its 'last'",
}


@pytest.mark.parametrize("kind", REASONS, ids=lambda k: k.__name__)
def test_the_plan_says_why(kind):
    plan = gf.convert(kind(), EXACT, example=images(2, 3, 12, 12))
    assert REASONS[kind] in str(plan)


def test_what_is_computed_from_buffers_and_numbers_follows_them():
    x = images(2, 3, 12, 12)
    engine, plain = both(passes.Normalising, x)
    for model in (engine, plain):
        model.load_state_dict(model.state_dict() | {"std": torch.full((8,), 5.0)})
    assert_like_plain(engine, plain, x)
    engine, plain = both(passes.Multiplying, x)
    for model in (engine, plain):
        model.factor = 0.5
    assert_like_plain(engine, plain, x)


def test_a_class_of_the_users_own_is_not_taken_for_stochastic_depth():
    class DropPath(nn.Module):
        def forward(self, x):
            return x + 1

    plain = nn.Sequential(nn.Conv2d(3, 8, 3), DropPath(), nn.Conv2d(8, 4, 1)).train()
    engine, x = copy.deepcopy(plain), images(2, 3, 12, 12)
    gf.convert(engine, EXACT, example=x)
    assert torch.allclose(engine(x), plain(x), atol=1e-5)


class Scaled(nn.Module):
    """A residual block with a factor for each channel that is the same for all images."""

    def __init__(self):
        super().__init__()
        self.c, self.n = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.g = nn.Parameter(torch.rand(8))

    def forward(self, x):
        return torch.relu(x + self.n(self.c(x)) * self.g.view(1, -1, 1, 1))


@pytest.mark.parametrize("count", [1, 4])
def test_a_factor_for_all_images_is_part_of_a_region(count):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 1), Scaled(), Scaled()).eval()
    engine = copy.deepcopy(plain)
    gf.convert(engine, EXACT, example=images(count, 3, 12, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a region that does not run by the engine is told
        for n in (count, 3, 1):
            x = images(n, 3, 12, 12)
            found, expected = step(engine, x), step(plain, x)
            for name in expected:
                assert torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-4), name


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x, z):
        return torch.relu(self.a(x)), torch.relu(self.b(z))


def test_a_region_that_runs_at_the_layer_level_is_told_once():
    torch.manual_seed(0)
    plain = Siamese()
    engine, x, z = copy.deepcopy(plain), images(4, 3, 8, 8), images(1, 3, 8, 8)
    gf.convert(engine, EXACT, example=(x, x))
    with pytest.warns(UserWarning, match="runs at the layer level instead of by the engine"):
        found = engine(x, z)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(x, z)
    for f, e in zip(found, plain(x, z), strict=True):
        assert torch.allclose(f, e, atol=1e-5)


class Late(nn.Module):
    """A convolution reads a map, which is then overwritten before its output is added to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.a, self.b = (nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))

    def forward(self, x):
        x = self.stem(x)
        before = self.a(x)
        return before + self.b(torch.relu_(x))


class LatePart(Late):
    def forward(self, x):
        x = self.stem(x)
        before = self.a(x)
        return before + self.b(x[:, :8].sigmoid_())


@pytest.mark.parametrize("kind", [Late, LatePart])
def test_no_convolution_is_moved_past_what_overwrites_its_input(kind):
    plain = kind()
    for part in (plain.stem, plain.a):
        part.requires_grad_(False)
    engine, x = copy.deepcopy(plain), images(2, 3, 12, 12)
    gf.convert(engine, EXACT, example=x)
    found, expected = step(engine, x), step(plain, x)
    assert torch.allclose(found["y"], expected["y"], atol=1e-5)
    assert torch.allclose(found["b.weight"], expected["b.weight"], rtol=1e-4, atol=1e-4)


class Part(nn.Module):
    """Writes down the size of its maps, between two layers."""

    def __init__(self):
        super().__init__()
        self.c, self.size = nn.Conv2d(8, 8, 3, padding=1), None

    def forward(self, x):
        self.size = x.shape[-2:]
        return self.c(x)


def test_only_the_part_that_a_graph_cannot_hold_is_left_out():
    torch.manual_seed(0)
    around = [nn.Sequential(nn.Conv2d(c, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)) for c in (3, 8)]
    plain = nn.Sequential(around[0], Part(), around[1])
    engine, x = copy.deepcopy(plain), images(2, 3, 12, 12)
    plan = gf.convert(engine, EXACT, example=x)
    assert [e.where.partition(":")[0] for e in plan.values()] == [
        "region 1", "region 1", "layer level", "region 2", "region 2",
    ]  # fmt: skip
    assert "Part writes its 'size'" in str(plan)
    found, expected = step(engine, x), step(plain, x)
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-4), name
    assert engine[1].size == (12, 12)


def test_a_conversion_without_gradients_is_as_one_with():
    x = images(2, 3, 12, 12)
    plain = passes.WithoutGradient()
    engine = copy.deepcopy(plain)
    with torch.no_grad():
        gf.convert(engine, EXACT, example=x)
    assert_like_plain(engine, plain, x)


def test_a_conversion_leaves_random_numbers_and_caches_alone():
    plain = passes.Caching()
    engine = copy.deepcopy(plain).eval()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    gf.convert(engine, EXACT, example=images(2, 3, 12, 12))
    assert torch.equal(torch.rand(1), expected)
    assert engine.cache == {}
    gf.convert(engine, gf.GalerkinFilter(patch=2), example=images(2, 3, 12, 12))


class Choosing(Two):
    def __init__(self):
        super().__init__()
        self.twice, self.power, self.kind, self.best = False, 1, "relu", 0.0

    def forward(self, x):
        h = getattr(torch, self.kind)(self.a(x) * self.scale[:, None, None])
        return self.b(h * 2 if self.twice else h * self.power)


@pytest.mark.parametrize("change", [("twice", True), ("power", 3), ("kind", "sigmoid")], ids=str)
def test_what_a_graph_was_chosen_by_is_followed(change):
    x = images(2, 3, 12, 12)
    engine, plain = both(Choosing, x)
    for model in (engine, plain):
        setattr(model, *change)
    assert_like_plain(engine, plain, x)


def test_numbers_that_no_graph_has_cost_one_trace():
    x = images(2, 3, 12, 12)
    engine, plain = both(Choosing, x)
    traced = []
    with pytest.MonkeyPatch.context() as patch:
        own = engine_module._trace
        patch.setattr(engine_module, "_trace", lambda *a: traced.append(1) or own(*a))
        for i in range(6):
            engine.best = plain.best = float(i)
            step(engine, x)
    assert len(traced) == 1 and len(engine.gf_engine.programs) <= 2
    for model in (engine, plain):  # and what is in it is still followed
        model.power = 2
    assert_like_plain(engine, plain, x)


def test_a_gate_for_all_images_that_is_computed_from_parameters():
    class Gated(Two):
        def forward(self, x):
            return self.b(self.a(x) * torch.sigmoid(self.scale.view(1, -1, 1, 1)))

    x = images(2, 3, 12, 12)
    engine, plain = both(Gated, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_like_plain(engine, plain, x)


def _slice(m, y):
    y[:, :4].relu_()
    return m.b(y)


def _sum_with_a_slice(m, y):
    part = y[:, :4]
    part += y[:, 4:].sigmoid()
    return m.b(y)


def _rows(m, y):
    y.flatten(1).sigmoid_()
    return m.b(y)


def _other_name(m, y):
    same = y
    same += m.scale[:, None, None]
    return m.b(y)


def _the_same_memory(m, y):
    torch.relu_(y.contiguous().detach())
    return m.b(y)


def _maps(m, y):
    same = y
    same += torch.sigmoid(y)
    return m.b(y)


class Writing(Two):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        return self.write(self, self.a(x))


WRITES = [_slice, _sum_with_a_slice, _rows, _other_name, _the_same_memory, _maps]


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__.strip("_"))
def test_what_is_written_in_place_is_read(write):
    """By whatever name or view it was written."""
    x = images(2, 3, 12, 12)
    engine, plain = both(lambda: Writing(write), x)
    assert_like_plain(engine, plain, x)


def test_the_plan_says_that_a_part_is_written():
    plan = gf.convert(Writing(_slice), EXACT, example=images(2, 3, 12, 12))
    assert "Writing writes to a part of a map that is read again" in str(plan)


def test_a_sum_in_place_that_nobody_else_sees_is_part_of_a_region():
    def residual(m, y):
        h = m.c(y)
        h += y
        return m.b(torch.relu_(h))

    model = Writing(residual)
    model.c = nn.Conv2d(8, 8, 1)
    plan = gf.convert(model, EXACT, example=images(2, 3, 12, 12))
    assert [e.where for e in plan.values()] == ["region 1"] * 3
    assert len(model.gf_engine.programs) == 1

"""The engine on what it was not converted with: other shapes, other parameters, other settings.

A program is written for the shapes and modules of the example. What differs must be what plain
PyTorch makes of it, an error included; C must never see a map that is smaller than it takes it for.
"""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.region.engine import PROGRAMS
from gradfilter.region.run import WIRINGS

EXACT = gf.GalerkinFilter(patch=1)


class Sum(nn.Module):
    """Two branches that meet, then a 3x3 layer; 1x1 layers, so that both are on a tape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.after = nn.Sequential(nn.Conv2d(8, 8, 1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after(F.silu(self.a(x) + self.b(y)))


def chain(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.LeakyReLU(0.1), *extra]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 1), nn.SiLU(), nn.Conv2d(8, 4, 1))


def images(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def converted(model: nn.Module, *example: Tensor) -> tuple[nn.Module, nn.Module]:
    """A copy that is run by the engine and has done a step on the example, and the model itself."""
    engine = copy.deepcopy(model)
    gf.convert(engine, EXACT, example=example)
    engine(*example).sum().backward()
    return engine, model


def gradients(model: nn.Module, *args: Tensor) -> list[Tensor]:
    """The output and every parameter's gradient."""
    model.zero_grad()
    y = model(*args)
    (y * images(*y.shape, dtype=y.dtype)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        assert float((f - e).abs().max()) <= 1e-5 * max(1.0, float(e.abs().max()))


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_images_of_other_channels_are_refused(channels):
    engine, plain = converted(chain(), images(2, 3, 12, 12))
    wrong = images(2, channels, 12, 12)
    with pytest.raises(RuntimeError) as said:
        plain(wrong)
    with pytest.raises(RuntimeError, match=re.escape(str(said.value))):
        engine(wrong)


@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (1, 3, 12, 12), (2, 3, 12, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_maps_that_may_be_broadcast(shape, dtype):
    example = images(2, 3, 12, 12, dtype=dtype)
    engine, plain = converted(Sum().to(dtype), example, example)
    assert_same(gradients(engine, example, images(*shape, dtype=dtype)),
                gradients(plain, example, images(*shape, dtype=dtype)))  # fmt: skip
    assert_same(gradients(engine, example, example), gradients(plain, example, example))


@pytest.mark.parametrize("shape", [(3, 3, 12, 12), (2, 3, 11, 12)], ids=str)
def test_maps_that_do_not_fit_are_refused(shape):
    example = images(2, 3, 12, 12)
    engine, _ = converted(Sum(), example, example)
    with pytest.raises(RuntimeError, match="must match the size"):
        engine(example, images(*shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", [gf.GalerkinFilter(grid=3), gf.GradientFilter()], ids=repr)
def test_an_empty_batch_has_gradients_of_zeros(method, dtype):
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    model = chain(depthwise, nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3)).to(dtype)
    example = images(2, 3, 12, 12, dtype=dtype)
    for given in ({"example": example}, {}):
        engine = copy.deepcopy(model).train()
        gf.convert(engine, method, **given)
        engine(example).sum().backward()
        found = gradients(engine, example[:0])
        assert found[0].shape[0] == 0
        assert all(not g.any() for g in found[1:])


def test_one_value_a_channel_is_refused_as_pytorch_does():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).train()
    gf.convert(model, EXACT, norm="batch", example=images(2, 3, 8, 8))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(images(1, 3, 1, 1))


def test_parameters_of_other_shapes():
    x = images(2, 3, 12, 12)
    engine, plain = converted(chain(), x)
    engine[-1].weight.data = images(6, 8, 1, 1)
    with pytest.raises(RuntimeError, match="bias to be 1-dimensional with 6 elements"):
        engine(x)
    for model in (engine, plain):
        model.zero_grad()
        model[-1].weight.data, model[-1].bias.data = images(6, 8, 1, 1), images(6)
    assert_same(gradients(engine, x), gradients(plain, x))


@pytest.mark.parametrize("way", ["weight_norm", "spectral_norm"])
def test_weights_that_are_computed_from_others_since(way):
    x = images(2, 3, 12, 12)
    engine, plain = converted(chain(), x)
    for model in (engine, plain):
        torch.manual_seed(2)
        getattr(nn.utils.parametrizations, way)(model[0])
        model.eval()  # no power iterations
    assert_same(gradients(engine, x), gradients(plain, x))


def test_a_bias_that_was_not_there():
    x = images(2, 3, 12, 12)
    engine, plain = converted(chain(), x)
    for model in (engine, plain):
        model[0].bias = nn.Parameter(images(8))
    assert_same(gradients(engine, x), gradients(plain, x))


def test_settings_of_modules_that_changed():
    x = images(2, 3, 12, 12)
    engine, plain = converted(chain(nn.Dropout(0.0)), x)
    for model in (engine, plain):
        model[1].negative_slope = 0.7
    assert_same(gradients(engine, x), gradients(plain, x))
    engine[2].p = 1.0
    plain[2].p = 1.0
    assert_same(gradients(engine, x), gradients(plain, x))


def test_a_call_that_the_engine_cannot_take_is_told():
    x = images(2, 3, 12, 12)
    engine, plain = converted(chain(), x)
    with pytest.warns(UserWarning, match="called with keyword arguments, so it runs at the layer"):
        y = engine(input=x)
    assert torch.allclose(y, plain(x), atol=1e-5)


def test_parameters_and_statistics_that_are_gone():
    x = images(2, 3, 12, 12)
    engine, plain = converted(chain(nn.BatchNorm2d(8)).eval(), x)
    for model in (engine, plain):
        model[-1].bias = model[2].weight = model[2].bias = None
    assert_same(gradients(engine, x), gradients(plain, x))
    engine, plain = converted(chain(nn.BatchNorm2d(8)).eval(), x)
    for model in (engine, plain):
        model[2].running_mean = model[2].running_var = None
    assert_same(gradients(engine, x), gradients(plain, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8], ids=str)
def test_images_of_another_type_are_refused(dtype):
    engine, plain = converted(chain(), images(2, 3, 12, 12))
    wrong = images(2, 3, 12, 12).to(dtype)
    with pytest.raises(RuntimeError) as said:
        plain(wrong)
    with pytest.raises(RuntimeError, match=re.escape(str(said.value))):
        engine(wrong)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_what_pytorch_makes_by_default_does_not_matter(default):
    """Also in between: what was worked out before must be of the same type as what is after."""
    x, depthwise = images(2, 3, 12, 12), nn.Conv2d(8, 8, 3, padding=1, groups=8)
    inner = depthwise, nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 32, 3, padding=1), nn.SiLU()
    inner += (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 1))
    engine, plain = converted(chain(*inner), x)
    expected = gradients(plain, x), gradients(plain, x[:1])
    fresh = copy.deepcopy(plain)
    gf.convert(fresh, EXACT, example=x)
    ones = torch.ones_like(plain(x)), torch.ones_like(plain(x[:1]))
    on = nullcontext() if isinstance(default, torch.dtype) else torch.device(default)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default if isinstance(default, torch.dtype) else before)
    try:
        with on:
            for model in (engine, fresh):
                for given, one, want in zip((x, x[:1]), ones, expected, strict=True):
                    model.zero_grad()
                    y = model(given)
                    y.backward(one)
                    assert y.dtype == torch.float32
                    assert_same([y.detach()], want[:1])
                    assert all(p.grad.isfinite().all() for p in model.parameters())
    finally:
        torch.set_default_dtype(before)
    assert_same(gradients(engine, x), expected[0])
    assert_same(gradients(fresh, x), expected[0])


def test_what_an_engine_remembers_is_bounded():
    x = images(2, 3, 12, 12)
    engine, _ = converted(chain(nn.Dropout(0.5)).train(), x)
    programs = engine.gf_engine.programs
    for i in range(20):
        engine[2].p = 0.1 + 0.01 * i
        engine(x)
    assert len(programs) == 1  # which rate it is matters to the module alone
    for i in range(3 * PROGRAMS):
        engine[1].negative_slope = 0.01 * i
        engine(x)
    assert len(programs) <= PROGRAMS
    many = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(8)))
    engine, plain = converted(many, x)
    (runner,) = [r for p in engine.gf_engine.programs.values() for r in p.runners]
    for i in range(2 * WIRINGS):
        for model in (engine, plain):
            for k, layer in enumerate(model):
                layer.requires_grad_(k == 0 or bool(i >> (k - 1) & 1))
        found, expected = (sum_gradients(model, x) for model in (engine, plain))
        assert_same(found, expected)
    assert len(runner.wirings) <= WIRINGS


def sum_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_is_called_once_a_call(inside):
    x = images(2, 3, 12, 12)
    engine, _ = converted(nn.Sequential(chain(), nn.Conv2d(4, 4, 1)), x)
    calls = []
    hooked = engine[0][0] if inside else engine[0]
    hooked.register_forward_hook(lambda *_: calls.append(1))
    for count in (1, 2, 3):
        engine(x).sum().backward()
        assert len(calls) == count


def test_the_plan_says_that_a_part_has_hooks():
    model = nn.Sequential(chain(), nn.Conv2d(4, 4, 1))
    model[0].register_forward_hook(lambda *_: None)
    plan = gf.convert(model, EXACT, example=images(2, 3, 12, 12))
    assert str(plan).count("layer level: Sequential has hooks") == 3


def test_replicas_of_data_parallel_are_left_alone():
    x = images(2, 3, 12, 12)
    engine, plain = converted(chain(), x)
    replica = engine._replicate_for_data_parallel()
    replica._modules = {n: m._replicate_for_data_parallel() for n, m in engine.named_children()}
    for module, own in zip(replica.children(), engine.children(), strict=True):
        module.__dict__.update({n: 2 * p.detach() for n, p in own.named_parameters()})
        module._parameters = {n: None for n, p in own._parameters.items() if p is None}
    doubled = copy.deepcopy(plain)
    for p in doubled.parameters():
        p.data *= 2
    assert torch.allclose(replica(x), doubled(x), atol=1e-4)

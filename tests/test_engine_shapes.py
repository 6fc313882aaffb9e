"""The engine on what it was not converted with: other shapes, other parameters, other settings.

A program is written for the shapes and modules of the example. What differs must be what plain
PyTorch makes of it, an error included; C must never see a map that is smaller than it takes it for.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf

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

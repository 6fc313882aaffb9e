"""Maps that are narrower than the parameters of batch norms, in autocast or without it."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from networks import Network, Unit
from torch import nn

import gradfilter as gf

BLOCKS = [
    ("chain", Unit(stride=2, norm="affine", act="silu"), "none"),
    ("before", Unit(norm="affine", act="silu"), "silu"),  # a norm that follows no convolution
    ("residual", Unit(8, norm="affine", act="gelu"), "none"),
    ("project", Unit(kernel=1, bias=False, norm="bare"), "silu"),
]
METHODS = [gf.GalerkinFilter(patch=1), gf.GalerkinFilter(grid=3), gf.GradientFilter(patch=2)]


def network() -> nn.Module:
    return Network(BLOCKS, "vector", 0).train()


def images(dtype):
    noise = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 20, 20, generator=noise, dtype=torch.float64).to(dtype)


def step(model, x, autocast=False):
    """All gradients of a step in one vector, and the output."""
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        (y,) = model(x)
    y.double().square().sum().backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
    return torch.cat([p.grad.double().flatten() for p in model.parameters()]), y.double()


@pytest.mark.parametrize("engine", ["auto", "layer"])
@pytest.mark.parametrize("norm", ["frozen", "batch"])
@pytest.mark.parametrize("way", ["autocast", "float32 norms"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_norms_that_are_wider_than_the_maps(method, way, norm, engine):
    exact = network().double()
    gf.convert(exact, method, norm=norm, engine="layer", example=images(torch.float64))
    expected = step(exact, images(torch.float64))
    model, dtype = network(), torch.float32
    if way == "float32 norms":
        dtype = torch.bfloat16
        for m in model.modules():
            if isinstance(m, nn.Conv2d | nn.Linear):
                m.to(dtype)
    gf.convert(model, method, norm=norm, engine=engine, example=images(dtype))
    found = step(model, images(dtype), way == "autocast")
    for f, e in zip(found, expected, strict=True):
        assert F.cosine_similarity(f.flatten(), e.flatten(), dim=0) > 0.99


def test_the_variance_of_a_batch_may_be_too_large_for_its_type():
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)).half()
    plain[0].weight.data *= 600  # the variance is above 65504
    engine, x = copy.deepcopy(plain), images(torch.float16)
    gf.convert(engine, METHODS[0], norm="batch", example=x)
    found, expected = engine(x).float(), plain(x).float()
    assert F.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99
    assert found.std() > 0.9

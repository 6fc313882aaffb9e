"""Multiply-adds by hand: one layer behind another, so that both gradients are needed."""

import pytest
import torch
from cases import small_cnn
from counted import batch, row
from torch import nn

import gradfilter as gf


def two_layers(conv, method):
    """The row of `conv` behind a 1x1 layer, for 2 images of 8x8 pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(conv.in_channels, conv.in_channels, 1), conv)
    gf.convert(model, {"1": method})
    return row(gf.cost(model, torch.randn(2, conv.in_channels, 8, 8)), "1")


DENSE = 2 * 6 * 8 * 8 * (4 * 3 * 3)  # outputs times taps of Conv2d(4, 6, 3, padding=1)


@pytest.mark.parametrize(
    ("method", "backward"),
    [
        (gf.Exact(), 2 * DENSE),
        # 4x4 patches, the summed kernel; the weight gradient is one product per patch
        (gf.GradientFilter(patch=2), 2 * (2 * 4 * 4 * 6 * 4)),
        # 4x4 patches of which each reads 3x3, both ways
        (gf.GalerkinFilter(patch=2), 2 * (2 * 4 * 4 * 9 * 6 * 4)),
        # patches of 3, 3 and 2 pixels: 3x3 patches that read 3x3
        (gf.GalerkinFilter(grid=3), 2 * (2 * 3 * 3 * 9 * 6 * 4)),
        (gf.GalerkinFilter(patch=1), 2 * DENSE),
        (gf.Int8(), 2 * DENSE),
        (gf.Int8(gf.GalerkinFilter(patch=2)), 2 * (2 * 4 * 4 * 9 * 6 * 4)),
    ],
    ids=repr,
)
def test_multiply_adds_of_the_filters(method, backward):
    found = two_layers(nn.Conv2d(4, 6, 3, padding=1), method)
    assert (found.forward_macs, found.backward_macs) == (DENSE, backward)


def test_multiply_adds_of_grouped_and_strided_layers():
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
    dense = 2 * 8 * 4 * 4 * (2 * 3 * 3)
    found = two_layers(conv, gf.Exact())
    assert (found.forward_macs, found.backward_macs) == (dense, 2 * dense)
    found = two_layers(conv, gf.GradientFilter(patch=2))  # 2x2 patches
    assert found.backward_macs == 2 * (2 * 2 * 2 * 8 * 2)


def test_multiply_adds_of_walsh_hadamard():
    """3 coefficients for each of 4x4 patches, both ways; a 1x1 layer from 4 to 6 channels."""
    found = two_layers(nn.Conv2d(4, 6, 1), gf.WalshHadamard(patch=2, bases=3))
    assert found.forward_macs == 2 * 64 * 4 * 6
    assert found.backward_macs == 2 * (2 * 16 * 3 * 4 * 6)


def test_multiply_adds_of_a_fixed_rank():
    """Ranks (2, 3, 3, 3) of an input [2, 4, 8, 8] of a 3x3 layer with 6 outputs."""
    found = two_layers(nn.Conv2d(4, 6, 3, padding=1), gf.SubspaceIteration(rank=3))
    size = 2 * 4 * 8 * 8
    iteration = 2 * size * (2 + 3 + 3 + 3)  # x^T start, then x times that, mode by mode
    core = size * 2 + size * 3 + 2 * 3 * 8 * 8 * 3 + 2 * 3 * 3 * 8 * 3
    assert found.forward_macs == DENSE + iteration + core
    rotate_g = 2 * 2 * 6 * 8 * 8  # the batch factor goes over to g
    rebuild = 2 * 3 * 3 * 3 * 8 + 2 * 3 * 8 * 3 * 8  # height, then width
    convolution = 2 * 6 * 8 * 8 * (3 * 9)  # 2 images of 3 channels
    channels = 6 * 3 * 9 * 4
    assert found.backward_macs == DENSE + rotate_g + rebuild + convolution + channels


@pytest.mark.parametrize("modes", [1, 4])
def test_multiply_adds_of_decompositions(modes):
    """At full rank every size is known without the data."""
    method = gf.Svd(energy=1) if modes == 1 else gf.Hosvd(energy=1)
    found = two_layers(nn.Conv2d(4, 6, 3, padding=1), method)
    size, dims = 2 * 4 * 8 * 8, [2, 4, 8, 8][:modes]
    grams = core = size * sum(dims)
    assert found.forward_macs == DENSE + grams + core
    gw = 2 * 2 * 6 * 8 * 8 + DENSE
    if modes == 4:
        gw += size * 8 + size * 8 + 6 * 4 * 9 * 4  # height, width, channels
    assert found.backward_macs == DENSE + gw


def test_multiply_adds_of_linear_layers():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    found = gf.cost(model, torch.zeros(2, 4, 5))
    assert (row(found, "0").forward_macs, row(found, "0").backward_macs) == (8 * 35, 8 * 35)
    assert (row(found, "1").forward_macs, row(found, "1").backward_macs) == (8 * 21, 2 * 8 * 21)


def test_frozen_layers_compute_only_what_is_needed():
    model = small_cnn()
    gf.convert(model, gf.Exact())
    everything = gf.cost(model, batch())
    gf.convert(model, {"3": "frozen"})
    found = gf.cost(model, batch())
    assert row(found, "3").backward_macs == row(everything, "3").backward_macs // 2
    assert row(found, "3").kept_bytes == 0
    gf.convert(model, gf.GradientFilter(patch=2), last=1)
    found = gf.cost(model, batch())
    for r in found.layers[: [r.name for r in found.layers].index("5")]:
        assert (r.backward_macs, r.kept_bytes, r.trained) == (0, 0, False)
    patches = 2 * 3 * 3
    assert row(found, "5").backward_macs == patches * 8 * 12  # no input gradient

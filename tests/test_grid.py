"""Every way to take a convolution's gradients on the grid, against the counts written out."""

import math

import pytest
import torch
from largest import Largest

import gradfilter as gf
from gradfilter.layers import ConvOp
from gradfilter.region import grid

# kernel, stride, padding, dilation, groups; size of x; method
LAYERS = {
    "whole patches": (((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1), (28, 28), {"grid": 7}),
    "stride 2": (((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1), (28, 28), {"grid": 7}),
    "stem": (((7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1), (56, 56), {"grid": 7}),
    "grouped": (((5, 3), (1, 1), (2, 2, 1, 1), (1, 1), 2), (30, 30), {"patch": 3}),
    "edge patches": (((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1), (17, 23), {"patch": 4}),
    "dilated": (((3, 3), (1, 1), (2, 2, 2, 2), (2, 2), 1), (20, 20), {"patch": 5}),
    "one tap": (((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1), (15, 15), {"patch": 4}),
}


def problem(name):
    geometry, size, knobs = LAYERS[name]
    op = ConvOp(*geometry)
    conv = grid.grid_conv(gf.GalerkinFilter(**knobs), op, size, torch.float64, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    cells = [[taps.shape[i] for taps in conv.taps] for i in (1, 2)]
    shapes = (2, 8, *cells[0]), (2, 6, *cells[1]), (8, 6 // op.groups, *op.kernel)
    g, x, w = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    # gx[q] and gw[a, b], with the counts of pixels between every two patches written out
    counts = torch.einsum("apq,brs->abprqs", *conv.taps)
    full = torch.zeros(8, 6, *op.kernel, dtype=torch.float64)
    for i in range(op.groups):
        o, c = 8 // op.groups, 6 // op.groups
        full[i * o : (i + 1) * o, i * c : (i + 1) * c] = w[i * o : (i + 1) * o]
    gx = torch.einsum("nopr,abprqs,ocab->ncqs", g, counts, full)
    gw = torch.einsum("nopr,abprqs,ncqs->ocab", g, counts, x)
    gw = torch.cat([p.chunk(op.groups, 1)[i] for i, p in enumerate(gw.chunk(op.groups, 0))])
    return conv, (g, x, w), (gx, gw)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * b.abs().max().item())


@pytest.mark.parametrize("name", LAYERS)
def test_every_way_gives_the_sums_over_the_counts(name):
    conv, tensors, (gx, gw) = problem(name)
    ways = [conv._spread]
    if conv.op.groups == 1:
        ways.append(conv._by_product)
    if conv.regular is not None:
        ways.append(conv.regular.backward)
    for way in ways:
        assert_same(way(*tensors, True, True), (gx, gw))
        assert_same(way(*tensors, True, False)[:1], (gx,))
        assert_same(way(*tensors, False, True)[1:], (gw,))
    assert_same(conv.backward(*tensors, True, True), (gx / conv.area, gw))


def test_whole_patches_have_an_ordinary_convolution_on_the_grid():
    regular = [name for name in LAYERS if problem(name)[0].regular is not None]
    assert regular == ["whole patches", "stride 2", "stem", "grouped", "dilated"]


def test_a_stem_on_a_grid_with_edge_patches_takes_no_map_of_all_taps_and_outputs():
    op, size = ConvOp((7, 7), (2, 2), (3, 3, 3, 3)), (65, 65)
    conv = grid.grid_conv(gf.GalerkinFilter(patch=2), op, size, torch.float32, torch.device("cpu"))
    g, x, w = torch.ones(2, 64, 17, 17), torch.ones(2, 3, 33, 33), torch.ones(64, 3, 7, 7)
    assert conv.regular is None and conv.diagonal is None
    with Largest() as largest:
        conv.backward(g, x, w, False, True)
    assert largest.numbers <= 2 * math.prod((2, 3, 7, 7, 17, 33))

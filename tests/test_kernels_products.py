"""Products and 3x3 convolutions by the C kernels, against PyTorch's own in float64."""

import pytest
import torch
from torch import Tensor

from gradfilter import kernels
from gradfilter.kernels import cpu, cpu_library, eager
from gradfilter.layers import ConvOp

LIBRARY = cpu_library.library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, cpu_library.Unavailable), reason="no C library")
THREE = ConvOp((3, 3), (1, 1), (1, 1, 1, 1))
# rows, inner, columns: around the sizes of tiles and panels, and of what is copied at once
SHAPES = [(1, 1, 1), (13, 5, 33), (7, 700, 31), (100, 600, 70), (300, 40, 17), (49, 96, 24)]
SHAPES += [(49, 385, 400), (401, 50, 390), (1, 40, 30), (30, 40, 1), (5, 0, 7)]
# N, C, O, H, W: the weights of the last two are not light
LAYERS = [(2, 33, 40, 7, 6), (2, 16, 1, 7, 6), (2, 1, 9, 5, 5), (1, 96, 24, 5, 5)]
LAYERS += [(3, 300, 130, 9, 7), (1, 130, 500, 5, 9)]
# N, C, O, H, W
MAPS = [(2, 32, 33, 7, 7), (1, 40, 32, 3, 14), (3, 70, 64, 5, 9), (1, 130, 100, 17, 4)]


def some_map(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def close(got: Tensor | None, wanted: Tensor | None) -> None:
    """Equal to rounding, of which sums over many products have more."""
    assert (got is None) == (wanted is None)
    if got is not None:
        assert got.shape == wanted.shape and got.dtype == torch.float32
        assert float((got - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.fixture(params=["own", "PyTorch's"])
def product(request):
    """The product here, and the one that is preferred on Intel's processors."""
    other = cpu_library._product()
    if other is None and request.param != "own":
        pytest.skip("PyTorch lends no product")
    wanted = other if LIBRARY.handle.gf_wants_product() else None
    LIBRARY.handle.gf_set_product(None if request.param == "own" else other)
    yield
    LIBRARY.handle.gf_set_product(wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape, product, threads):
    m, k, n = shape
    a, b = torch.randn(m, k), torch.randn(k, n)
    wanted = a.double() @ b.double()
    close(kernels.product(a, b), wanted)
    close(kernels.product(a.T.contiguous().T, b), wanted)
    spaced = torch.zeros(2 * m, k)
    spaced[::2] = a
    close(kernels.product(spaced[::2], b), wanted)
    assert kernels.product(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_1x1_layers_by_either_product(shape, product, threads):
    n, c, o, h, w = shape
    x, weight, g = some_map(n, c, h, w), some_map(o, c, 1, 1), some_map(n, o, h, w, seed=1)
    wanted = eager.convolve(x.double(), weight.double(), ConvOp((1, 1)))
    for stats in (False, True):
        y, mean, _ = cpu.pointwise(x, weight, None, None, "none", (2, 2), None, stats)
        close(y, wanted)
        close(mean, eager.patch_mean(wanted, (2, 2)) if stats else None)
    dots = torch.empty(o)
    _, gx, gw = cpu.pointwise_grid_backward(g, None, None, 1.0, x, weight, (1.0, 2.0), dots=dots)
    close(gx, torch.einsum("nopq,oc->ncpq", g.double(), weight[:, :, 0, 0].double()))
    wanted = 2 * torch.einsum("nopq,ncpq->oc", g.double(), x.double())
    close(gw[:, :, 0, 0], wanted)
    close(dots, (wanted * weight[:, :, 0, 0].double()).sum(1))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("maps", MAPS, ids=str)
def test_3x3_layers(maps, layout, threads):
    n, c, o, h, w = maps
    x, g = some_map(n, c, h, w), some_map(n, o, h, w, seed=1)
    weight = some_map(o, c, 3, 3, seed=2).contiguous(memory_format=layout)
    close(kernels.convolve(x, weight, THREE), eager.convolve(x.double(), weight.double(), THREE))
    wanted = eager.conv3x3_backward(g.double(), x.double(), weight.double())
    for need_gx, need_gw in [(True, True), (True, False), (False, True)]:
        for body in (cpu, eager):
            found = body.conv3x3_backward(g, x if need_gw else None, weight, need_gx, need_gw)
            close(found[0], wanted[0] if need_gx else None)
            close(found[1], wanted[1] if need_gw else None)


@pytest.mark.parametrize("threads", [1], indirect=True)  # with more it pays from more outputs on
@pytest.mark.parametrize("maps", MAPS, ids=str)
def test_every_3x3_layer_that_pays_goes_this_way(maps, threads, monkeypatch):
    n, c, o, h, w = maps
    called = []
    monkeypatch.setattr(LIBRARY, "gf_winograd_forward", lambda *_: called.append(1) and 0)
    x, weight = some_map(n, c, h, w), some_map(o, c, 3, 3)
    for op in (THREE, ConvOp((3, 3), (2, 2), (1, 1, 1, 1)), ConvOp((3, 3))):
        if h >= 3:
            kernels.convolve(x, weight, op)
    kernels.convolve(x[:, :31].contiguous(memory_format=torch.channels_last), weight[:, :31], THREE)
    assert called == [1]
    assert kernels.conv3x3_pays(some_map(3, o, 7, 7), c)
    assert not kernels.conv3x3_pays(some_map(2, o, 7, 7), c)  # few tiles
    assert not kernels.conv3x3_pays(some_map(3, o, 7, 7), 31)
    assert not kernels.conv3x3_pays(some_map(3, o, 7, 7).double(), c)

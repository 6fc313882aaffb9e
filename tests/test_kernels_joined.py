"""1x1 layers in one call of C each way, against the kernels that do the same one after another."""

import pytest
import torch
from torch import Tensor

from gradfilter import kernels
from gradfilter.kernels import cpu, cpu_library, eager
from gradfilter.layers import ConvOp

LIBRARY = cpu_library.library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, cpu_library.Unavailable), reason="no C library")
ONE = ConvOp((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
# N, C, O, H, W, patch; the last is computed in several strips
LAYERS = [
    (2, 5, 7, 6, 4, (2, 2)),
    (1, 3, 70, 9, 11, (4, 3)),
    (3, 40, 16, 7, 7, (1, 1)),
    (1, 1, 1, 1, 1, (3, 3)),
    (2, 8, 96, 50, 41, (7, 6)),
]


def some_map(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)


def close(got, wanted) -> None:
    """Equal to rounding, nothing left unwritten; wanted is computed in float64."""
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.double() for t in tensors]


def eighths(x: Tensor) -> Tensor:
    """Few enough bits for sums of products to be exact, so that nothing rounds over a corner."""
    return (x * 8).round() / 8


@pytest.mark.parametrize("act", ["none", "relu6", "silu"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_forward(layer, act, threads):
    n, c, o, h, w, side = layer
    maps = some_map(n, c, h, w), some_map(o, c, 1, 1), some_map(n, o, h, w, seed=1)
    x, weight, residual = map(eighths, maps)
    factor, shift = eighths(torch.rand(2, o))
    for scale, plus, stats in [(factor, residual, True), (None, None, True), (factor, None, False)]:
        got = cpu.pointwise(x, weight, scale, shift, act, side, plus, stats)
        y = eager.convolve(*wide(x, weight), ONE)
        close(got, eager.epilogue(y, *wide(scale, shift), act, side, *wide(plus), stats))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("sloped", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_backward(layer, sloped, scaled, threads):
    n, c, o, p, q, _ = layer
    g, x, w = some_map(n, o, p, q), some_map(n, c, p, q), some_map(o, c, 1, 1)
    slope = some_map(n, o, p, q, seed=1) if sloped else None
    scale = torch.rand(o) if scaled else None
    sums, dots = torch.full((2, o), torch.nan)
    got = cpu.pointwise_grid_backward(g, slope, scale, 4.0, x, w, (0.5, 3.0), sums, dots)

    want_sums, want_dots = torch.empty(2, o, dtype=torch.float64)
    z, s = eager.slope_backward(*wide(g, slope, scale), 4.0, want_sums)
    gx = torch.einsum("nopq,oc->ncpq", s, w[:, :, 0, 0].double()) / 2
    gw = 3 * torch.einsum("nopq,ncpq->oc", s, x.double())[:, :, None, None]
    eager.row_dots(gw, w.double(), want_dots)
    scale_of = max(1.0, float(gw.abs().max()))
    close(got[:2], (z, gx))
    close(
        [t / scale_of for t in (got[2], sums, dots)],
        [t / scale_of for t in (gw, want_sums, want_dots)],
    )


def test_only_what_is_wanted_is_computed():
    g, slope, w = some_map(2, 6, 4, 4), some_map(2, 6, 4, 4, seed=1), some_map(6, 5, 1, 1)
    x, rest = some_map(2, 5, 4, 4), {"need_z": False}
    z, gx, gw = cpu.pointwise_grid_backward(
        g, slope, None, 1.0, None, w, (1.0, 1.0), need_gw=False, **rest
    )
    assert z is None and gw is None
    close([gx], [torch.einsum("nopq,oc->ncpq", (g * slope).double(), w[:, :, 0, 0].double())])
    z, gx, gw = cpu.pointwise_grid_backward(
        g, 5 * slope, None, 1.0, x, w, (1.0, 1.0), need_gx=False, act="relu6", **rest
    )
    masked = g * ((slope > 0) & (5 * slope < 6))
    assert z is None and gx is None
    close([gw[:, :, 0, 0]], [torch.einsum("nopq,ncpq->oc", masked.double(), x.double())])


def test_a_residual_of_another_shape_does_not_reach_c():
    with pytest.raises(ValueError, match="residual"):
        x, w = some_map(1, 4, 3, 3), some_map(2, 4, 1, 1)
        cpu.pointwise(x, w, None, None, "relu", (1, 1), x)


def test_which_maps_they_take():
    x = some_map(2, 3, 4, 4)
    assert kernels.joined(x) is cpu
    assert kernels.joined(x.double()) is None and kernels.joined(x.contiguous()) is None
    with kernels.using(eager):
        assert kernels.joined(x) is None

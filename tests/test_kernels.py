"""The kernels: eager against loops and autograd in float64, C and Triton against eager.

Triton's kernels run on a CUDA device where there is one, and else, one by one, in Triton's
interpreter: that needs TRITON_INTERPRET=1 before Triton is imported, so one test here runs the
Triton part of this file again in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradfilter.kernels import cpu, cpu_library, eager

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ACTS = [*eager.ACTIVATIONS, ("leaky_relu", 0.2), ("elu", 0.5)]
# N, C, H, W, patch: odd sizes, sizes below the patch, one image, few and odd channels.
MAPS = [
    (2, 16, 7, 7, (1, 1)),
    (1, 1, 5, 4, (2, 3)),
    (2, 3, 9, 11, (4, 4)),
    (1, 37, 13, 8, (5, 16)),
    (1, 24, 1, 1, (3, 3)),
    (2, 70, 6, 10, (3, 2)),
    (1, 40, 12, 33, (4, 7)),
]
# kernel, stride, padding (top, bottom, left, right), dilation
CONVS = [
    ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    ((2, 2), (2, 2), (0, 1, 1, 0), (1, 1)),
    ((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((3, 3), (2, 2), (0, 1, 0, 1), (1, 1)),
    ((3, 3), (1, 1), (2, 2, 2, 2), (2, 2)),
    ((5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    ((5, 5), (2, 2), (2, 2, 1, 3), (1, 1)),
    ((7, 7), (3, 3), (3, 3, 3, 3), (1, 1)),
    ((3, 5), (2, 1), (1, 1, 6, 2), (1, 2)),
    ((3, 3), (1, 1), (6, 0, 0, 6), (1, 1)),
]
# kernel, stride, padding, dilation
POOLS = [
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((2, 2), (2, 2), (0, 0), (1, 1)),
    ((3, 2), (1, 3), (1, 1), (1, 1)),
    ((2, 3), (1, 1), (1, 0), (2, 1)),
    ((5, 5), (1, 1), (2, 2), (1, 1)),
]
POOL_ACTS = ["none", "relu", "hardswish", "tanh", ("leaky_relu", 0.2)]
if INTERPRETED:  # a launch takes seconds
    MAPS = [(1, 3, 5, 4, (2, 3)), (2, 17, 3, 6, (1, 4))]
    CONVS, POOLS, POOL_ACTS = [CONVS[1], CONVS[2], CONVS[6]], POOLS[:3], ["none", "hardswish"]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def upsample(x: Tensor, size: tuple[int, int], side: tuple[int, int]) -> Tensor:
    """Each patch's value on all its pixels."""
    h, w = torch.arange(size[0]) // side[0], torch.arange(size[1]) // side[1]
    return x[:, :, h][:, :, :, w]


def patch_sum(x: Tensor, side: tuple[int, int]) -> Tensor:
    """By loops over patches, unlike patch_mean."""
    (n, c, h, w), (rh, rw) = x.shape, side
    out = x.new_zeros(n, c, -(-h // rh), -(-w // rw))
    for p, q in product(range(out.shape[2]), range(out.shape[3])):
        out[:, :, p, q] = x[:, :, p * rh : (p + 1) * rh, q * rw : (q + 1) * rw].sum((2, 3))
    return out


def by_loops(x: Tensor, side: tuple[int, int]) -> Tensor:
    return patch_sum(x, side) / patch_sum(torch.ones_like(x), side)


def tap_table(size, out, k, stride, pad, dilation, side_in, side_out) -> Tensor:
    """How many pixels of output patch p read input patch q through tap a: [k, P, Q]."""
    table = torch.zeros(k, -(-out // side_out), -(-size // side_in), dtype=torch.float64)
    for a, i in product(range(k), range(out)):
        j = i * stride + a * dilation - pad
        if 0 <= j < size:
            table[a, i // side_out, j // side_in] += 1
    return table


def fits(shape, conv) -> bool:
    """Is the padded map at least as large as the kernel?"""
    (kernel, _, (top, bottom, left, right), dilation) = conv
    room = shape[2] + top + bottom, shape[3] + left + right
    return all(r > d * (k - 1) for r, d, k in zip(room, dilation, kernel, strict=True))


LAYERS = [(shape, conv) for shape in MAPS for conv in CONVS if fits(shape, conv)]


def grid_problem(shape, conv, side_out):
    """g, x, w, taps_h, taps_w of a depthwise layer with x patches as in `shape`."""
    (n, c, h, w, side), (kernel, stride, padding, dilation) = shape, conv
    out = eager.depthwise_conv(noise(1, 1, h, w), noise(1, 1, *kernel), *conv[1:]).shape[2:]
    taps = [
        tap_table(size, o, k, s, p, d, a, b)
        for size, o, k, s, p, d, a, b in zip(
            (h, w), out, kernel, stride, padding[::2], dilation, side, side_out, strict=True
        )
    ]
    g = noise(n, c, taps[0].shape[1], taps[1].shape[1], seed=1)
    x = noise(n, c, taps[0].shape[2], taps[1].shape[2], seed=2)
    return g, x, noise(c, 1, *kernel, seed=3), *taps


def reach(shape, pool):
    """first_h, first_w and the input grid of a pool with output patches of (2, 3)."""
    axes = zip(shape[2:4], *pool, shape[4], (2, 3), strict=True)
    grid = tuple(-(-size // r) for size, r in zip(shape[2:4], shape[4], strict=True))
    return *(eager.pool_reach(*axis)[0] for axis in axes), grid


# What eager means


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_slopes_are_autograds(act):
    name, parameter = eager.activation(act)
    kinks = torch.tensor([-3.0, 0.0, 3.0, 6.0, -30.0, 30.0], dtype=torch.float64)
    z = torch.cat([kinks, 4 * noise(200)]).requires_grad_()
    f, slope, _ = eager.ACTIVATIONS[name]
    (expected,) = torch.autograd.grad(f(z, parameter).sum(), z)
    torch.testing.assert_close(slope(z.detach(), parameter), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_patch_mean_is_the_mean_of_each_patch(shape):
    *size, side = shape
    x = noise(*size)
    torch.testing.assert_close(eager.patch_mean(x, side), by_loops(x, side))


@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_epilogue_means_what_it_says(shape):
    (n, c, h, w, side) = shape
    y, residual, scale, shift = noise(n, c, h, w), noise(n, c, h, w, seed=1), noise(c), noise(c)
    z = y * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual
    a, mean, slope = eager.epilogue(y, scale, shift, "silu", side, residual)
    z.requires_grad_()
    torch.testing.assert_close(a, F.silu(z))
    torch.testing.assert_close(mean, by_loops(a, side))
    (derivative,) = torch.autograd.grad(F.silu(z).sum(), z)
    torch.testing.assert_close(slope, by_loops(derivative, side))
    assert eager.epilogue(y, None, None, "none", side)[2] is None
    assert eager.epilogue(y, None, None, "relu", side, stats=False)[1:] == (None, None)


@pytest.mark.parametrize("shape, conv", [layer for layer in LAYERS if layer[0][1] < 40], ids=str)
def test_depthwise_is_a_sum_over_taps(shape, conv):
    (n, c, h, w, side), (kernel, stride, padding, dilation) = shape, conv
    x, weight, shift = noise(n, c, h, w), noise(c, 1, *kernel), noise(c)
    a, mean, _ = eager.depthwise(x, weight, None, shift, "none", *conv[1:], side)
    expected = torch.zeros_like(a)
    for i, j, s, t in product(*map(range, (*a.shape[2:], *kernel))):
        row = i * stride[0] + s * dilation[0] - padding[0]
        column = j * stride[1] + t * dilation[1] - padding[2]
        if 0 <= row < h and 0 <= column < w:
            expected[:, :, i, j] += weight[:, 0, s, t] * x[:, :, row, column]
    torch.testing.assert_close(a, expected + shift.view(-1, 1, 1))
    torch.testing.assert_close(mean, by_loops(a, side))


@pytest.mark.parametrize("shape, conv", [layer for layer in LAYERS if layer[0][1] < 40], ids=str)
def test_grid_backward_is_autograd_on_upsampled_maps(shape, conv):
    *size, side = shape
    g, x, w, *taps = grid_problem(shape, conv, (2, 3))
    dense, w = upsample(x, size[2:], side).requires_grad_(), w.requires_grad_()
    y = eager.depthwise_conv(dense, w, *conv[1:])
    gx, gw = torch.autograd.grad(y, (dense, w), upsample(g, y.shape[2:], (2, 3)))
    with torch.no_grad():
        got = eager.depthwise_grid_backward(g, x, w, *taps)
    torch.testing.assert_close(got[0], patch_sum(gx, side))
    torch.testing.assert_close(got[1], gw)
    assert eager.depthwise_grid_backward(g, x, w, *taps, False, False) == (None, None)


@pytest.mark.parametrize("act", ["none", "relu", "silu"])
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("shape", [m for m in MAPS if m[2] > 1], ids=str)
def test_max_pool_routes_the_gradient_as_autograd(shape, pool, act):
    (n, c, h, w, side) = shape
    y, scale, shift = noise(n, c, h, w).round(), noise(c), noise(c)  # rounded: many ties
    z = eager._affine(y, scale, shift).requires_grad_()
    expected = F.max_pool2d(eager.ACTIVATIONS[act].f(z, 0.0), *pool)
    out, mean, route = eager.max_pool(y, scale, shift, act, *pool, side, (2, 3))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(mean, by_loops(expected, (2, 3)))
    g = noise(*mean.shape, seed=4)
    (gz,) = torch.autograd.grad(expected, z, upsample(g, out.shape[2:], (2, 3)))
    got = eager.max_pool_grid_backward(g, route, *reach(shape, pool))
    torch.testing.assert_close(got, patch_sum(gz.detach(), side))


# The fast kernels against eager


def backends() -> list[str]:
    """Every instruction set of the C library that this machine has, and Triton if it can run."""
    library = cpu_library.library()
    found = []
    if not isinstance(library, cpu_library.Unavailable):
        names = (b"sse2", b"avx2", b"avx512", b"plain")
        found = [name.decode() for name in names if library.handle.gf_select(name)]
        library.handle.gf_select(None)
    return found + (["triton"] if INTERPRETED or torch.cuda.is_available() else [])


@pytest.fixture(params=backends())
def backend(request):
    """A module of kernels and its device; memory that nobody wrote reads as NaN."""
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    if request.param == "triton":
        from gradfilter.kernels import triton as module

        yield module, "cuda" if torch.cuda.is_available() else "cpu"
    else:
        cpu_library.library().handle.gf_select(request.param.encode())
        yield cpu, "cpu"
        cpu_library.library().handle.gf_select(None)
    torch.use_deterministic_algorithms(False)


def agrees(backend, name: str, *args, **options) -> None:
    """The backend's float32 results, and what it wrote to its arguments, are eager's in float64."""
    module, device = backend

    def fast(value):
        if not isinstance(value, Tensor):
            return value
        value = value.to(device, torch.float32)
        return channels_last(value) if value.ndim == 4 and value.shape[1] > 1 else value

    body = getattr(eager, name)
    # Rounding to float32 first, so that both see the same numbers.
    exact = [v.float().double() if isinstance(v, Tensor) else v for v in args]
    expected = body(*exact, **options)
    given = [fast(v) for v in args]
    got = getattr(module, name)(*given, **{k: fast(v) for k, v in options.items()})
    got, expected = (r if isinstance(r, tuple) else (r,) for r in (got, expected))
    written = [i for i, v in enumerate(args) if isinstance(v, Tensor) and v.ndim == 1]
    got += tuple(given[i] for i in written)
    expected += tuple(exact[i] for i in written)
    for a, b in zip(got, expected, strict=True):
        if b is None:
            assert a is None
            continue
        largest = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=4e-6 * largest)


@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_fast_patch_mean(backend, shape):
    *size, side = shape
    agrees(backend, "patch_mean", noise(*size), side)


@pytest.mark.parametrize("shape", MAPS[-5:-1], ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_fast_epilogue(backend, act, shape):
    (n, c, h, w, side) = shape
    y, residual = 4 * noise(n, c, h, w), noise(n, c, h, w, seed=1)
    agrees(backend, "epilogue", y, noise(c), noise(c, seed=1), act, side)
    agrees(backend, "epilogue", y, None, noise(c), act, side, residual=residual)
    agrees(backend, "epilogue", y, noise(c), None, act, side, stats=False)


@pytest.mark.parametrize("shape, conv", LAYERS, ids=str)
def test_fast_depthwise(backend, shape, conv):
    (n, c, h, w, side) = shape
    x, weight = noise(n, c, h, w), noise(c, 1, *conv[0])
    agrees(backend, "depthwise", x, weight, noise(c), noise(c), "relu6", *conv[1:], side)
    agrees(backend, "depthwise", x, weight, None, None, "none", *conv[1:], side, stats=False)


@pytest.mark.parametrize("shape, conv", LAYERS, ids=str)
def test_fast_grid_backward(backend, shape, conv):
    for side_out in [(1, 1), (2, 3)]:
        problem = grid_problem(shape, conv, side_out)
        agrees(backend, "depthwise_grid_backward", *problem)
        agrees(backend, "spread", problem[0], *problem[3:])
    agrees(backend, "depthwise_grid_backward", *problem, need_gx=False)
    agrees(backend, "depthwise_grid_backward", *problem, need_gw=False)


def test_fast_grid_backward_takes_any_table(backend):
    g, x, w = noise(2, 5, 4, 6), noise(2, 5, 3, 7, seed=1), noise(5, 1, 2, 3)
    taps = noise(2, 4, 3), noise(3, 6, 7)
    agrees(backend, "depthwise_grid_backward", g, x, w, *taps)
    agrees(backend, "spread", g, *taps)


@pytest.mark.parametrize("act", POOL_ACTS, ids=str)
@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("shape", [m for m in MAPS if m[2] > 1], ids=str)
def test_fast_max_pool(backend, shape, pool, act):
    (n, c, h, w, side) = shape
    y, scale, shift = noise(n, c, h, w).round(), noise(c), noise(c, seed=1)  # many ties
    agrees(backend, "max_pool", y, scale, shift, act, *pool, side, (2, 3))
    agrees(backend, "max_pool", y, None, None, act, *pool, side, (2, 3), stats=False)
    _, mean, route = eager.max_pool(y, scale, shift, act, *pool, side, (2, 3))
    agrees(backend, "max_pool_grid_backward", noise(*mean.shape), route, *reach(shape, pool))


SIZES = st.integers(1, 3), st.integers(1, 35), st.integers(1, 20), st.integers(1, 20)
PATCHES = st.tuples(st.integers(1, 9), st.integers(1, 9))
SMALL = st.tuples(st.integers(1, 3), st.integers(1, 3))
PADS = st.tuples(*[st.integers(0, 4)] * 4)
DRAWN_CONVS = st.tuples(st.tuples(st.integers(1, 6), st.integers(1, 6)), SMALL, PADS, SMALL)


@pytest.mark.skipif(
    isinstance(cpu_library.library(), cpu_library.Unavailable), reason="no C library"
)
@settings(max_examples=150, deadline=None)
@given(st.tuples(*SIZES, PATCHES), DRAWN_CONVS, PATCHES, st.sampled_from(ACTS))
def test_c_agrees_with_eager_on_any_layer(shape, conv, side_out, act):
    if not fits(shape, conv):
        conv = (1, 1), *conv[1:]
    (n, c, h, w, _), on_cpu = shape, (cpu, "cpu")
    x, weight = noise(n, c, h, w), noise(c, 1, *conv[0])
    agrees(on_cpu, "epilogue", x.clone(), noise(c), noise(c), act, side_out)
    agrees(on_cpu, "depthwise", x, weight, noise(c), None, act, *conv[1:], side_out)
    g, x, w, *taps = grid_problem(shape, conv, side_out)
    agrees(on_cpu, "depthwise_grid_backward", g, x, w, *taps)
    agrees(on_cpu, "spread", g, *taps)


@pytest.mark.parametrize("shape", [*MAPS, (4, 8, 40, 40, None)], ids=str)
def test_fast_slope_backward(backend, shape):
    n, c, p, q = shape[:4]
    g, slope, scale = noise(n, c, p, q), noise(n, c, p, q, seed=1), noise(c)
    agrees(backend, "slope_backward", g, slope, scale, noise(p, q).abs(), noise(c))
    agrees(backend, "slope_backward", g, slope, None, 4.0, noise(c))
    agrees(backend, "slope_backward", g, None, scale, 4.0)
    agrees(backend, "slope_backward", g, slope, scale, 4.0, None, False)
    for act in eager.IDEMPOTENT:
        agrees(backend, "slope_backward", g, 5 * slope, scale, 4.0, noise(c), act=act)


def test_sums_of_slope_backward_are_over_pixels():
    g, slope, area, sums = noise(2, 5, 3, 4), noise(2, 5, 3, 4, seed=1), noise(3, 4).abs(), noise(5)
    eager.slope_backward(g, slope, None, area, sums)
    torch.testing.assert_close(sums, (g * slope * area).sum((0, 2, 3)))


@pytest.mark.parametrize("shape", [(5, 7, 3, 3), (3, 130, 1, 1)], ids=str)
def test_fast_row_dots(backend, shape):
    a, b, dots = noise(*shape), noise(*shape, seed=1), noise(shape[0])
    agrees(backend, "row_dots", a, b, noise(shape[0]))
    eager.row_dots(a, b, dots)
    torch.testing.assert_close(dots, (a * b).sum((1, 2, 3)))


def test_nan_and_infinity_come_through(backend):
    module, device = backend
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0], device=device)
    y = channels_last(values.repeat(20, 1)[None, :, :, None])  # [1, 20, 4, 1]
    for act in ("none", "relu", "relu6", "sigmoid", "tanh", "hardsigmoid"):
        a, _, _ = module.epilogue(y.clone(), None, None, act, (1, 1))
        expected, _, _ = eager.epilogue(y, None, None, act, (1, 1))
        torch.testing.assert_close(a, expected, equal_nan=True)
    out, _, _ = module.max_pool(
        y, None, None, "none", (2, 1), (1, 1), (0, 0), (1, 1), (1, 1), (1, 1)
    )
    torch.testing.assert_close(out, F.max_pool2d(y, (2, 1), 1), equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on the device")
def test_triton_in_the_interpreter():
    again = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "triton and not interpreter"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(again, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "skipped" not in result.stdout, result.stdout

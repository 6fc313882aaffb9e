"""The C kernels of cpu.c, called through ctypes: float32 maps in channels-last order on the CPU."""

import ctypes
import functools

import torch
from torch import Tensor

from gradfilter.kernels import eager
from gradfilter.kernels.cpu_library import FLOATS, library
from gradfilter.kernels.eager import Act, Pair, Stats, activation, pool_reach, pool_size
from gradfilter.layers import ConvOp

# The activations cpu.c has, in its order; whatever is missing here runs on the eager body.
_ACTS = ["none", "relu", "relu6", "hardswish", "hardsigmoid", "silu", "sigmoid", "gelu"]
_ACTS += ["gelu_tanh", "tanh", "leaky_relu", "elu", "mish"]
ACTS = {name: number for number, name in enumerate(_ACTS)}


def _check(code: int) -> None:
    if code:
        raise MemoryError("no memory for a kernel's scratch space")


def _channels_last(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise TypeError(f"expected a float32 CPU map, got {x.dtype} on {x.device}")
    return x.contiguous(memory_format=torch.channels_last)


def _floats(t: Tensor, count: int) -> Tensor:
    """t as `count` contiguous floats."""
    if t.dtype is not torch.float32 or not t.is_cpu or t.numel() != count:
        got = f"{t.numel()} {t.dtype} on {t.device}"
        raise TypeError(f"expected {count} float32 on the CPU, got {got}")
    return t.contiguous()


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _written(t: Tensor | None, count: int) -> int | None:
    """Where a kernel writes `count` floats."""
    if t is not None and _floats(t, count) is not t:
        raise ValueError("a kernel can only write to contiguous floats")
    return _pointer(t)


def _vectors(scale: Tensor | None, shift: Tensor | None, c: int) -> tuple[Tensor | None, ...]:
    return (
        None if scale is None else _floats(scale, c),
        None if shift is None else _floats(shift, c),
    )


def _map(n: int, c: int, h: int, w: int) -> Tensor:
    return torch.empty((n, c, h, w), memory_format=torch.channels_last, **FLOATS)


@functools.lru_cache(maxsize=4096)
def _integers(*values: int) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def patch_mean(x: Tensor, side: Pair) -> Tensor:
    """See eager.patch_mean."""
    n, c, h, w = x.shape
    x = _channels_last(x)
    mean = _map(n, c, -(-h // side[0]), -(-w // side[1]))
    _check(library().gf_patch_mean(
        x.data_ptr(), mean.data_ptr(), n, h, w, c, *side, torch.get_num_threads()
    ))
    return mean


def _statistics(shape: tuple[int, ...], side: Pair, name: str, stats: bool) -> tuple:
    """Empty maps for the patch mean and the patch slope, or None where there is none."""
    if not stats:
        return None, None
    n, c, h, w = shape
    grid = n, c, -(-h // side[0]), -(-w // side[1])
    return _map(*grid), None if name == "none" else _map(*grid)


def epilogue(
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    side: Pair,
    residual: Tensor | None = None,
    stats: bool = True,
) -> Stats:
    """See eager.epilogue; `a` overwrites y."""
    name, parameter = activation(act)
    n, c, h, w = y.shape
    if residual is not None:
        if residual.shape != y.shape:
            raise ValueError(f"residual {tuple(residual.shape)} does not match y {tuple(y.shape)}")
        residual = _channels_last(residual)
    y = _channels_last(y)
    scale, shift = _vectors(scale, shift, c)
    mean, slope = _statistics(y.shape, side, name, stats)
    _check(library().gf_epilogue(
        y.data_ptr(), _pointer(residual), _pointer(scale), _pointer(shift), _pointer(mean),
        _pointer(slope), n, h, w, c, *side, ACTS[name], parameter, torch.get_num_threads(),
    ))
    return y, mean, slope


def pointwise(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    side: Pair,
    residual: Tensor | None = None,
    stats: bool = True,
) -> Stats:
    """A 1x1 convolution by w [O, C, 1, 1], then `epilogue`, in one pass over the output."""
    name, parameter = activation(act)
    (n, c, h, width), o = x.shape, len(w)
    if residual is not None:
        if residual.shape != (n, o, h, width):
            raise ValueError(f"residual {tuple(residual.shape)} does not match the output")
        residual = _channels_last(residual)
    x, w = _channels_last(x), _floats(w, o * c)
    scale, shift = _vectors(scale, shift, o)
    y = _map(n, o, h, width)
    mean, slope = _statistics(y.shape, side, name, stats)
    _check(library().gf_pointwise(
        x.data_ptr(), w.data_ptr(), _pointer(residual), _pointer(scale), _pointer(shift),
        y.data_ptr(), _pointer(mean), _pointer(slope), n, h, width, c, o, *side, ACTS[name],
        parameter, torch.get_num_threads(),
    ))
    return y, mean, slope


def product(a: Tensor, b: Tensor) -> Tensor:
    """See eager.product; b in rows, a in rows or columns."""
    (m, k), n = a.shape, b.shape[1]
    _floats(a, m * k), _floats(b, k * n)
    if not b.is_contiguous() or not (a.is_contiguous() or a.T.is_contiguous()):
        a, b = a.contiguous(), b.contiguous()
    steps = (k, 1) if a.is_contiguous() else (1, m)
    c = torch.empty((m, n), **FLOATS)
    _check(library().gf_product(
        a.data_ptr(), b.data_ptr(), c.data_ptr(), *steps, m, n, k, torch.get_num_threads()
    ))
    return c


def depthwise(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    stride: Pair,
    padding: tuple[int, int, int, int],
    dilation: Pair,
    side: Pair,
    stats: bool = True,
) -> Stats:
    """See eager.depthwise."""
    name, parameter = activation(act)
    n, c, h, width = x.shape
    kh, kw = w.shape[2:]
    top, bottom, left, right = padding
    out_h = (h + top + bottom - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    out_w = (width + left + right - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    x, w = _channels_last(x), _floats(w, c * kh * kw)
    scale, shift = _vectors(scale, shift, c)
    y = _map(n, c, out_h, out_w)
    mean, slope = _statistics(y.shape, side, name, stats)
    _check(library().gf_depthwise(
        x.data_ptr(), w.data_ptr(), _pointer(scale), _pointer(shift), y.data_ptr(), _pointer(mean),
        _pointer(slope), n, h, width, c, out_h, out_w,
        _integers(kh, kw, *stride, top, left, *dilation), *side, ACTS[name], parameter,
        torch.get_num_threads(),
    ))
    return y, mean, slope


def depthwise_grid_backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    taps_h: Tensor,
    taps_w: Tensor,
    need_gx: bool = True,
    need_gw: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """See eager.depthwise_grid_backward."""
    (n, c, p1, p2), (q1, q2), (kh, kw) = g.shape, x.shape[2:], w.shape[2:]
    g, x, w = _channels_last(g), _channels_last(x), _floats(w, c * kh * kw)
    taps_h, taps_w = _floats(taps_h, kh * p1 * q1), _floats(taps_w, kw * p2 * q2)
    gx = _map(n, c, q1, q2) if need_gx else None
    gw = torch.empty((c, 1, kh, kw), **FLOATS) if need_gw else None
    if need_gx or need_gw:
        _check(library().gf_grid_backward(
            g.data_ptr(), x.data_ptr(), w.data_ptr(), taps_h.data_ptr(), taps_w.data_ptr(),
            _pointer(gx), _pointer(gw), n, c, p1, p2, q1, q2, kh, kw, torch.get_num_threads(),
        ))
    return gx, gw


def max_pool(
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    side_in: Pair,
    side_out: Pair,
    stats: bool = True,
) -> Stats:
    """See eager.max_pool; route's channels are its last axis in memory."""
    name, parameter = activation(act)
    n, c, h, w = y.shape
    axes = zip((h, w), kernel, stride, padding, dilation, side_in, side_out, strict=True)
    (first_h, d1), (first_w, d2) = (pool_reach(*axis) for axis in axes)
    geometry = zip((h, w), kernel, stride, padding, dilation, strict=True)
    out_h, out_w = (pool_size(*axis) for axis in geometry)
    y = _channels_last(y)
    scale, shift = _vectors(scale, shift, c)
    out = _map(n, c, out_h, out_w)
    mean = _map(n, c, len(first_h), len(first_w)) if stats else None
    cells = n, len(first_h), len(first_w), d1, d2, c
    route = torch.empty(cells, **FLOATS) if stats else None
    _check(library().gf_max_pool(
        y.data_ptr(), _pointer(scale), _pointer(shift), out.data_ptr(), _pointer(mean),
        _pointer(route), _integers(*first_h), _integers(*first_w), n, h, w, c, out_h, out_w,
        _integers(*kernel, *stride, *padding, *dilation, *side_in, *side_out, d1, d2),
        ACTS[name], parameter, torch.get_num_threads(),
    ))
    return out, mean, None if route is None else route.permute(0, 5, 1, 2, 3, 4)


def max_pool_grid_backward(
    g: Tensor, route: Tensor, first_h: list[int], first_w: list[int], q_shape: Pair
) -> Tensor:
    """See eager.max_pool_grid_backward."""
    n, c, p1, p2, d1, d2 = route.shape
    g = _channels_last(g)
    route = _floats(route.permute(0, 2, 3, 4, 5, 1), n * g[0].numel() * d1 * d2)
    gx = _map(n, c, *q_shape)
    _check(library().gf_pool_grid_backward(
        g.data_ptr(), route.data_ptr(), _integers(*first_h), _integers(*first_w), gx.data_ptr(),
        n, c, p1, p2, d1, d2, *q_shape, torch.get_num_threads(),
    ))
    return gx


def slope_backward(
    g: Tensor,
    slope: Tensor | None,
    scale: Tensor | None,
    area: Tensor | float,
    sums: Tensor | None = None,
    need_z: bool = True,
    act: str = "none",
) -> tuple[Tensor | None, Tensor]:
    """See eager.slope_backward."""
    n, c, p, q = g.shape
    slope = None if slope is None else _channels_last(slope)
    scale, _ = _vectors(scale, None, c)
    cells = None if isinstance(area, float) else _floats(area, p * q)
    z = _map(n, c, p, q) if slope is not None and (need_z or scale is None) else None
    scaled = _map(n, c, p, q) if scale is not None else None
    _check(library().gf_slope_backward(
        g.data_ptr(), _pointer(slope), _pointer(scale), _pointer(cells),
        area if cells is None else 0.0, _pointer(z), _pointer(scaled), _written(sums, c),
        n, p * q, c, ACTS[act], torch.get_num_threads(),
    ))
    z = g if slope is None else z
    return z, z if scaled is None else scaled


def pointwise_grid_backward(
    g: Tensor,
    slope: Tensor | None,
    scale: Tensor | None,
    area: float,
    x: Tensor | None,
    w: Tensor,
    into: tuple[float, float],
    sums: Tensor | None = None,
    dots: Tensor | None = None,
    need_z: bool = True,
    need_gx: bool = True,
    need_gw: bool = True,
    act: str = "none",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`slope_backward`, and from its second result s both gradients of a 1x1 convolution.

    z, gx = into[0] * s w, gw = into[1] * s^T x; <gw[o], w[o]> into `dots` where it is given.
    """
    (n, o, p, q), c = g.shape, w.shape[1]
    slope = None if slope is None else _channels_last(slope)
    scale, _ = _vectors(scale, None, o)
    g, w = _channels_last(g), _floats(w, o * c)
    x = _channels_last(x) if need_gw else None
    z = _map(n, o, p, q) if slope is not None and need_z else None
    gx = _map(n, c, p, q) if need_gx else None
    gw = torch.empty(w.shape, **FLOATS) if need_gw else None
    _check(library().gf_pointwise_backward(
        g.data_ptr(), _pointer(slope), _pointer(scale), area, _pointer(z), _written(sums, o),
        _pointer(x), w.data_ptr(), _pointer(gx), _pointer(gw), _written(dots, o), *into,
        n, p * q, c, o, ACTS[act], torch.get_num_threads(),
    ))
    return g if slope is None else z, gx, gw


def spread(g: Tensor, taps_h: Tensor, taps_w: Tensor) -> Tensor:
    """See eager.spread."""
    (n, o, p1, p2), (kh, _, q1), (kw, _, q2) = g.shape, taps_h.shape, taps_w.shape
    g = _channels_last(g)
    taps_h, taps_w = _floats(taps_h, kh * p1 * q1), _floats(taps_w, kw * p2 * q2)
    seen = torch.empty((n * q1 * q2, o * kh * kw), **FLOATS)
    _check(library().gf_spread(
        g.data_ptr(), taps_h.data_ptr(), taps_w.data_ptr(), seen.data_ptr(), n, o, p1, p2, q1, q2,
        kh, kw, torch.get_num_threads(),
    ))
    return seen


_COMMON = ConvOp((3, 3), (1, 1), (1, 1, 1, 1))
_BROAD = 32  # channels from which on Winograd's way is faster
_PANEL = 32  # outputs that a thread takes at a time


def convolve(x: Tensor, w: Tensor, op: ConvOp) -> Tensor:
    """See eager.convolve; 3x3 layers by Winograd's way where that is faster."""
    (n, k, h, width), c, threads = x.shape, len(w), torch.get_num_threads()
    if op != _COMMON or min(k, c) < _BROAD or -(-c // _PANEL) < threads or min(h, width) < 3:
        return eager.convolve(x, w, op)
    together = w.is_contiguous()
    x, w, y = _channels_last(x), w if together else _channels_last(w), _map(n, c, h, width)
    _check(library().gf_winograd_forward(
        x.data_ptr(), w.data_ptr(), y.data_ptr(), n, h, width, k, c, together, threads
    ))
    return y


def conv3x3_pays(g: Tensor, channels: int) -> bool:
    """Whether `conv3x3_backward` is faster than a product for every tap, in little memory."""
    n, o, h, w = g.shape
    tiles = n * -(-h // 4) * -(-w // 4)
    small = 144 * tiles * (2 * o + channels) < 64 << 20
    return tiles >= 12 and min(o, channels) >= _BROAD and small


def conv3x3_backward(
    g: Tensor, x: Tensor | None, w: Tensor, need_gx: bool = True, need_gw: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """See eager.conv3x3_backward; by Winograd's way."""
    (n, o, h, width), c = g.shape, w.shape[1]
    g, w = _channels_last(g), _channels_last(w)
    x = _channels_last(x) if need_gw else None
    gx = _map(n, c, h, width) if need_gx else None
    gw = _map(o, c, 3, 3) if need_gw else None
    _check(library().gf_winograd(
        g.data_ptr(), _pointer(x), w.data_ptr(), _pointer(gx), _pointer(gw), n, h, width, c, o,
        torch.get_num_threads(),
    ))
    return gx, gw


def row_dots(a: Tensor, b: Tensor, out: Tensor) -> None:
    """See eager.row_dots."""
    if not (a.is_contiguous() and b.is_contiguous()):
        a, b = (t.permute(0, 2, 3, 1).contiguous() for t in (a, b))
    rows = a.shape[0]
    a, b = _floats(a, a.numel()), _floats(b, a.numel())
    _check(library().gf_row_dots(
        a.data_ptr(), b.data_ptr(), _written(out, rows), rows, a.numel() // rows,
        torch.get_num_threads(),
    ))

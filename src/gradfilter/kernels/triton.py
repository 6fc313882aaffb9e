"""The kernels in Triton, for CUDA: float32, bfloat16 or float16 maps, sums in float32.

eager.py says what each computes. Maps are channels-last, so a program takes a block of neighbouring
channels of some pixels. Few launches: one per kernel, and one more where a sum over programs is
left. Convolutions stay with cuDNN.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradfilter.kernels.eager import Act, Pair, Stats, activation, depthwise_conv, pool_reach

# Once or twice a network, and small: not worth a kernel.
from gradfilter.kernels.eager import max_pool_grid_backward as max_pool_grid_backward
from gradfilter.kernels.eager import row_dots as row_dots


@triton.jit
def _sigmoid(z):
    return 1 / (1 + tl.exp(-z))


@triton.jit
def _cut(z):
    return tl.where(z < -3, 0.0, tl.where(z > 3, 1.0, (z + 3) / 6))


@triton.jit
def _activate(z, parameter, ACT: tl.constexpr):
    """f(z) and f'(z). `where` and not `maximum`, so that NaN goes through."""
    one = tl.full(z.shape, 1.0, tl.float32)
    if ACT == "relu":
        return tl.where(z < 0, 0.0, z), tl.where(z > 0, one, 0.0)
    elif ACT == "relu6":
        a = tl.where(z < 0, 0.0, tl.where(z > 6, 6.0, z))
        return a, tl.where((z > 0) & (z < 6), one, 0.0)
    elif ACT == "hardswish":
        slope = tl.where(z <= -3, 0.0, tl.where(z < 3, z / 3 + 0.5, one))
        return z * _cut(z), slope
    elif ACT == "hardsigmoid":
        return _cut(z), tl.where((z > -3) & (z < 3), one / 6, 0.0)
    elif ACT == "silu":
        s = _sigmoid(z)
        return z * s, s * (1 + z * (1 - s))
    elif ACT == "sigmoid":
        s = _sigmoid(z)
        return s, s * (1 - s)
    elif ACT == "gelu":
        half = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        return z * half, half + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    elif ACT == "gelu_tanh":
        t = 2 * _sigmoid(1.5957691216057308 * z * (1 + 0.044715 * z * z)) - 1
        inner = 0.7978845608028654 * (1 + 0.134145 * z * z)
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * inner
    elif ACT == "tanh":
        t = 2 * _sigmoid(2 * z) - 1
        return t, 1 - t * t
    elif ACT == "leaky_relu":
        slope = tl.where(z > 0, one, parameter)
        return z * slope, slope
    elif ACT == "elu":
        e = parameter * tl.exp(tl.where(z > 0, 0.0, z))
        return tl.where(z > 0, z, e - parameter), tl.where(z > 0, one, e)
    elif ACT == "mish":
        e = tl.exp(tl.where(z > 20, 20.0, z))  # tanh(softplus) is 1 in float32 from there on
        n = e * (e + 2)
        t = n / (n + 2)
        return z * t, t + z * _sigmoid(z) * (1 - t * t)
    else:
        return z, one


@triton.jit
def _affine(z, scale, shift, c, valid, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr):
    """z [pixels, channels] * scale + shift."""
    if HAS_SCALE:
        z = z * tl.load(scale + c, valid, 0.0).to(tl.float32)[None, :]
    if HAS_SHIFT:
        z = z + tl.load(shift + c, valid, 0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _epilogue_kernel(
    y, a, scale, shift, residual, mean, slope, H, W, C, P, Q, rh, rw, parameter,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, STORE: tl.constexpr, STATS: tl.constexpr, HAS_SLOPE: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: one patch of one image, one block of channels."""
    patch = tl.program_id(0).to(tl.int64)
    n, p, q = patch // (P * Q), patch // Q % P, patch % Q
    h0, w0 = p * rh, q * rw
    rows, columns = tl.minimum(rh, H - h0), tl.minimum(rw, W - w0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    total = tl.zeros((CHANNELS,), tl.float32)
    slopes = tl.zeros((CHANNELS,), tl.float32)
    count = rows * columns
    for start in range(0, count, PIXELS):
        i = start + tl.arange(0, PIXELS)
        valid = (i < count)[:, None] & inside[None, :]
        pixel = (n * H + h0 + i // columns) * W + w0 + i % columns
        at = pixel[:, None] * C + c[None, :]
        z = tl.load(y + at, valid, 0.0).to(tl.float32)
        z = _affine(z, scale, shift, c, inside, HAS_SCALE, HAS_SHIFT)
        if HAS_RESIDUAL:
            z += tl.load(residual + at, valid, 0.0).to(tl.float32)
        f, df = _activate(z, parameter, ACT)
        if STORE:
            tl.store(a + at, f, valid)
        if STATS:
            total += tl.sum(tl.where(valid, f, 0.0), 0)
            slopes += tl.sum(tl.where(valid, df, 0.0), 0)
    if STATS:
        tl.store(mean + patch * C + c, total / count, inside)
        if HAS_SLOPE:
            tl.store(slope + patch * C + c, slopes / count, inside)


def _blocks(pixels: int, channels: int) -> tuple[int, int]:
    """Tile sizes for that many pixels and channels: powers of 2, at most 2048 elements."""
    tile = min(triton.next_power_of_2(pixels), 64)
    return tile, _channel_block(channels, 2048 // tile)


def _channel_block(channels: int, most: int) -> int:
    return min(max(triton.next_power_of_2(channels), 16), most)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _map(like: Tensor, c: int, h: int, w: int) -> Tensor:
    shape = like.shape[0], c, h, w
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _run_epilogue(y, a, scale, shift, act, side, residual, mean, slope) -> None:
    name, parameter = activation(act)
    n, c, h, w = y.shape
    p, q = -(-h // side[0]), -(-w // side[1])
    pixels, channels = _blocks(side[0] * side[1], c)
    _epilogue_kernel[n * p * q, triton.cdiv(c, channels)](
        y, a, scale, shift, residual, mean, slope, h, w, c, p, q, *side, parameter,
        ACT=name, HAS_SCALE=scale is not None, HAS_SHIFT=shift is not None,
        HAS_RESIDUAL=residual is not None, STORE=a is not None, STATS=mean is not None,
        HAS_SLOPE=slope is not None, PIXELS=pixels, CHANNELS=channels,
    )


def patch_mean(x: Tensor, side: Pair) -> Tensor:
    """See eager.patch_mean."""
    x = _channels_last(x)
    mean = _map(x, x.shape[1], -(-x.shape[2] // side[0]), -(-x.shape[3] // side[1]))
    _run_epilogue(x, None, None, None, "none", side, None, mean, None)
    return mean


def epilogue(
    y: Tensor, scale: Tensor | None, shift: Tensor | None, act: Act, side: Pair,
    residual: Tensor | None = None, stats: bool = True,
) -> Stats:
    """See eager.epilogue; `a` overwrites y when y is channels-last."""
    y = _channels_last(y)
    residual = None if residual is None else _channels_last(residual)
    if not stats:
        _run_epilogue(y, y, scale, shift, act, (1, 64), residual, None, None)
        return y, None, None
    grid = y.shape[1], -(-y.shape[2] // side[0]), -(-y.shape[3] // side[1])
    mean = _map(y, *grid)
    slope = None if activation(act)[0] == "none" else _map(y, *grid)
    _run_epilogue(y, y, scale, shift, act, side, residual, mean, slope)
    return y, mean, slope


def depthwise(
    x: Tensor, w: Tensor, scale: Tensor | None, shift: Tensor | None, act: Act, stride: Pair,
    padding: tuple[int, int, int, int], dilation: Pair, side: Pair, stats: bool = True,
) -> Stats:
    """See eager.depthwise: cuDNN's convolution, then the fused epilogue."""
    y = depthwise_conv(x, w, stride, padding, dilation)
    return epilogue(y, scale, shift, act, side, stats=stats)


@triton.jit
def _grid_backward_kernel(
    g, x, w, taps_h, taps_w, start_h, start_w, gx, gw, N, C, P1, P2, Q1, Q2, kw,
    TAPS: tl.constexpr, TAPS_2: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    HAS_GX: tl.constexpr, HAS_GW: tl.constexpr, IMAGES: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: one row of input patches, some images, one block of channels.

    The kernel that links an input patch with one of its outputs is a mixture of w's taps, made
    once for all the images; gw is summed over the row and left as one part per program.
    """
    q1 = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    n = (tl.program_id(2) * IMAGES + tl.arange(0, IMAGES)).to(tl.int64)
    tap = tl.arange(0, TAPS_2)
    tap_valid = (tap < TAPS)[:, None] & (c < C)[None, :]
    valid = (n < N)[:, None] & (c < C)[None, :]
    weight = tl.load(w + c[None, :] * TAPS + tap[:, None], tap_valid, 0.0).to(tl.float32)
    parts = tl.zeros((TAPS_2, CHANNELS), tl.float32)
    for q2 in range(Q2):
        total = tl.zeros((IMAGES, CHANNELS), tl.float32)
        at_q = ((n * Q1 + q1) * Q2 + q2)[:, None] * C + c[None, :]
        inputs = tl.load(x + at_q, valid, 0.0).to(tl.float32)
        for d in range(D1 * D2):
            p1, p2 = tl.load(start_h + q1) + d // D2, tl.load(start_w + q2) + d % D2
            here = (p1 < P1) & (p2 < P2)
            tap_here = tap < tl.where(here, TAPS, 0)
            count = tl.load(taps_h + (tap // kw * P1 + p1) * Q1 + q1, tap_here, 0.0)
            count *= tl.load(taps_w + (tap % kw * P2 + p2) * Q2 + q2, tap_here, 0.0)
            at_p = ((n * P1 + p1) * P2 + p2)[:, None] * C + c[None, :]
            there = (n < N)[:, None] & (c < tl.where(here, C, 0))[None, :]
            grad = tl.load(g + at_p, there, 0.0).to(tl.float32)
            if HAS_GX:
                total += grad * tl.sum(count[:, None] * weight, 0)[None, :]
            if HAS_GW:
                parts += count[:, None] * tl.sum(grad * inputs, 0)[None, :]
        if HAS_GX:
            tl.store(gx + at_q, total, valid)
    if HAS_GW:
        part = (tl.program_id(2) * Q1 + q1).to(tl.int64)
        tl.store(gw + (part * TAPS + tap[:, None]) * C + c[None, :], parts, tap_valid)


_bands = WeakTensorKeyDictionary()


def _band(taps: Tensor) -> tuple[Tensor, int]:
    """First output that each input patch is read by, and how many at most; taps [k, P, Q].

    Kept as long as the table lives, because finding it waits for the device.
    """
    found = _bands.get(taps)
    if found is None:
        used = (taps != 0).any(0)  # [P, Q]
        outputs = torch.arange(len(used), device=taps.device)[:, None]
        start = torch.where(used, outputs, len(used)).amin(0)
        reach = torch.where(used, outputs + 1 - start, 1).amax().item()
        found = _bands[taps] = start.clamp(max=len(used) - 1).int(), reach
    return found


def depthwise_grid_backward(
    g: Tensor, x: Tensor, w: Tensor, taps_h: Tensor, taps_w: Tensor, need_gx: bool = True,
    need_gw: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """See eager.depthwise_grid_backward. The tables must not change once used here."""
    if not need_gx and not need_gw:
        return None, None
    (n, c, p1, p2), (q1, q2), (kh, kw) = g.shape, x.shape[2:], w.shape[2:]
    (start_h, d1), (start_w, d2) = _band(taps_h), _band(taps_w)
    g, x, w = _channels_last(g), _channels_last(x), w.contiguous()
    images, channels = min(16, triton.next_power_of_2(n)), _channel_block(c, 64)
    groups = triton.cdiv(n, images)
    gx = _map(g, c, q1, q2) if need_gx else None
    parts = g.new_empty((groups * q1, kh * kw, c), dtype=torch.float32) if need_gw else None
    _grid_backward_kernel[q1, triton.cdiv(c, channels), groups](
        g, x, w, taps_h.contiguous(), taps_w.contiguous(), start_h, start_w, gx, parts,
        n, c, p1, p2, q1, q2, kw, TAPS=kh * kw, TAPS_2=triton.next_power_of_2(max(2, kh * kw)),
        D1=d1, D2=d2, HAS_GX=need_gx, HAS_GW=need_gw, IMAGES=images, CHANNELS=channels,
    )
    gw = parts.sum(0).t().reshape(c, 1, kh, kw).to(w.dtype) if need_gw else None
    return gx, gw


@triton.jit
def _slope_kernel(
    g, slope, scale, area, z, scaled, sums, CELLS, ROWS, C,
    HAS_SLOPE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_AREA: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_SUM: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: some pixels of all images, one block of channels; one part of the sum."""
    row = (tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid = (row < ROWS)[:, None] & (c < C)[None, :]
    at = row[:, None] * C + c[None, :]
    value = tl.load(g + at, valid, 0.0).to(tl.float32)
    if HAS_SLOPE:
        value *= tl.load(slope + at, valid, 0.0).to(tl.float32)
    if HAS_Z:
        tl.store(z + at, value, valid)
    if HAS_SCALE:
        tl.store(scaled + at, _affine(value, scale, scale, c, c < C, True, False), valid)
    if HAS_SUM:
        if HAS_AREA:
            value *= tl.load(area + row % CELLS, row < ROWS, 0.0).to(tl.float32)[:, None]
        part = tl.program_id(0).to(tl.int64)
        tl.store(sums + part * C + c, tl.sum(value, 0), c < C)


def slope_backward(
    g: Tensor, slope: Tensor | None, scale: Tensor | None, area: Tensor | float,
    need_sum: bool = True, need_z: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """See eager.slope_backward."""
    n, c, p, q = g.shape
    g, slope = _channels_last(g), None if slope is None else _channels_last(slope)
    whole, area = (1, area.contiguous()) if isinstance(area, Tensor) else (area, None)
    z = _map(g, c, p, q) if slope is not None and (need_z or scale is None) else None
    scaled = None if scale is None else _map(g, c, p, q)
    pixels, channels = _blocks(n * p * q, c)
    parts = triton.cdiv(n * p * q, pixels)
    sums = g.new_empty((parts, c), dtype=torch.float32) if need_sum else None
    _slope_kernel[parts, triton.cdiv(c, channels)](
        g, slope, scale, area, z, scaled, sums, p * q, n * p * q, c,
        HAS_SLOPE=slope is not None, HAS_SCALE=scale is not None, HAS_AREA=area is not None,
        HAS_Z=z is not None, HAS_SUM=need_sum, PIXELS=pixels, CHANNELS=channels,
    )
    z = g if slope is None else z
    total = (sums.sum(0) * whole).to(g.dtype) if need_sum else None
    return z, z if scaled is None else scaled, total


@triton.jit
def _max_pool_kernel(
    y, scale, shift, out, mean, route, first_h, first_w, H, W, C, OH, OW, P, Q,
    kh, kw, sh, sw, ph, pw, dh, dw, rh_in, rw_in, rh, rw, parameter,
    ACT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, STATS: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, CELLS: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: one patch of outputs of one image, one block of channels."""
    patch = tl.program_id(0).to(tl.int64)
    n, p, q = patch // (P * Q), patch // Q % P, patch % Q
    h0, w0 = p * rh, q * rw
    columns = tl.minimum(rw, OW - w0)
    count = tl.minimum(rh, OH - h0) * columns
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    cells = tl.arange(0, CELLS)
    total = tl.zeros((CHANNELS,), tl.float32)
    routes = tl.zeros((CELLS, CHANNELS), tl.float32)
    q1, q2 = tl.load(first_h + p), tl.load(first_w + q)  # the first input patch it touches
    for start in range(0, count, PIXELS):
        i = start + tl.arange(0, PIXELS)
        h, w = h0 + i // columns, w0 + i % columns
        best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
        z_best = tl.zeros((PIXELS, CHANNELS), tl.float32)
        cell = tl.full((PIXELS, CHANNELS), -1, tl.int32)
        for tap in range(kh * kw):
            row, column = h * sh - ph + tap // kw * dh, w * sw - pw + tap % kw * dw
            there = (i < count) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            valid = there[:, None] & inside[None, :]
            at = ((n * H + row) * W + column)[:, None] * C + c[None, :]
            z = tl.load(y + at, valid, 0.0).to(tl.float32)
            z = _affine(z, scale, shift, c, inside, HAS_SCALE, HAS_SHIFT)
            f, _ = _activate(z, parameter, ACT)
            better = valid & ((f > best) | (f != f) | (cell < 0))
            best = tl.where(better, f, best)
            z_best = tl.where(better, z, z_best)
            here = (row // rh_in - q1) * D2 + column // rw_in - q2
            cell = tl.where(better, here[:, None].to(tl.int32), cell)
        valid = (i < count)[:, None] & inside[None, :]
        at = ((n * OH + h) * OW + w)[:, None] * C + c[None, :]
        tl.store(out + at, best, valid)
        if STATS:
            total += tl.sum(tl.where(valid, best, 0.0), 0)
            _, slope = _activate(z_best, parameter, ACT)
            for d in range(D1 * D2):
                part = tl.sum(tl.where(valid & (cell == d), slope, 0.0), 0)
                routes += tl.where((cells == d)[:, None], part[None, :], 0.0)
    if STATS:
        tl.store(mean + patch * C + c, total / count, inside)
        valid = (cells < D1 * D2)[:, None] & inside[None, :]
        tl.store(route + (patch * D1 * D2 + cells)[:, None] * C + c[None, :], routes, valid)


@functools.lru_cache(maxsize=256)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def max_pool(
    y: Tensor, scale: Tensor | None, shift: Tensor | None, act: Act, kernel: Pair, stride: Pair,
    padding: Pair, dilation: Pair, side_in: Pair, side_out: Pair, stats: bool = True,
) -> Stats:
    """See eager.max_pool; route's channels are its last axis in memory."""
    name, parameter = activation(act)
    n, c, h, w = y.shape
    geometry = kernel, stride, padding, dilation
    out_h, out_w = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip((h, w), *geometry, strict=True)
    )
    if not stats:  # any tile will do, and nothing is routed
        side_out = 1, 64
    axes = zip((h, w), *geometry, side_in, side_out, strict=True)
    (first_h, d1), (first_w, d2) = (pool_reach(*axis) for axis in axes)
    y = _channels_last(y)
    out = _map(y, c, out_h, out_w)
    p, q = len(first_h), len(first_w)
    mean = _map(y, c, p, q) if stats else None
    route = y.new_empty((n, p, q, d1, d2, c), dtype=torch.float32) if stats else None
    pixels, channels = _blocks(min(side_out[0] * side_out[1], 16), c)
    _max_pool_kernel[n * p * q, triton.cdiv(c, channels)](
        y, scale, shift, out, mean, route, _on_device(tuple(first_h), y.device),
        _on_device(tuple(first_w), y.device), h, w, c, out_h, out_w, p, q,
        *kernel, *stride, *padding, *dilation, *side_in, *side_out, parameter,
        ACT=name, HAS_SCALE=scale is not None, HAS_SHIFT=shift is not None, STATS=stats,
        D1=d1, D2=d2, CELLS=triton.next_power_of_2(d1 * d2), PIXELS=pixels, CHANNELS=channels,
    )
    return out, mean, None if route is None else route.permute(0, 5, 1, 2, 3, 4)

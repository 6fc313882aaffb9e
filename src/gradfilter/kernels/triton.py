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

from gradfilter.kernels import eager
from gradfilter.kernels.eager import Act, Pair, Stats, activation

# Once or twice a network, and small: not worth a kernel.
max_pool_grid_backward, row_dots = eager.max_pool_grid_backward, eager.row_dots

PARTS = 32  # shares of a sum over all pixels, each one row of a table summed at the end


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
        return z * _cut(z), tl.where(z <= -3, 0.0, tl.where(z < 3, z / 3 + 0.5, one))
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
def _affine(z, scale, shift, c, C):
    """z [pixels, channels] * scale + shift, either of which may be None."""
    if scale is not None:
        z = z * tl.load(scale + c, c < C, 0.0).to(tl.float32)[None, :]
    if shift is not None:
        z = z + tl.load(shift + c, c < C, 0.0).to(tl.float32)[None, :]
    return z


@triton.jit
def _epilogue_kernel(
    y, a, scale, shift, residual, mean, slope, H, W, C, P, Q, rh, rw, parameter,
    ACT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: one patch of one image, one block of channels; absent pointers are None."""
    patch = tl.program_id(0)
    n, h0, w0 = (patch // (P * Q)).to(tl.int64), patch // Q % P * rh, patch % Q * rw
    columns = tl.minimum(rw, W - w0)
    count = tl.minimum(rh, H - h0) * columns
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)  # summed over its pixels at the end
    slopes = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for start in range(0, count, PIXELS):
        i = start + tl.arange(0, PIXELS)
        valid = (i < count)[:, None] & (c < C)[None, :]
        pixel = n * H * W + (h0 + i // columns) * W + w0 + i % columns
        at = pixel[:, None] * C + c[None, :]
        z = _affine(tl.load(y + at, valid, 0.0).to(tl.float32), scale, shift, c, C)
        if residual is not None:
            z += tl.load(residual + at, valid, 0.0).to(tl.float32)
        f, df = _activate(z, parameter, ACT)
        if a is not None:
            tl.store(a + at, f, valid)
        if mean is not None:
            total += tl.where(valid, f, 0.0)
        if slope is not None:
            slopes += tl.where(valid, df, 0.0)
    at = patch.to(tl.int64) * C + c
    if mean is not None:
        tl.store(mean + at, tl.sum(total, 0) / count, c < C)
    if slope is not None:
        tl.store(slope + at, tl.sum(slopes, 0) / count, c < C)


# Triton's own cdiv and next_power_of_2 cost microseconds a call on the host.
def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=1024)
def _blocks(pixels: int, channels: int, most: int = 128) -> tuple[int, int, int]:
    """Tile sizes, powers of 2, for that many pixels and channels; and warps for such a tile.

    Channels lie side by side in memory, so the widest block that wastes little comes first.
    """
    pixels = _power_of_2(pixels)
    block = max(most, 1024 // pixels)
    while block > 16 and _cdiv(channels, block) * block > 1.125 * channels:
        block //= 2
    pixels = min(pixels, 2048 // block)
    return pixels, block, min(max(pixels * block // 512, 1), 4)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _map(like: Tensor, h: int, w: int) -> Tensor:
    form = {"dtype": like.dtype, "device": like.device, "memory_format": torch.channels_last}
    return torch.empty((*like.shape[:2], h, w), **form)


def _grid(like: Tensor, side: Pair) -> Tensor:
    return _map(like, _cdiv(like.shape[2], side[0]), _cdiv(like.shape[3], side[1]))


def _run_epilogue(y, a, scale, shift, act, side, residual, mean, slope) -> None:
    name, parameter = activation(act)
    n, c, h, w = y.shape
    p, q = _cdiv(h, side[0]), _cdiv(w, side[1])
    pixels, channels, warps = _blocks(side[0] * side[1], c)
    _epilogue_kernel[n * p * q, _cdiv(c, channels)](
        y, a, scale, shift, residual, mean, slope, h, w, c, p, q, *side, parameter,
        name, pixels, channels, num_warps=warps,
    )


def patch_mean(x: Tensor, side: Pair) -> Tensor:
    """See eager.patch_mean."""
    x = _channels_last(x)
    mean = _grid(x, side)
    _run_epilogue(x, None, None, None, "none", side, None, mean, None)
    return mean


def epilogue(
    y: Tensor, scale: Tensor | None, shift: Tensor | None, act: Act, side: Pair,
    residual: Tensor | None = None, stats: bool = True,
) -> Stats:
    """See eager.epilogue; `a` overwrites y when y is channels-last."""
    y = _channels_last(y)
    residual = None if residual is None else _channels_last(residual)
    mean = _grid(y, side) if stats else None
    slope = _grid(y, side) if stats and activation(act)[0] != "none" else None
    side = side if stats else (1, 64)  # without means any tile will do
    _run_epilogue(y, y, scale, shift, act, side, residual, mean, slope)
    return y, mean, slope


def depthwise(
    x: Tensor, w: Tensor, scale: Tensor | None, shift: Tensor | None, act: Act, stride: Pair,
    padding: tuple[int, int, int, int], dilation: Pair, side: Pair, stats: bool = True,
) -> Stats:
    """See eager.depthwise: cuDNN's convolution, then the fused epilogue."""
    y = eager.depthwise_conv(x, w, stride, padding, dilation)
    return epilogue(y, scale, shift, act, side, stats=stats)


@triton.jit
def _grid_backward_kernel(
    g, x, w, taps_h, taps_w, start_h, start_w, gx, gw, N, C, P1, P2, Q1, Q2, kw, chunks,
    TAPS: tl.constexpr, TAPS_2: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    IMAGES: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: one input patch, some chunks of images, one block of channels.

    The kernel that links the patch with one of its outputs is a mixture of w's taps, made once
    for a chunk; gw is left as one part per program. gx or gw may be None.
    """
    q1, q2 = tl.program_id(0) // Q2, tl.program_id(0) % Q2
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tap = tl.arange(0, TAPS_2)
    tap_valid = (tap < TAPS)[:, None] & (c < C)[None, :]
    weight = tl.load(w + c[None, :] * TAPS + tap[:, None], tap_valid, 0.0).to(tl.float32)
    parts = tl.zeros((TAPS_2, CHANNELS), tl.float32)
    for chunk in range(chunks):
        n = (tl.program_id(2) * chunks + chunk) * IMAGES + tl.arange(0, IMAGES)
        valid = (n < N)[:, None] & (c < C)[None, :]
        at_q = (n.to(tl.int64) * Q1 * Q2 + tl.program_id(0))[:, None] * C + c[None, :]
        inputs = tl.load(x + at_q, valid, 0.0).to(tl.float32)
        total = tl.zeros((IMAGES, CHANNELS), tl.float32)
        for d in range(D1 * D2):
            p1, p2 = tl.load(start_h + q1) + d // D2, tl.load(start_w + q2) + d % D2
            here = (p1 < P1) & (p2 < P2)
            tap_here = tap < tl.where(here, TAPS, 0)
            count = tl.load(taps_h + (tap // kw * P1 + p1) * Q1 + q1, tap_here, 0.0)
            count *= tl.load(taps_w + (tap % kw * P2 + p2) * Q2 + q2, tap_here, 0.0)
            at_p = (n.to(tl.int64) * P1 * P2 + p1 * P2 + p2)[:, None] * C + c[None, :]
            there = (n < N)[:, None] & (c < tl.where(here, C, 0))[None, :]
            grad = tl.load(g + at_p, there, 0.0).to(tl.float32)
            if gx is not None:
                total += grad * tl.sum(count[:, None] * weight, 0)[None, :]
            if gw is not None:
                parts += count[:, None] * tl.sum(grad * inputs, 0)[None, :]
        if gx is not None:
            tl.store(gx + at_q, total, valid)
    if gw is not None:
        part = (tl.program_id(2) * Q1 * Q2 + tl.program_id(0)).to(tl.int64)
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
    images, (_, channels, _) = min(16, _power_of_2(n)), _blocks(1024, c, 64)
    programs = q1 * q2 * _cdiv(c, channels)
    chunks = _cdiv(_cdiv(n, images), max(1, 8192 // programs))  # enough programs
    groups = _cdiv(_cdiv(n, images), chunks)
    gx = _map(g, q1, q2) if need_gx else None
    parts = g.new_empty((groups * q1 * q2, kh * kw, c), dtype=torch.float32) if need_gw else None
    _grid_backward_kernel[q1 * q2, _cdiv(c, channels), groups](
        g, x, w, taps_h.contiguous(), taps_w.contiguous(), start_h, start_w, gx, parts,
        n, c, p1, p2, q1, q2, kw, chunks, kh * kw, _power_of_2(max(2, kh * kw)), d1, d2,
        images, channels, num_warps=1,  # sums over images and taps then stay within a warp
    )
    gw = parts.sum(0).t().reshape(c, 1, kh, kw).to(w.dtype) if need_gw else None
    return gx, gw


@triton.jit
def _slope_kernel(
    g, slope, scale, area, z, scaled, sums, whole, cells, rows, C, ACT: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: a share of the patches of all images, one block of channels."""
    share, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for start in range(share * PIXELS, rows, tl.num_programs(0) * PIXELS):
        row = start + tl.arange(0, PIXELS)
        valid = (row < rows)[:, None] & (c < C)[None, :]
        at = row.to(tl.int64)[:, None] * C + c[None, :]
        value = tl.load(g + at, valid, 0.0).to(tl.float32)
        if slope is not None:
            factor = tl.load(slope + at, valid, 0.0).to(tl.float32)
            if ACT != "none":
                _, factor = _activate(factor, 0.0, ACT)
            value *= factor
        if z is not None:
            tl.store(z + at, value, valid)
        if scaled is not None:
            tl.store(scaled + at, _affine(value, scale, None, c, C), valid)
        if area is not None:
            value *= tl.load(area + row % cells, row < rows, 0.0).to(tl.float32)[:, None]
        total += value
    if sums is not None:
        tl.store(sums + share.to(tl.int64) * C + c, tl.sum(total, 0) * whole, c < C)


def slope_backward(
    g: Tensor, slope: Tensor | None, scale: Tensor | None, area: Tensor | float,
    sums: Tensor | None = None, need_z: bool = True, act: str = "none",
) -> tuple[Tensor | None, Tensor]:
    """See eager.slope_backward."""
    n, c, p, q = g.shape
    g, slope = _channels_last(g), None if slope is None else _channels_last(slope)
    whole, area = (1.0, area.contiguous()) if isinstance(area, Tensor) else (area, None)
    z = _map(g, p, q) if slope is not None and (need_z or scale is None) else None
    scaled = None if scale is None else _map(g, p, q)
    pixels, channels, warps = _blocks(n * p * q, c)
    shares = min(_cdiv(n * p * q, pixels), PARTS)
    parts = None if sums is None else g.new_empty((shares, c), dtype=torch.float32)
    _slope_kernel[shares, _cdiv(c, channels)](
        g, slope, scale, area, z, scaled, parts, whole, p * q, n * p * q, c, act, pixels,
        channels, num_warps=warps,
    )
    if sums is not None:
        torch.sum(parts, 0, out=sums)  # float32, in a fixed order
    z = g if slope is None else z
    return z, z if scaled is None else scaled


@triton.jit
def _max_pool_kernel(
    y, scale, shift, out, mean, route, first_h, first_w, H, W, C, OH, OW, P, Q,
    kh, kw, sh, sw, ph, pw, dh, dw, rh_in, rw_in, rh, rw, parameter, ACT: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, CELLS: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: one patch of outputs of one image, one block of channels."""
    patch = tl.program_id(0)
    n, p, q = (patch // (P * Q)).to(tl.int64), patch // Q % P, patch % Q
    columns = tl.minimum(rw, OW - q * rw)
    count = tl.minimum(rh, OH - p * rh) * columns
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    cells = tl.arange(0, CELLS)
    total = tl.zeros((CHANNELS,), tl.float32)
    routes = tl.zeros((CELLS, CHANNELS), tl.float32)
    q1, q2 = tl.load(first_h + p), tl.load(first_w + q)  # the first input patch it touches
    for start in range(0, count, PIXELS):
        i = start + tl.arange(0, PIXELS)
        h, w = p * rh + i // columns, q * rw + i % columns
        best = tl.full((PIXELS, CHANNELS), float("-inf"), tl.float32)
        z_best = tl.zeros((PIXELS, CHANNELS), tl.float32)
        cell = tl.full((PIXELS, CHANNELS), -1, tl.int32)
        for tap in range(kh * kw):
            row, column = h * sh - ph + tap // kw * dh, w * sw - pw + tap % kw * dw
            there = (i < count) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            valid = there[:, None] & (c < C)[None, :]
            at = (n * H * W + row * W + column)[:, None] * C + c[None, :]
            z = _affine(tl.load(y + at, valid, 0.0).to(tl.float32), scale, shift, c, C)
            f, _ = _activate(z, parameter, ACT)
            better = valid & ((f > best) | (f != f) | (cell < 0))
            best = tl.where(better, f, best)
            z_best = tl.where(better, z, z_best)
            here = (row // rh_in - q1) * D2 + column // rw_in - q2
            cell = tl.where(better, here[:, None], cell)
        valid = (i < count)[:, None] & (c < C)[None, :]
        at = (n * OH * OW + h * OW + w)[:, None] * C + c[None, :]
        tl.store(out + at, best, valid)
        if mean is not None:
            total += tl.sum(tl.where(valid, best, 0.0), 0)
            _, slope = _activate(z_best, parameter, ACT)
            for d in range(D1 * D2):
                part = tl.sum(tl.where(valid & (cell == d), slope, 0.0), 0)
                routes += tl.where((cells == d)[:, None], part[None, :], 0.0)
    if mean is not None:
        at = patch.to(tl.int64)
        tl.store(mean + at * C + c, total / count, c < C)
        valid = (cells < D1 * D2)[:, None] & (c < C)[None, :]
        tl.store(route + (at * D1 * D2 + cells)[:, None] * C + c[None, :], routes, valid)


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
    out_h, out_w = (eager.pool_size(*axis) for axis in zip((h, w), *geometry, strict=True))
    if not stats:  # any tile will do, and nothing is routed
        side_out = 1, 64
    axes = zip((h, w), *geometry, side_in, side_out, strict=True)
    (first_h, d1), (first_w, d2) = (eager.pool_reach(*axis) for axis in axes)
    y = _channels_last(y)
    out = _map(y, out_h, out_w)
    p, q = len(first_h), len(first_w)
    mean = _map(y, p, q) if stats else None
    route = y.new_empty((n, p, q, d1, d2, c), dtype=torch.float32) if stats else None
    pixels, channels, warps = _blocks(min(side_out[0] * side_out[1], 16), c)
    _max_pool_kernel[n * p * q, _cdiv(c, channels)](
        y, scale, shift, out, mean, route, _on_device(tuple(first_h), y.device),
        _on_device(tuple(first_w), y.device), h, w, c, out_h, out_w, p, q,
        *kernel, *stride, *padding, *dilation, *side_in, *side_out, parameter, name,
        d1, d2, _power_of_2(d1 * d2), pixels, channels, num_warps=warps,
    )
    return out, mean, None if route is None else route.permute(0, 5, 1, 2, 3, 4)

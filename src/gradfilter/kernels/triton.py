"""The kernels in Triton, for CUDA: float32, bfloat16 or float16 maps, sums in float32.

eager.py says what each computes. Maps are channels-last, so a program takes a block of neighbouring
channels of some pixels. Few launches: one per kernel, and one more where a sum over programs is
left. Convolutions stay with cuDNN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradfilter.kernels import eager
from gradfilter.kernels.eager import Act, Pair, Stats, activation
from gradfilter.kernels.triton_parts import (
    activate,
    affine,
    blocks,
    cdiv,
    channels_last,
    new_grid,
    new_map,
    power_of_2,
)
from gradfilter.kernels.triton_pool import max_pool, max_pool_grid_backward

__all__ = [
    "depthwise",
    "depthwise_grid_backward",
    "epilogue",
    "max_pool",
    "max_pool_grid_backward",
    "patch_mean",
    "row_dots",
    "slope_backward",
    "spread",
]

PARTS = 32  # shares of a sum over all pixels, each one row of a table summed at the end


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
        z = affine(tl.load(y + at, valid, 0.0).to(tl.float32), scale, shift, c, C)
        if residual is not None:
            z += tl.load(residual + at, valid, 0.0).to(tl.float32)
        f, df = activate(z, parameter, ACT)
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


def _run_epilogue(y, a, scale, shift, act, side, residual, mean, slope) -> None:
    name, parameter = activation(act)
    n, c, h, w = y.shape
    p, q = cdiv(h, side[0]), cdiv(w, side[1])
    pixels, channels, warps = blocks(side[0] * side[1], c)
    _epilogue_kernel[n * p * q, cdiv(c, channels)](
        y, a, scale, shift, residual, mean, slope, h, w, c, p, q, *side, parameter,
        name, pixels, channels, num_warps=warps,
    )


def patch_mean(x: Tensor, side: Pair) -> Tensor:
    """See eager.patch_mean."""
    x = channels_last(x)
    mean = new_grid(x, side)
    _run_epilogue(x, None, None, None, "none", side, None, mean, None)
    return mean


def epilogue(
    y: Tensor, scale: Tensor | None, shift: Tensor | None, act: Act, side: Pair,
    residual: Tensor | None = None, stats: bool = True,
) -> Stats:
    """See eager.epilogue; `a` overwrites y when y is channels-last."""
    y = channels_last(y)
    residual = None if residual is None else channels_last(residual)
    mean = new_grid(y, side) if stats else None
    slope = new_grid(y, side) if stats and activation(act)[0] != "none" else None
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
    g, x, w = channels_last(g), channels_last(x), w.contiguous()
    images, (_, channels, _) = min(16, power_of_2(n)), blocks(1024, c, 64)
    programs = q1 * q2 * cdiv(c, channels)
    chunks = cdiv(cdiv(n, images), max(1, 8192 // programs))  # enough programs
    groups = cdiv(cdiv(n, images), chunks)
    gx = new_map(g, q1, q2) if need_gx else None
    parts = g.new_empty((groups * q1 * q2, kh * kw, c), dtype=torch.float32) if need_gw else None
    _grid_backward_kernel[q1 * q2, cdiv(c, channels), groups](
        g, x, w, taps_h.contiguous(), taps_w.contiguous(), start_h, start_w, gx, parts,
        n, c, p1, p2, q1, q2, kw, chunks, kh * kw, power_of_2(max(2, kh * kw)), d1, d2,
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
                _, factor = activate(factor, 0.0, ACT)
            value *= factor
        if z is not None:
            tl.store(z + at, value, valid)
        if scaled is not None:
            tl.store(scaled + at, affine(value, scale, None, c, C), valid)
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
    g, slope = channels_last(g), None if slope is None else channels_last(slope)
    whole, area = (1.0, area.contiguous()) if isinstance(area, Tensor) else (area, None)
    z = new_map(g, p, q) if slope is not None and (need_z or scale is None) else None
    scaled = None if scale is None else new_map(g, p, q)
    pixels, channels, warps = blocks(n * p * q, c)
    shares = min(cdiv(n * p * q, pixels), PARTS)
    parts = None if sums is None else g.new_empty((shares, c), dtype=torch.float32)
    _slope_kernel[shares, cdiv(c, channels)](
        g, slope, scale, area, z, scaled, parts, whole, p * q, n * p * q, c, act, pixels,
        channels, num_warps=warps,
    )
    if sums is not None:
        torch.sum(parts, 0, out=sums)  # float32, in a fixed order
    z = g if slope is None else z
    return z, z if scaled is None else scaled


@triton.jit
def _spread_kernel(
    g, taps_h, taps_w, start_h, start_w, out, C, P1, P2, Q1, Q2, kw,
    TAPS: tl.constexpr, TAPS_2: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program: one input patch of one image, one block of channels, all taps."""
    row = tl.program_id(0).to(tl.int64)
    n, q1, q2 = row // (Q1 * Q2), row // Q2 % Q1, row % Q2
    c, tap = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, TAPS_2)
    seen = tl.zeros((CHANNELS, TAPS_2), tl.float32)
    for d in range(D1 * D2):
        p1, p2 = tl.load(start_h + q1) + d // D2, tl.load(start_w + q2) + d % D2
        here = (p1 < P1) & (p2 < P2)
        tap_here = tap < tl.where(here, TAPS, 0)
        count = tl.load(taps_h + (tap // kw * P1 + p1) * Q1 + q1, tap_here, 0.0).to(tl.float32)
        count *= tl.load(taps_w + (tap % kw * P2 + p2) * Q2 + q2, tap_here, 0.0).to(tl.float32)
        at = (n * P1 * P2 + p1 * P2 + p2) * C + c
        grad = tl.load(g + at, c < tl.where(here, C, 0), 0.0).to(tl.float32)
        seen += grad[:, None] * count[None, :]
    valid = (c < C)[:, None] & (tap < TAPS)[None, :]
    tl.store(out + (row * C + c[:, None]) * TAPS + tap[None, :], seen, valid)


def spread(g: Tensor, taps_h: Tensor, taps_w: Tensor) -> Tensor:
    """See eager.spread. The tables must not change once used here."""
    (n, c, p1, p2), (kh, _, q1), (kw, _, q2) = g.shape, taps_h.shape, taps_w.shape
    (start_h, d1), (start_w, d2) = _band(taps_h), _band(taps_w)
    out = g.new_empty((n * q1 * q2, c * kh * kw))
    taps = power_of_2(kh * kw)
    channels = min(power_of_2(c), max(1, 2048 // taps))
    _spread_kernel[n * q1 * q2, cdiv(c, channels)](
        channels_last(g), taps_h.contiguous(), taps_w.contiguous(), start_h, start_w, out,
        c, p1, p2, q1, q2, kw, kh * kw, taps, d1, d2, channels, num_warps=4,
    )
    return out


@triton.jit
def _row_dots_kernel(a, b, out, LENGTH, BLOCK: tl.constexpr):
    """One program: one row of both."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, LENGTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(a + row * LENGTH + i, i < LENGTH, 0.0).to(tl.float32)
        total += x * tl.load(b + row * LENGTH + i, i < LENGTH, 0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


def row_dots(a: Tensor, b: Tensor, out: Tensor) -> None:
    """See eager.row_dots."""
    if not (a.is_contiguous() and b.is_contiguous()):
        a, b = (t.permute(0, 2, 3, 1).contiguous() for t in (a, b))
    length = a[0].numel()
    _row_dots_kernel[len(a),](a, b, out, length, min(power_of_2(length), 1024), num_warps=4)

"""Max-pool in Triton: the pool with what goes before it, and its gradient on the patch grid."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradfilter.kernels import eager
from gradfilter.kernels.eager import Act, Pair, Stats, activation
from gradfilter.kernels.triton_parts import (
    activate,
    affine,
    blocks,
    cdiv,
    channels_last,
    new_map,
    on_device,
    power_of_2,
)


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
            z = affine(tl.load(y + at, valid, 0.0).to(tl.float32), scale, shift, c, C)
            f, _ = activate(z, parameter, ACT)
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
            _, slope = activate(z_best, parameter, ACT)
            for d in range(D1 * D2):
                part = tl.sum(tl.where(valid & (cell == d), slope, 0.0), 0)
                routes += tl.where((cells == d)[:, None], part[None, :], 0.0)
    if mean is not None:
        at = patch.to(tl.int64)
        tl.store(mean + at * C + c, total / count, c < C)
        valid = (cells < D1 * D2)[:, None] & (c < C)[None, :]
        tl.store(route + (at * D1 * D2 + cells)[:, None] * C + c[None, :], routes, valid)


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
    y = channels_last(y)
    out = new_map(y, out_h, out_w)
    p, q = len(first_h), len(first_w)
    mean = new_map(y, p, q) if stats else None
    route = y.new_empty((n, p, q, d1, d2, c), dtype=torch.float32) if stats else None
    pixels, channels, warps = blocks(min(side_out[0] * side_out[1], 16), c)
    _max_pool_kernel[n * p * q, cdiv(c, channels)](
        y, scale, shift, out, mean, route, on_device(tuple(first_h), y.device),
        on_device(tuple(first_w), y.device), h, w, c, out_h, out_w, p, q,
        *kernel, *stride, *padding, *dilation, *side_in, *side_out, parameter, name,
        d1, d2, power_of_2(d1 * d2), pixels, channels, num_warps=warps,
    )
    return out, mean, None if route is None else route.permute(0, 5, 1, 2, 3, 4)


@triton.jit
def _max_pool_grid_backward_kernel(
    g, route, first_h, first_w, low_h, low_w, gx, C, P1, P2, Q1, Q2,
    D1: tl.constexpr, D2: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, CHANNELS: tl.constexpr,
):
    """One program: one input patch of one image, one block of channels.

    Sums over the outputs that may reach the patch, from `low` on; route is [N, P1, P2, D1, D2, C].
    """
    cell = tl.program_id(0).to(tl.int64)
    n, q1, q2 = cell // (Q1 * Q2), cell // Q2 % Q1, cell % Q2
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS,), tl.float32)
    for r in range(R1 * R2):
        p1, p2 = tl.load(low_h + q1) + r // R2, tl.load(low_w + q2) + r % R2
        inside = (p1 < P1) & (p2 < P2)
        d1 = q1 - tl.load(first_h + p1, inside, 0)
        d2 = q2 - tl.load(first_w + p2, inside, 0)
        here = inside & (d1 >= 0) & (d1 < D1) & (d2 >= 0) & (d2 < D2)
        valid = c < tl.where(here, C, 0)
        p = (n * P1 + p1) * P2 + p2
        grad = tl.load(g + p * C + c, valid, 0.0).to(tl.float32)
        total += grad * tl.load(route + ((p * D1 + d1) * D2 + d2) * C + c, valid, 0.0)
    tl.store(gx + cell * C + c, total, c < C)


@functools.lru_cache(maxsize=256)
def _readers(first: tuple[int, ...], reach: int, patches: int) -> tuple[tuple[int, ...], int]:
    """First output patch that may reach each input patch on one axis, and how many at most."""
    low, most = [], 1
    for q in range(patches):
        found = [p for p, start in enumerate(first) if start <= q < start + reach]
        low.append(found[0] if found else 0)
        most = max(most, found[-1] - found[0] + 1 if found else 1)
    return tuple(low), most


def max_pool_grid_backward(
    g: Tensor, route: Tensor, first_h: list[int], first_w: list[int], q_shape: Pair
) -> Tensor:
    """See eager.max_pool_grid_backward."""
    n, c, p1, p2, d1, d2 = route.shape
    low_h, r1 = _readers(tuple(first_h), d1, q_shape[0])
    low_w, r2 = _readers(tuple(first_w), d2, q_shape[1])
    tables = [on_device(tuple(t), g.device) for t in (first_h, first_w, low_h, low_w)]
    gx = new_map(g, *q_shape)
    channels = min(power_of_2(c), 256)
    _max_pool_grid_backward_kernel[n * q_shape[0] * q_shape[1], cdiv(c, channels)](
        channels_last(g), route.permute(0, 2, 3, 4, 5, 1).contiguous(), *tables, gx,
        c, p1, p2, *q_shape, d1, d2, r1, r2, channels, num_warps=2,
    )
    return gx

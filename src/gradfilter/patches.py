"""The patch grid: means, sums and nearest upsampling over square patches of a map.

All maps are [N, C, H, W]. A grid along one axis is (count, side, start): patch i covers the
pixels [i*side - start, (i+1)*side - start) that really exist. Origin-aligned grids have start 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def divide_up(size: int, side: int) -> int:
    return -(-size // side)


def overlap(device, size: int, count: int, side: int, start: int = 0) -> Tensor:
    """How many real pixels each patch of an axis has. [count]

    Counted on the device: a copy from the host could not be part of a CUDA graph.
    """
    edges = (torch.arange(count + 1, device=device) * side - start).clamp(0, size)
    return edges[1:] - edges[:-1]


def pixel_sum(g: Tensor, area: Tensor | float) -> Tensor:
    """Sum over all pixels of a map that is constant on each patch. [N, C, P, Q] -> [C]

    `area` are the pixels of each patch [P, Q], or one number for all.
    """
    if isinstance(area, float):
        return g.sum((0, 2, 3)) * area
    return (g * area).sum((0, 2, 3))


def patch_sum(x: Tensor, count: tuple, side: tuple, start: tuple = (0, 0)) -> Tensor:
    """Sum of x over each patch; patches may reach past the map. [N, C, *count]"""
    h, w = x.shape[-2:]
    (n1, n2), (r1, r2), (s1, s2) = count, side, start
    pad = (s2, n2 * r2 - w - s2, s1, n1 * r1 - h - s1)
    if any(pad):
        x = F.pad(x, pad)  # a negative pad crops
    if side == (1, 1):
        return x
    return F.avg_pool2d(x, side, divisor_override=1)


def patch_mean(x: Tensor, count: tuple, side: tuple, start: tuple = (0, 0)) -> Tensor:
    """Mean of x over the pixels each patch really has. [N, C, *count]"""
    return patch_sum(x, count, side, start) / patch_area(x, x.shape[-2:], count, side, start)


def patch_area(like: Tensor, size: tuple, count: tuple, side: tuple, start=(0, 0)) -> Tensor:
    """Number of real pixels of each patch, at least 1. [*count]"""
    rows, columns = (
        overlap(like.device, *axis).to(like.dtype)
        for axis in zip(size, count, side, start, strict=True)
    )
    return (rows[:, None] * columns).clamp(min=1)


def upsample(p: Tensor, size: tuple, side: tuple, start: tuple = (0, 0)) -> Tensor:
    """Give every pixel of a map of `size` the value of its patch; 0 beyond the last patch."""
    if side != (1, 1):
        p = p.repeat_interleave(side[0], -2).repeat_interleave(side[1], -1)
    (h, w), (s1, s2) = size, start
    pad = (-s2, w + s2 - p.shape[-1], -s1, h + s1 - p.shape[-2])
    return F.pad(p, pad) if any(pad) else p


def tap_counts(like: Tensor, y: tuple, x: tuple, taps: int, stride: int, dilation: int, pad: int):
    """N[a, p, q]: how many pixels i of y-patch p read, through tap a, a pixel of x-patch q.

    `y` and `x` are (size, side) of one axis. Built from comparisons alone, so that it traces.
    """
    (y_size, y_side), (x_size, x_side) = y, x
    device = like.device
    i = torch.arange(y_size, device=device)
    a = torch.arange(taps, device=device)
    j = stride * i + dilation * a[:, None] - pad  # [taps, y_size], the pixel of x that is read
    p = torch.arange(divide_up(y_size, y_side), device=device)
    q = torch.arange(divide_up(x_size, x_side), device=device)
    in_p = (i // y_side)[:, None] == p  # [y_size, P]
    real = (j >= 0) & (j < x_size)
    in_q = (j.div(x_side, rounding_mode="floor")[..., None] == q) & real[..., None]
    return in_p.T.to(like.dtype) @ in_q.to(like.dtype)  # [taps, P, Q]

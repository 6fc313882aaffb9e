"""Truncated Tucker factorisations of a tensor: a small core and one factor per mode.

Factors come from the Gram matrix of each unfolding: its eigenvectors are the unfolding's left
singular vectors, and it is only as large as the mode.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradfilter.layers import ConvOp, Op


def gram(x: Tensor, mode: int) -> Tensor:
    """Unfolding times its transpose. [dim, dim]"""
    rest = [i for i in range(x.ndim) if i != mode]
    return torch.tensordot(x, x, dims=(rest, rest))


def leading(gram_matrix: Tensor, energy: float) -> Tensor:
    """The fewest leading eigenvectors whose eigenvalues hold a share `energy` of the trace."""
    values, vectors = torch.linalg.eigh(gram_matrix)
    if energy == 1:
        return vectors.flip(-1)
    share = values.clamp(min=0).flip(-1).cumsum(-1)
    rank = int((share < energy * share[-1]).sum()) + 1
    return vectors[:, -rank:].flip(-1)


def rotate(x: Tensor, factor: Tensor, mode: int) -> Tensor:
    """Multiply mode `mode` of x by factor^T: [.., dim, ..] -> [.., rank, ..]"""
    return torch.tensordot(x, factor, dims=([mode], [0])).movedim(-1, mode)


def core(x: Tensor, factors: list[Tensor]) -> Tensor:
    """x in the coordinates of its factors."""
    for mode, factor in enumerate(factors):
        x = rotate(x, factor, mode)
    return x


def working(x: Tensor) -> Tensor:
    """x in a type that decompositions take."""
    return x if x.dtype == torch.float64 else x.float()


def channel_mode(op: Op, ndim: int) -> int:
    return 1 if isinstance(op, ConvOp) else ndim - 1


def grad_weight(op: Op, g: Tensor, small: Tensor, factors: list[Tensor]) -> Tensor:
    """Weight gradient of the layer whose input is core x factors, without rebuilding the input.

    The batch factor goes over to g and the channel factor to the result, so the convolution runs
    with (rank of batch) images of (rank of channels) channels. Grouped layers need their channels.
    """
    dtype = g.dtype
    channel = channel_mode(op, small.ndim)
    grouped = isinstance(op, ConvOp) and op.groups > 1
    x, g = small, g.to(small.dtype)
    for mode, factor in enumerate(factors):
        if mode == 0:
            g = rotate(g, factor, 0)
        elif mode != channel or grouped:
            x = rotate(x, factor.T, mode)
    gw = op.grad_weight(g, x)
    if not grouped:
        gw = rotate(gw, factors[channel].T, 1)
    return gw.to(dtype)


def grad_weight_macs(op: Op, x_shape: tuple, w_shape: tuple, ranks: tuple) -> int:
    """Multiply-adds of `grad_weight` for a core of shape `ranks`."""
    channel = channel_mode(op, len(ranks))
    grouped = isinstance(op, ConvOp) and op.groups > 1
    shape = list(ranks)
    total = ranks[0] * math.prod(op.output_shape(x_shape, w_shape[0]))
    for mode in range(1, len(ranks)):
        if mode != channel or grouped:
            total += math.prod(shape) * x_shape[mode]
            shape[mode] = x_shape[mode]
    inner = list(w_shape)
    if not grouped:
        inner[1] = ranks[channel]
        total += math.prod(inner) * w_shape[1]
    return total + op.macs(tuple(shape), tuple(inner))


def gram_macs(shape: tuple) -> int:
    """Multiply-adds of the Gram matrices of every mode."""
    return math.prod(shape) * sum(shape)


def core_macs(shape: tuple, ranks: tuple) -> int:
    """Multiply-adds of `core`."""
    shape, total = list(shape), 0
    for mode, rank in enumerate(ranks):
        total += math.prod(shape) * rank
        shape[mode] = rank
    return total

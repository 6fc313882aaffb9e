"""Truncated Tucker factorisations of a tensor: a small core and one factor per mode.

Factors come from the Gram matrix of each unfolding: its eigenvectors are the unfolding's left
singular vectors, and it is only as large as the mode.
"""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.layers import ConvOp, LinearOp, Op


def unfold(x: Tensor, mode: int) -> Tensor:
    """x as a matrix whose rows are the slices of one mode. [dim, everything else]"""
    return x.movedim(mode, 0).flatten(1)


def factor(x: Tensor, mode: int, energy: float) -> Tensor:
    """The leading left singular vectors of an unfolding, from the smaller of its Gram matrices."""
    rows = unfold(x, mode)
    if energy == 1 or len(rows) <= rows.shape[1]:
        return leading(rows @ rows.T, energy)
    return F.normalize(rows @ leading(rows.T @ rows, energy), dim=0)


def leading(gram: Tensor, energy: float) -> Tensor:
    """The fewest leading eigenvectors whose eigenvalues hold a share `energy` of the trace."""
    if gram.is_meta:
        raise RuntimeError("a rank by energy depends on the data: the meta device has none")
    values, vectors = _eigh(gram)
    if energy == 1:
        return vectors.flip(-1)
    share = values.clamp(min=0).flip(-1).cumsum(-1)
    rank = int((share < energy * share[-1]).sum()) + 1
    return vectors[:, -rank:].flip(-1)


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors; in float64 where LAPACK gives up on many equal small ones."""
    with contextlib.suppress(torch.linalg.LinAlgError):
        values, vectors = torch.linalg.eigh(gram)
        if vectors.isfinite().all():
            return values, vectors
    values, vectors = torch.linalg.eigh(gram.double())
    return values.to(gram.dtype), vectors.to(gram.dtype)


def rotate(x: Tensor, factor: Tensor, mode: int) -> Tensor:
    """Multiply mode `mode` of x by factor^T: [.., dim, ..] -> [.., rank, ..]"""
    (size, rank), before, after = factor.shape, x.shape[:mode], x.shape[mode + 1 :]
    if math.prod(after) < 16:  # many tiny products would cost more than a copy
        y = x.movedim(mode, -1).reshape(-1, size) @ factor
        return y.reshape(*before, *after, rank).movedim(-1, mode)
    y = factor.T @ x.reshape(math.prod(before), size, math.prod(after))
    return y.reshape(*before, rank, *after)


def decompose(x: Tensor, energy: float, modes: int) -> tuple[Tensor, ...]:
    """The core of x and the factors of its first `modes` modes.

    Compiled, they come packed as (values, ranks): their shapes depend on the data, and so there
    is one unknown size for a tracer to carry instead of several.
    """
    x = x if x.dtype == torch.float64 else x.float()
    return _packed(x, energy, modes) if torch.compiler.is_compiling() else _parts(x, energy, modes)


def _parts(x: Tensor, energy: float, modes: int) -> tuple[Tensor, ...]:
    factors = [factor(x, mode, energy).contiguous() for mode in range(modes)]
    return core(x, factors), *factors


def core(x: Tensor, factors: list[Tensor]) -> Tensor:
    """x in the coordinates of its factors."""
    for mode, factor in enumerate(factors):
        x = rotate(x, factor, mode)
    return x.contiguous()


def channel_mode(op: Op, ndim: int) -> int:
    return 1 if isinstance(op, ConvOp) else ndim - 1


def grad_weight(op: Op, g: Tensor, kept: tuple[Tensor, ...], x_shape: tuple) -> Tensor:
    """Weight gradient of the layer whose input is core x factors, without rebuilding the input.

    The batch factor goes over to g and the channel factor to the result, so the convolution runs
    with (rank of batch) images of (rank of channels) channels. Grouped layers need their channels.
    """
    if kept[0].ndim == 1:
        return _packed_grad_weight(g, *kept, list(x_shape), _to_ints(op))
    x, *factors = kept
    channel = channel_mode(op, x.ndim)
    outside = channel < len(factors) and not _grouped(op)
    dtype, g = g.dtype, rotate(g.to(x.dtype), factors[0], 0)
    for mode, factor in enumerate(factors):
        if mode > 0 and not (mode == channel and outside):
            x = rotate(x, factor.T, mode)
    gw = op.grad_weight(g, x)
    return (rotate(gw, factors[channel].T, 1) if outside else gw).to(dtype)


def _grouped(op: Op) -> bool:
    return isinstance(op, ConvOp) and op.groups > 1


@torch.library.custom_op("gradfilter::tucker", mutates_args=())
def _packed(x: Tensor, energy: float, modes: int) -> tuple[Tensor, Tensor]:
    parts = _parts(x, energy, modes)
    ranks = torch.tensor([f.shape[1] for f in parts[1:]], device=x.device)
    return torch.cat([p.flatten() for p in parts]), ranks


@_packed.register_fake
def _(x, energy, modes):
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size), x.new_empty(modes, dtype=torch.int64)


@torch.library.custom_op("gradfilter::tucker_grad_weight", mutates_args=())
def _packed_grad_weight(
    g: Tensor, values: Tensor, ranks: Tensor, x_shape: list[int], op: list[int]
) -> Tensor:
    sizes = [(x_shape[mode], rank) for mode, rank in enumerate(ranks.tolist())]
    small = [rank for _, rank in sizes] + x_shape[len(sizes) :]
    parts = values.split([math.prod(s) for s in (small, *sizes)])
    kept = tuple(p.reshape(s) for p, s in zip(parts, (small, *sizes), strict=True))
    return grad_weight(_from_ints(op), g, kept, tuple(x_shape)).contiguous()


@_packed_grad_weight.register_fake
def _(g, values, ranks, x_shape, op):
    layer = _from_ints(op)
    if isinstance(layer, ConvOp):
        return g.new_empty(g.shape[1], x_shape[1] // layer.groups, *layer.kernel)
    return g.new_empty(g.shape[-1], x_shape[-1])


def _to_ints(op: Op) -> list[int]:
    """An op as a custom operator can take it; empty for Linear."""
    if not isinstance(op, ConvOp):
        return []
    return [*op.kernel, *op.stride, *op.padding, *op.dilation, op.groups]


def _from_ints(v: list[int]) -> Op:
    if not v:
        return LinearOp()
    return ConvOp(tuple(v[:2]), tuple(v[2:4]), tuple(v[4:8]), tuple(v[8:10]), v[10])


def grad_weight_macs(op: Op, x_shape: tuple, w_shape: tuple, kept: tuple[Tensor, ...]) -> int:
    """Multiply-adds of `grad_weight`."""
    small, *factors = kept
    channel = channel_mode(op, small.ndim)
    outside = channel < len(factors) and not _grouped(op)
    shape, inner = list(small.shape), list(w_shape)
    total = shape[0] * math.prod(op.output_shape(x_shape, w_shape[0]))
    for mode in range(1, len(factors)):
        if not (mode == channel and outside):
            total += math.prod(shape) * x_shape[mode]
            shape[mode] = x_shape[mode]
    if outside:
        inner[1] = shape[channel]
        total += math.prod(inner) * w_shape[1]
    return total + op.macs(tuple(shape), tuple(inner))


def decompose_macs(x_shape: tuple, kept: tuple[Tensor, ...]) -> int:
    """Multiply-adds of the Gram matrices and of the core."""
    size, modes = math.prod(x_shape), len(kept) - 1
    return size * sum(x_shape[:modes]) + core_macs(x_shape, kept)


def core_macs(x_shape: tuple, kept: tuple[Tensor, ...]) -> int:
    """Multiply-adds of `core`."""
    shape, total = list(x_shape), 0
    for mode, factor in enumerate(kept[1:]):
        total += math.prod(shape) * factor.shape[1]
        shape[mode] = factor.shape[1]
    return total

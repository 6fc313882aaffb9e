"""Truncated SVD of the batch, the matrix baseline of the HOSVD paper."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gradfilter import tucker
from gradfilter.layers import Op
from gradfilter.methods.method import Kept, Method, Shape, fraction


@dataclass(frozen=True)
class Svd(Method):
    """The leading singular vectors of x as a matrix [batch, everything else].

    Keeps U [N, r] and the r combined samples U^T x. gx is exact; gW is the exact weight gradient
    of r samples instead of N. Exact with energy 1.
    """

    energy: float = 0.8

    def __post_init__(self):
        fraction(self, energy=self.energy)

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        x = tucker.working(x)
        u = tucker.leading(tucker.gram(x, 0), self.energy)  # [N, r]
        return u.contiguous(), tucker.rotate(x, u, 0).contiguous()

    def grad_weight(self, op: Op, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        u, samples = kept
        return op.grad_weight(tucker.rotate(g.to(u.dtype), u, 0), samples).to(g.dtype)

    def keep_macs(self, op: Op, x_shape: Shape, kept: Kept) -> int:
        return math.prod(x_shape) * (x_shape[0] + kept[0].shape[1])

    def macs(self, op: Op, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        rank = kept[0].shape[1]
        mix = rank * math.prod(op.output_shape(x_shape, w_shape[0]))
        return op.macs(x_shape, w_shape), mix + op.macs((rank, *x_shape[1:]), w_shape)

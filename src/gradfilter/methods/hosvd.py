"""HOSVD activation compression (Nguyen et al.; NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradfilter import tucker
from gradfilter.layers import Op
from gradfilter.methods.method import Kept, Method, Shape, fraction


@dataclass(frozen=True)
class Hosvd(Method):
    """A truncated Tucker factorisation of x; each mode keeps a share `energy` of its energy.

    Keeps the core and one factor per mode (batch, channels, height, width). gx is exact, gW is
    contracted in factor space. Exact with energy 1.
    """

    energy: float = 0.8

    def __post_init__(self):
        fraction(self, energy=self.energy)

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        x = tucker.working(x)
        factors = [tucker.leading(tucker.gram(x, m), self.energy) for m in range(x.ndim)]
        return (tucker.core(x, factors).contiguous(), *(f.contiguous() for f in factors))

    def grad_weight(self, op: Op, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        return tucker.grad_weight(op, g, kept[0], list(kept[1:]))

    def keep_macs(self, op: Op, x_shape: Shape, kept: Kept) -> int:
        return tucker.gram_macs(x_shape) + tucker.core_macs(x_shape, kept[0].shape)

    def macs(self, op: Op, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        dense = op.macs(x_shape, w_shape)
        return dense, tucker.grad_weight_macs(op, x_shape, w_shape, tuple(kept[0].shape))

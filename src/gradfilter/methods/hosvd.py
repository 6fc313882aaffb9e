"""HOSVD activation compression (Nguyen et al.; NeurIPS 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradfilter import tucker
from gradfilter.layers import Op
from gradfilter.methods.method import Kept, Method, Shape, fraction


@dataclass(frozen=True, repr=False)
class Hosvd(Method):
    """A truncated Tucker factorisation of x; each mode keeps a share `energy` of its energy.

    Keeps the core and one factor per mode (batch, channels, height, width). gx is exact, gW is
    contracted in factor space. Exact with energy 1.
    """

    energy: float = 0.8

    def __post_init__(self):
        fraction(self, energy=self.energy)

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        return tucker.decompose(x, self.energy, modes=x.ndim)

    def grad_weight(self, op: Op, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        return tucker.grad_weight(op, g, kept, x_shape)

    def keep_macs(self, op: Op, x_shape: Shape, kept: Kept) -> int:
        return tucker.decompose_macs(x_shape, kept)

    def macs(self, op: Op, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        return op.macs(x_shape, w_shape), tucker.grad_weight_macs(op, x_shape, w_shape, kept)

"""Truncated SVD of the batch, the matrix baseline of the HOSVD paper."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradfilter import tucker
from gradfilter.layers import Op
from gradfilter.methods.hosvd import Hosvd
from gradfilter.methods.method import Kept


@dataclass(frozen=True, repr=False)
class Svd(Hosvd):
    """The leading singular vectors of x as a matrix [batch, everything else].

    Hosvd of the batch mode alone: keeps U [N, r] and the r combined samples U^T x. gx is exact; gW
    is the exact weight gradient of r samples instead of N. Exact with energy 1.
    """

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        return tucker.decompose(x, self.energy, modes=1)

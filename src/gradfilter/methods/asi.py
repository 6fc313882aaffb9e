"""Activation subspace iteration (ASI; Nguyen et al.; ICML 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradfilter import tucker
from gradfilter.layers import Op
from gradfilter.methods.hosvd import Hosvd
from gradfilter.methods.method import Kept, Shape, fraction, positive


@dataclass(frozen=True, repr=False)
class SubspaceIteration(Hosvd):
    """Hosvd whose factors are the last batch's after one step of power iteration on this one.

    `rank` fixes the rank of every mode (at most its size). `energy` takes the ranks and the first
    factors from a decomposition of the first batch. The factors live on the layer; a mode whose
    size changed starts again from cosines, so any batch size works and nothing is random.
    Exact when every rank is full.
    """

    energy: float | None = None
    rank: int | None = None
    stateful: ClassVar[bool] = True

    def __post_init__(self):
        positive(self, rank=self.rank)
        fraction(self, energy=self.energy)
        if self.energy is not None and self.rank is not None:
            raise ValueError("SubspaceIteration: give energy or rank, not both")
        if self.energy is None and self.rank is None:
            object.__setattr__(self, "energy", 0.8)

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        if self.rank is None and len(state) != x.ndim:
            return super().keep(op, x)
        x = x if x.dtype == torch.float64 else x.float()
        factors = []
        for mode, size in enumerate(x.shape):
            rows = tucker.unfold(x, mode)
            step = rows @ (rows.T @ self._start(x, mode, state))
            factors.append(torch.linalg.qr(step)[0].reshape(size, -1))
        return (tucker.core(x, factors), *factors)

    def next_state(self, kept: Kept) -> Kept:
        if kept and kept[0].ndim == 1:  # packed by `tucker.decompose`
            raise RuntimeError(
                "SubspaceIteration(energy) takes its ranks from a first batch: run one training "
                "step before compiling, or give a rank"
            )
        return kept[1:]

    def keep_macs(self, op: Op, x_shape: Shape, kept: Kept) -> int:
        return 2 * math.prod(x_shape) * sum(kept[0].shape) + tucker.core_macs(x_shape, kept)

    def _start(self, x: Tensor, mode: int, state: Kept) -> Tensor:
        """The factor to iterate from. [size, rank]"""
        size = x.shape[mode]
        known = state[mode] if len(state) == x.ndim else None
        if known is not None and known.shape[0] == size and known.device == x.device:
            return known.to(x.dtype)
        rank = min(size, self.rank or known.shape[1])
        i = torch.arange(size, device=x.device, dtype=x.dtype)
        j = torch.arange(rank, device=x.device, dtype=x.dtype)
        return torch.cos(math.pi / size * (i[:, None] + 0.5) * j)

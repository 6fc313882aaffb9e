"""The Galerkin filter: both factors projected on the patch grid, the kernel left whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradfilter.layers import ConvOp, Op
from gradfilter.methods.method import Kept, Method, Shape, positive, takes_convolutions
from gradfilter.patches import divide_up, patch_area, patch_mean, tap_counts, upsample


@dataclass(frozen=True, repr=False)
class GalerkinFilter(Method):
    """Replace x and g by their patch means, apply the true convolution, project back.

    gx = P W^T U P g and gW[tap] = <U P g, shift_tap(U P x)>, computed on the patch grid with the
    counts N_a[p, q] of `tap_counts`. Keeps the patch means of x. Exact with patch 1; for 1x1
    stride-1 layers equal to GradientFilter.

    `patch=r`: the patch side of every tensor is r. `grid=n`: it is ceil(size / n), so that there
    are at most n patches a side.
    """

    grid: int | None = None
    patch: int | None = None

    def __post_init__(self):
        positive(self, grid=self.grid, patch=self.patch)
        if self.grid is not None and self.patch is not None:
            raise ValueError("GalerkinFilter: give grid or patch, not both")
        if self.grid is None and self.patch is None:
            object.__setattr__(self, "grid", 7)

    def supports(self, op: Op) -> str | None:
        return takes_convolutions(self, op)

    def side(self, size: tuple[int, int]) -> tuple[int, int]:
        """Patch side of a map of this size."""
        if self.patch is not None:
            return (self.patch, self.patch)
        return tuple(divide_up(s, self.grid) for s in size)

    def project(self, x: Tensor) -> Tensor:
        """P x: the patch means of a map."""
        size = tuple(x.shape[-2:])
        side = self.side(size)
        return patch_mean(x, _count(size, side), side)

    def keep(self, op: ConvOp, x: Tensor, state: Kept = ()) -> Kept:
        return (self.project(x),)

    def filter(self, op: ConvOp, g: Tensor) -> Tensor:
        return self.project(g)

    def grad_input(self, op: ConvOp, g: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        x_size = tuple(x_shape[-2:])
        side = self.side(x_size)
        taps = w.reshape(op.groups, -1, *w.shape[1:])  # [G, O/G, C/G, kh, kw]
        gx = torch.einsum("ngoabqr,gocab->ngcqr", self._spread(op, g, x_size), taps)
        gx = gx.flatten(1, 2) / patch_area(g, x_size, _count(x_size, side), side)
        # PyTorch's batch norm misreads a gradient of one image that lies as einsum leaves it
        return upsample(gx, x_size, side).contiguous()

    def grad_weight(self, op: ConvOp, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        (x,) = kept
        x_size = tuple(x_shape[-2:])
        xx = x.reshape(x.shape[0], op.groups, -1, *x.shape[-2:])  # [N, G, C/G, Q1, Q2]
        if x.shape[1] * g[0, 0].numel() < g.shape[1] * x[0, 0].numel():
            # x as each tap sees it is smaller than g is, in a stem many times
            gg = g.reshape(g.shape[0], op.groups, -1, *g.shape[-2:])
            spread = torch.einsum("ngcqs,apq,brs->ngcabpr", xx, *self._tap_counts(op, g, x_size))
            return torch.einsum("ngopr,ngcabpr->gocab", gg, spread).flatten(0, 1)
        spread = self._spread(op, g, x_size)
        return torch.einsum("ngoabqr,ngcqr->gocab", spread, xx).flatten(0, 1)

    def macs(self, op: ConvOp, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        """Both are a convolution on the grid, with as many taps as x-patches a y-patch reads."""
        pairs = 1
        for n in self._tap_counts(op, torch.zeros(()), tuple(x_shape[-2:])):
            reached = n.sum(0) > 0  # [P, Q]
            pairs *= len(reached) * int(reached.sum(1).max())
        out, inner = w_shape[:2]
        return (x_shape[0] * pairs * out * inner,) * 2

    def _spread(self, op: ConvOp, g: Tensor, x_size: tuple) -> Tensor:
        """sum_p N_a[p, q] N_b[p', q'] g[p, p']: g as each tap sees it. [N, G, O/G, a, b, Q1, Q2]"""
        rows, columns = self._tap_counts(op, g, x_size)
        gg = g.reshape(g.shape[0], op.groups, -1, *g.shape[-2:])
        return torch.einsum("ngopr,apq,brs->ngoabqs", gg, rows, columns)

    def _tap_counts(self, op: ConvOp, like: Tensor, x_size: tuple) -> list[Tensor]:
        y_size = op.output_size(x_size)
        y_side, x_side = self.side(y_size), self.side(x_size)
        return [
            tap_counts(
                like,
                (y_size[i], y_side[i]),
                (x_size[i], x_side[i]),
                op.kernel[i],
                op.stride[i],
                op.dilation[i],
                op.padding[2 * i],
            )
            for i in (0, 1)
        ]


def _count(size: tuple, side: tuple) -> tuple[int, int]:
    return tuple(divide_up(s, r) for s, r in zip(size, side, strict=True))

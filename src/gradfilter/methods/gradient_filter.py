"""Gradient filtering (Yang, Li, Marculescu; CVPR 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.layers import ConvOp, Op
from gradfilter.methods.method import Kept, Method, Shape, positive, takes_convolutions
from gradfilter.patches import divide_up, patch_mean, patch_sum, upsample


@dataclass(frozen=True, repr=False)
class GradientFilter(Method):
    """One gradient value per patch of y, and a kernel that is the sum of its taps.

    Keeps the sums of x over blocks of patch*stride. gx = U(W_sum^T P g); gW is the same for
    every tap: sum over patches of (P g)(S x). Exact for a 1x1 layer with patch 1.

    `alignment="origin"` starts both grids at pixel 0. "centred" is the grid of the paper's code:
    both grids start ceil(missing/2) pixels before the map, and where dilation >= patch the
    input gradient is P g convolved with the rotated kernel at dilation // patch.
    """

    patch: int = 2
    alignment: str = "origin"

    def __post_init__(self):
        positive(self, patch=self.patch)
        if self.alignment not in ("origin", "centred"):
            raise ValueError(
                f"GradientFilter: alignment must be 'origin' or 'centred', got {self.alignment!r}"
            )

    def supports(self, op: Op) -> str | None:
        return takes_convolutions(self, op)

    def keep(self, op: ConvOp, x: Tensor, state: Kept = ()) -> Kept:
        count, _, x_grid = self._grids(op, x.shape)
        return (patch_sum(x, count, *x_grid),)

    def filter(self, op: ConvOp, g: Tensor) -> Tensor:
        size = g.shape[-2:]
        count = tuple(divide_up(s, self.patch) for s in size)
        return patch_mean(g, count, *self._grid(size, count, (1, 1)))

    def grad_input(self, op: ConvOp, g: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        if self._dilated(op):
            blocks = self._rotated(op, g, w)
        else:
            n, _, *count = g.shape
            taps = _grouped(w.sum((-1, -2), keepdim=True), op.groups)  # [G, O/G, C/G, 1, 1]
            gg = g.reshape(n, op.groups, -1, *count)
            blocks = torch.einsum("ngopq,goc->ngcpq", gg, taps[..., 0, 0]).flatten(1, 2)
        _, _, (side, start) = self._grids(op, x_shape)
        return upsample(blocks, x_shape[-2:], side, start)

    def grad_weight(self, op: ConvOp, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        n, _, *count = g.shape
        gg = g.reshape(n, op.groups, -1, *count)
        xx = kept[0].reshape(n, op.groups, -1, *count)
        gw = torch.einsum("ngopq,ngcpq->goc", gg, xx).flatten(0, 1)
        return gw[..., None, None].expand(*gw.shape, *op.kernel).contiguous()

    def macs(self, op: ConvOp, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        out, inner = w_shape[:2]
        patches = kept[0].shape[0] * kept[0].shape[-2] * kept[0].shape[-1]
        per_tap = patches * out * inner
        taps = op.kernel[0] * op.kernel[1] if self._dilated(op) else 1
        return per_tap * taps, per_tap

    def _dilated(self, op: ConvOp) -> bool:
        return (
            self.alignment == "centred" and op.dilation[0] > 1 and op.dilation[0] >= self.patch
        )

    def _rotated(self, op: ConvOp, g: Tensor, w: Tensor) -> Tensor:
        dilation = op.dilation[0] // self.patch
        taps = _grouped(w, op.groups).transpose(1, 2).flatten(0, 1).flip(-1, -2)  # [C, O/G, k, k]
        gx = F.conv2d(g, taps, padding=dilation, dilation=dilation, groups=op.groups)
        return gx

    def _grids(self, op: ConvOp, x_shape: Shape):
        """Patches of y a side, y's (side, start), x's (side, start)."""
        x_size = tuple(x_shape[-2:])
        y_size = op.output_size(x_size)
        count = tuple(divide_up(s, self.patch) for s in y_size)
        return count, self._grid(y_size, count, (1, 1)), self._grid(x_size, count, op.stride)

    def _grid(self, size: tuple, count: tuple, stride: tuple) -> tuple[tuple, tuple]:
        side = tuple(self.patch * s for s in stride)
        if self.alignment == "origin":
            return side, (0, 0)
        missing = (n * r - length for n, r, length in zip(count, side, size, strict=True))
        return side, tuple(divide_up(m, 2) for m in missing)


def _grouped(w: Tensor, groups: int) -> Tensor:
    return w.reshape(groups, -1, *w.shape[1:])  # [G, O/G, C/G, kh, kw]

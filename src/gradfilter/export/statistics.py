"""What is kept of a map: its mean over each patch, and that of an activation's slope.

A patch at a far edge that reaches beyond the map has only the pixels that are there. Each form
here is the fastest that ONNX Runtime has for its maps: in blocks of channels or plain, large or
small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradfilter.export import blocked
from gradfilter.export.arithmetic import cast, compare, joined
from gradfilter.export.graph import Operand, Value
from gradfilter.export.maps import per_axis
from gradfilter.export.shapes import padded
from gradfilter.patches import divide_up, patch_area

FEW = 16  # patches a row, up to which a product with all of them is the fastest mean
ROW = 64  # pixels of a row of patches, below which a product of bytes is slower than a mean
COPIED = 2**12  # pixels of a map, up to which it is quickly copied with zeros behind it


@dataclass(frozen=True)
class _Grid:
    """The patches of a map, whose sides are no longer than it."""

    size: tuple[int, int]
    side: tuple[int, int]
    count: tuple[int, int]

    @staticmethod
    def of(x: Operand, side) -> _Grid:
        size = tuple(x.shape[2:])
        side = tuple(min(r, s) for r, s in zip(side, size, strict=True))
        return _Grid(size, side, tuple(map(divide_up, size, side)))

    @property
    def is_map(self) -> bool:
        """Whether every patch is a pixel."""
        return self.side == (1, 1)

    @property
    def beyond(self) -> list[int]:
        """How far the last patches reach beyond the map."""
        ends = zip(self.size, self.side, self.count, strict=True)
        return [n * r - s for s, r, n in ends]

    @property
    def area(self) -> Tensor:
        """Pixels that the patches have, one number where it is the same for all."""
        area = patch_area(torch.empty(0).double(), self.size, self.count, self.side)
        return area if any(self.beyond) else area[0, 0]

    def members(self, axis: int) -> Tensor:
        """[pixels, patches] of an axis: which pixel is of which patch."""
        own = torch.arange(self.size[axis]) // self.side[axis]
        return own[:, None] == torch.arange(self.count[axis])

    def in_rows(self) -> Tensor:
        """[pixels of a row of patches, patches a row]: which pixel is of which patch."""
        return self.members(1).repeat(self.side[0], 1)


def mean(c, x: Operand, side) -> Operand:
    """Mean over each patch of a map."""
    grid = _Grid.of(x, side)
    if grid.is_map:
        return x
    if blocked.holds(c.graph, x):
        found = _in_blocks(c, c.graph.in_blocks[x.name], grid, x.shape[1])
    elif grid.count[1] > FEW:
        found = c.graph.op(
            "AveragePool", x, kernel_shape=list(grid.side), strides=list(grid.side),
            pads=[0, 0, *grid.beyond], count_include_pad=1, shape=(*x.shape[:2], *grid.count),
            dtype=x.dtype,
        )  # fmt: skip
    elif grid.beyond[0] and grid.size[0] * grid.size[1] > COPIED:
        rows, columns = (grid.members(axis).double() for axis in (0, 1))
        return per_axis(c, x, (rows / rows.sum(0)).T, (columns / columns.sum(0)).T)
    else:  # the AveragePool takes twice as long, or changes the order in memory first
        weight = grid.in_rows().double() / (grid.side[0] * grid.side[1])
        found = c.graph.matmul(_in_rows(c, x, grid), weight.to(x.dtype))
    return _over(c, found, grid)


def slopes(c, x: Operand, act: str, side) -> Operand:
    """Mean over each patch of the slope of a ReLU or ReLU6, of its output."""
    grid = _Grid.of(x, side)
    if blocked.holds(c.graph, x) and not grid.is_map:
        return _slopes_in_blocks(c, x, act, grid)
    inside = _inside(c, x, act)
    if grid.is_map or grid.count[1] > FEW:
        return mean(c, cast(c, inside, x.dtype), side)
    rows = _in_rows(c, cast(c, inside, torch.uint8), grid)
    # of two unsigned matrices the product takes ONNX Runtime twice as long
    found = c.graph.op(
        "MatMulInteger", rows, grid.in_rows().to(torch.int8), shape=(*x.shape[:2], *grid.count),
        dtype=torch.int32,
    )  # fmt: skip
    return joined(c, "Div", cast(c, found, x.dtype), grid.area.to(x.dtype))


def _slopes_in_blocks(c, x: Value, act: str, grid: _Grid) -> Operand:
    inside = _inside(c, c.graph.in_blocks[x.name], act)
    few = grid.side[0] * grid.size[1] < ROW
    if any(grid.beyond) or few or grid.count[1] > FEW:
        found = _in_blocks(c, cast(c, inside, x.dtype), grid, x.shape[1])
        return _over(c, found, grid)
    ones = grid.in_rows().T.contiguous().to(torch.uint8)
    found = blocked.patch_counts(c.graph, cast(c, inside, torch.int8), ones, grid.count)
    found = joined(c, "Div", cast(c, found, x.dtype), grid.area.to(x.dtype))
    return blocked.back(c.graph, found, x.shape[1])


def _in_blocks(c, x: Value, grid: _Grid, channels: int) -> Value:
    """As if there were zeros beyond the map."""
    return blocked.patch_mean(c.graph, x, grid.side, grid.count, grid.beyond, channels)


def _over(c, found: Operand, grid: _Grid) -> Operand:
    """Means over the pixels that there are, of those over whole patches with zeros beyond."""
    if not any(grid.beyond):
        return found
    return joined(c, "Mul", found, (grid.side[0] * grid.side[1] / grid.area).to(found.dtype))


def _inside(c, x: Operand, act: str) -> Operand:
    """Where the slope of a ReLU or ReLU6 is 1, of its output: neither 0 nor 6.

    These are the tests that ONNX Runtime has the fastest kernels for.
    """
    inside = cast(c, x, torch.bool)
    if act == "relu6":
        inside = joined(c, "Xor", inside, compare("Equal")(c, None, x, 6.0))
    return inside


def _in_rows(c, x: Operand, grid: _Grid) -> Operand:
    """[N, C, H, W] -> [N, C, rows of patches, their pixels], which lie next to each other.

    There are zeros in rows beyond the map.
    """
    x = padded(c, x, [0] * 4, [0, 0, grid.beyond[0], 0], 0)
    return c.graph.reshape(x, (*x.shape[:2], grid.count[0], grid.side[0] * grid.size[1]))

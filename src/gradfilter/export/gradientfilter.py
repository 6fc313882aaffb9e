"""Both gradients of a convolution under GradientFilter: the kernel summed over its taps."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.export.arithmetic import expanded, joined
from gradfilter.export.convolutions import product
from gradfilter.export.graph import Operand
from gradfilter.export.maps import per_axis


def backward(c, conv, g, x, w, need_gx, need_gw):
    """g [N, O, P1, P2], x [N, C, Q1, Q2] -> gx as x, gw as w."""
    graph, groups = c.graph, conv.op.groups
    n, out, *count = g.shape
    inner, patches = w.shape[1], count[0] * count[1]
    own = out // groups
    grouped = graph.reshape(g, (n, groups, own, patches))
    gx = gw = None
    if need_gx:
        taps = graph.sum(graph.reshape(w, (groups, own, inner, w.shape[2] * w.shape[3])), [3])
        blocks = graph.matmul(graph.permute(taps, [0, 2, 1]), grouped)  # [N, G, C / G, P]
        gx = _to_cells(c, conv, graph.reshape(blocks, (n, groups * inner, *count)))
    if need_gw:
        blocks = _to_blocks(c, conv, _sums(c, conv, x))
        if groups == 1:
            gw = product(c, g, blocks)
        else:
            sums = graph.permute(graph.reshape(blocks, (n, groups, inner, patches)), [0, 1, 3, 2])
            gw = graph.sum(graph.matmul(grouped, sums), [0])
        gw = expanded(c, graph.reshape(gw, (out, inner, 1, 1)), tuple(w.shape))
    return gx, gw


def _sums(c, conv, x: Operand) -> Operand:
    """Sums of x over its patches, from the means."""
    if isinstance(conv.area, float):
        return x if conv.area == 1 else joined(c, "Mul", x, conv.area)
    return joined(c, "Mul", x, conv.area.to(x.dtype))


def _steps(conv) -> list[Tensor]:
    """Of both axes, [cells, count]: 1 where a patch of x's own grid lies in a block of g's."""
    return [
        (torch.arange(cells)[:, None] // s == torch.arange(count)).double()
        for cells, count, s in zip(conv.cells, conv.count, conv.op.stride, strict=True)
    ]


def _to_cells(c, conv, blocks: Operand) -> Operand:
    return blocks if conv.whole else per_axis(c, blocks, *_steps(conv))


def _to_blocks(c, conv, cells: Operand) -> Operand:
    return cells if conv.whole else per_axis(c, cells, *(m.T for m in _steps(conv)))

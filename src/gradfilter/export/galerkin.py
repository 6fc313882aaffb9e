"""Both gradients of a convolution under GalerkinFilter, as products on the patch grid.

The counts N_a[p, q] of `patches.tap_counts` are constants of the graph: `spread` [taps, P, Q] has
all pixels' worth of them where the grid is small. No weight is copied in another order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradfilter.export.arithmetic import joined
from gradfilter.export.convolutions import (
    across,
    grad_input,
    grad_weight,
    product,
    slid,
    slides_in_blocks,
)
from gradfilter.export.graph import Operand
from gradfilter.layers import ConvOp

FEW = 9  # taps that ONNX Runtime slides over small maps faster than products do without blocks
SMALL = 600_000  # counts that are written out in full; beyond, one axis after the other


def backward(c, conv, g, x, w, need_gx, need_gw):
    """g [N, O, P1, P2], x [N, C, Q1, Q2] -> gx as x, gw as w."""
    op: ConvOp = conv.op
    depthwise = op.groups > 1 and w.shape[0] == op.groups and w.shape[1] == 1
    if conv.diagonal is not None and op.groups == 1:
        return _pointwise(c, conv, g, x, w, need_gx, need_gw)
    (kh, p1, q1), (kw, p2, q2) = (t.shape for t in conv.taps)
    small = kh * kw * p1 * p2 * q1 * q2 <= SMALL
    if depthwise:
        body = _depthwise if small or conv.regular is None else _regular
    elif op.groups == 1 and small:
        body = _dense
    elif conv.regular is not None:
        body = _regular
    else:
        body = _separately
    gx, gw = body(c, conv, g, x, w, need_gx, need_gw)
    if gx is not None and not (isinstance(conv.area, float) and conv.area == 1):
        gx = c.graph.reshape(gx, (g.shape[0], w.shape[1] * op.groups, q1, q2))
        gx = joined(c, "Div", gx, conv.area)
    return gx, gw


def _flat(c, x: Operand) -> Operand:
    """[N, C, P, Q] -> [N, C, P * Q]"""
    return c.graph.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3]))


def _pointwise(c, conv, g, x, w, need_gx, need_gw):
    """A 1x1 layer whose patches match one to one."""
    gx = gw = None
    if need_gx:
        gx = across(c.graph, g, w)
        ratio = conv.diagonal / conv.area
        if isinstance(ratio, Tensor):
            gx = joined(c, "Mul", gx, ratio.flatten())
        elif ratio != 1:
            gx = joined(c, "Mul", gx, ratio)
    if need_gw:
        if isinstance(conv.diagonal, Tensor):
            gw = product(c, joined(c, "Mul", g, conv.diagonal), x)
        else:
            gw = product(c, g, x, conv.diagonal)  # a number of pixels
    return gx, gw


def _counts(conv) -> Tensor:
    """[taps, P, Q], P and Q being all patches of y and of x."""
    rows, columns = conv.taps
    every = torch.einsum("apq,brs->abprqs", rows, columns)
    return every.flatten(4, 5).flatten(2, 3).flatten(0, 1)


def _dense(c, conv, g, x, w, need_gx, need_gw):
    """Any layer without groups, on a small grid: W^T g by the counts; x by the counts, then g."""
    graph, counts = c.graph, _counts(conv).to(g.dtype)
    taps, patches, cells = counts.shape
    n, out = g.shape[:2]
    inner = w.shape[1]
    flat = _flat(c, g)
    gx = gw = None
    if need_gx:
        seen = across(graph, g, graph.reshape(w, (out, inner * taps, 1, 1)))  # [N, C * taps, P]
        seen = graph.reshape(seen, (n, inner, taps * patches))
        gx = graph.matmul(seen, counts.reshape(taps * patches, cells))
    if need_gw:
        spread = counts.permute(2, 0, 1).reshape(cells, taps * patches)
        seen = graph.matmul(_flat(c, x), spread)  # [N, C, taps * P]
        seen = graph.reshape(seen, (n, inner * taps, patches, 1))
        gw = product(c, graph.reshape(flat, (n, out, patches, 1)), seen)
    return gx, gw


def _depthwise(c, conv, g, x, w, need_gx, need_gw):
    """One kernel a channel, on a small grid."""
    gx = gw = None
    if need_gx and _slides(conv) and (c.graph.blocked or _taps(conv) <= FEW):
        gx = slid(c, conv.regular.op, g, w, conv.regular.mix)
    elif need_gx:
        gx = _depthwise_input(c, conv, g, w)
    if need_gw and conv.regular is not None and slides_in_blocks(c, g):
        gw = _regular_weight(c, conv.regular, g, x, w.shape)
    elif need_gw:
        gw = _depthwise_weight(c, conv, g, x)
    return gx, gw


def _depthwise_input(c, conv, g, w) -> Operand:
    """gx[q, s] = sum over p, b of (sum over a of w[a, b] N_a[p, q]) (g N_b)[p, s]."""
    graph = c.graph
    rows, columns = (t.to(g.dtype) for t in conv.taps)
    (kh, p1, q1), (kw, p2, q2) = rows.shape, columns.shape
    n, channels = g.shape[:2]
    seen = graph.matmul(g, columns.permute(1, 0, 2).reshape(p2, kw * q2))  # [N, C, P1, kw * Q2]
    seen = graph.reshape(seen, (n, channels, p1 * kw, q2))
    below = torch.einsum("apq,bd->abqpd", rows, torch.eye(kw, dtype=g.dtype))
    mixed = graph.matmul(graph.reshape(w, (channels, kh * kw)), below.reshape(kh * kw, -1))
    return graph.matmul(graph.reshape(mixed, (channels, q1, p1 * kw)), seen)


def _depthwise_weight(c, conv, g, x) -> Operand:
    """gw[a, b] = sum N_a[p, q] g[p, r] x[q, s] N_b[r, s]: columns first, then g, then rows."""
    graph = c.graph
    rows, columns = (t.to(g.dtype) for t in conv.taps)
    (kh, p1, q1), (kw, p2, q2) = rows.shape, columns.shape
    n, channels = g.shape[:2]
    seen = graph.matmul(x, columns.permute(2, 0, 1).reshape(q2, kw * p2))  # [N, C, Q1, kw * P2]
    seen = graph.permute(graph.reshape(seen, (n, channels, q1 * kw, p2)), [0, 1, 3, 2])
    met = graph.sum(graph.matmul(g, seen), [0])  # [C, P1, Q1 * kw]
    last = torch.einsum("apq,bd->pqbad", rows, torch.eye(kw, dtype=g.dtype))
    return graph.matmul(graph.reshape(met, (channels, p1 * q1 * kw)), last.reshape(-1, kh * kw))


def _taps(conv) -> int:
    """Taps of the small convolution on the grid."""
    return math.prod(conv.regular.op.kernel)


def _slides(conv) -> bool:
    """Whether gx is a convolution of g of stride 1 with as many patches on both sides."""
    regular = conv.regular
    return regular is not None and regular.op.stride == (1, 1)


def _regular(c, conv, g, x, w, need_gx, need_gw):
    """Where every patch sees its neighbours alike: the gradients of a small convolution."""
    graph, regular = c.graph, conv.regular
    op, taps = regular.op, w.shape[2] * w.shape[3]
    cells = tuple(t.shape[2] for t in conv.taps)
    gx = gw = None
    if need_gx:
        mixed = w
        if not regular.plain:
            rows = graph.reshape(w, (*w.shape[:2], taps))
            mixed = graph.matmul(rows, regular.mix.to(g.dtype))
            mixed = graph.reshape(mixed, (*w.shape[:2], *op.kernel))
        gx = grad_input(c, op, g, mixed, (g.shape[0], w.shape[1] * op.groups, *cells))
    if need_gw:
        gw = _regular_weight(c, regular, g, x, w.shape)
    return gx, gw


def _regular_weight(c, regular, g, x, w_shape) -> Operand:
    kernel = regular.op.kernel
    gw = grad_weight(c, regular.op, g, x, (*w_shape[:2], *kernel))
    if regular.plain:
        return gw
    rows = c.graph.reshape(gw, (*w_shape[:2], kernel[0] * kernel[1]))
    return c.graph.matmul(rows, regular.mix.T.to(g.dtype).contiguous())


def _separately(c, conv, g, x, w, need_gx, need_gw):
    """Any layer and grid: g as every tap sees it, or x where that has fewer channels."""
    graph, groups, (rows, columns) = c.graph, conv.op.groups, conv.taps
    n, inner, taps = g.shape[0], w.shape[1], w.shape[2] * w.shape[3]
    own = w.shape[0] // groups
    if not need_gx and inner < own:
        seen = _seen(graph, x, rows, columns.transpose(1, 2))
        seen = graph.reshape(seen, (n, groups, inner * taps, seen.shape[3]))
        return None, _summed(graph, graph.reshape(g, (n, groups, own, seen.shape[3])), seen)
    seen = _seen(graph, g, rows.transpose(1, 2), columns)
    seen = graph.reshape(seen, (n, groups, own * taps, seen.shape[3]))
    gx = gw = None
    if need_gx:
        mixed = graph.permute(graph.reshape(w, (groups, own, inner, taps)), [0, 2, 1, 3])
        mixed = graph.reshape(mixed, (groups, inner, own * taps))
        gx = graph.matmul(mixed, seen)  # [N, G, C / G, Q]
    if need_gw:
        gw = _summed(graph, seen, graph.reshape(x, (n, groups, inner, seen.shape[3])))
        gw = graph.permute(graph.reshape(gw, (groups, own, taps, inner)), [0, 1, 3, 2])
    return gx, gw


def _seen(graph, x: Operand, rows: Tensor, columns: Tensor) -> Operand:
    """A map as every tap sees it, one axis after the other, in the order of a weight's taps.

    [N, C, P, Q] by [kh, R, P] and [kw, Q, S] -> [N, C, kh * kw, R * S]
    """
    (n, channels, height, width), dtype = x.shape, x.dtype
    (kh, high, _), (kw, _, wide) = rows.shape, columns.shape
    x = graph.reshape(x, (n, channels, 1, height, width))
    x = graph.matmul(x, columns.to(dtype).contiguous())  # [N, C, kw, P, S]
    x = graph.reshape(x, (n, channels, 1, kw, height, wide))
    x = graph.matmul(rows.to(dtype)[:, None].contiguous(), x)  # [N, C, kh, kw, R, S]
    return graph.reshape(x, (n, channels, kh * kw, high * wide))


def _summed(graph, a: Operand, b: Operand) -> Operand:
    """sum over images of a b^T: [N, G, A, P], [N, G, B, P] -> [G, A, B]"""
    return graph.sum(graph.matmul(a, graph.permute(b, [0, 1, 3, 2])), [0])

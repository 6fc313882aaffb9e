"""Operators that move or choose elements."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.export.arithmetic import cast, expanded, joined, where
from gradfilter.export.graph import Operand, Value
from gradfilter.export.pieces import Pieces, split

END = torch.iinfo(torch.int64).max


def same(c, call, x, *_, **__):
    return x


def view(c, call, x, *_):
    return c.graph.reshape(x, call.shape)


def permute(c, call, x, order):
    return c.graph.permute(x, list(order))


def transpose(c, call, x, a, b):
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return c.graph.permute(x, order)


def t(c, call, x):
    return c.graph.permute(x, [1, 0]) if len(x.shape) == 2 else x


def expand(c, call, x, *_, **__):
    return expanded(c, x, call.shape)


def cat(c, call, tensors, dim=0):
    tensors = [x for x in tensors if tuple(x.shape) != (0,)]
    if all(len(x.shape) == 1 for x in tensors):
        parts = [p for x in tensors for p in (x.parts if isinstance(x, Pieces) else [x])]
        return Pieces(parts)
    return c.graph.concat(tensors, dim)


def stack(c, call, tensors, dim=0):
    shape = list(call.shape)
    shape[dim] = 1
    return c.graph.concat([c.graph.reshape(x, tuple(shape)) for x in tensors], dim)


def _ends(size, start: int | None, end: int | None) -> tuple[int, int]:
    """Where a slice begins and ends, counted from the front as far as the size is known."""
    start, end = start or 0, END if end is None else end
    if not isinstance(size, int):
        return start, end
    start, end = (max(0, min(e + size if e < 0 else e, size)) for e in (start, end))
    return start, max(start, end)


def slice_(c, call, x, dim=0, start=None, end=None, step=1):
    size = x.shape[dim]
    start, end = _ends(size, start, end)
    if (start, step) == (0, 1) and end in (size, END):
        return x
    if isinstance(x, Pieces):
        return x.cut(c.graph, start, end)
    g = c.graph
    ends = g.ints(start), g.ints(end), g.ints(dim), g.ints(step)
    return g.op("Slice", x, *ends, shape=call.shape, dtype=x.dtype)


def slice_scatter(c, call, x, source, dim=0, start=None, end=None, step=1):
    """x with a part replaced."""
    size = x.shape[dim]
    if not isinstance(size, int):
        raise ValueError("export: writing to some of the images is not supported")
    start, end = _ends(size, start, end)
    if len(x.shape) == 1 and step == 1:
        x = x if isinstance(x, Pieces) else Pieces([x])
        return x.replaced(c.graph, c.whole(source), start, end)
    x, source = c.whole(x), c.whole(source)
    if step != 1:
        return _strewn(c, x, source, dim, start, step)
    ends = [(0, start), (end, size)]
    before, after = (
        slice_(c, _Sized(x, dim, b - a), x, dim, a, b) if b > a else None for a, b in ends
    )
    parts = [p for p in (before, source, after) if p is not None]
    return c.graph.concat(parts, dim)


def _strewn(c, x: Operand, source: Operand, dim: int, start: int, step: int) -> Operand:
    """x with every step-th element along an axis replaced, from `start` on."""
    dim %= len(x.shape)
    before, count, after = x.shape[:dim], source.shape[dim], x.shape[dim + 1 :]
    zeros = [0] * (len(x.shape) + 1)
    ends = [step - 1 if d == dim + 1 else 0 for d in range(len(zeros))]
    wide = padded(c, c.graph.reshape(source, (*before, count, 1, *after)), zeros, ends, 0.0)
    wide = c.graph.reshape(wide, (*before, count * step, *after))
    front, back = [0] * len(x.shape), [0] * len(x.shape)
    front[dim], back[dim] = start, x.shape[dim] - start - count * step
    wide = padded(c, cropped(c, wide, front, back), front, back, 0.0)
    if isinstance(x, Tensor) and not x.any():
        return wide
    place = torch.arange(x.shape[dim])
    chosen = (place >= start) & ((place - start) % step == 0)
    return where(c, None, chosen.reshape(-1, *[1] * len(after)), wide, x)


class _Sized:
    """A stand-in for a call of a slice."""

    def __init__(self, x: Operand, dim: int, size: int):
        self.shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])


def select(c, call, x, dim, index):
    g = c.graph
    return g.op("Gather", x, torch.tensor(index), axis=dim, shape=call.shape, dtype=x.dtype)


def split_with_sizes(c, call, x, sizes, dim=0):
    x = x if isinstance(x, Pieces) else Pieces([x]) if len(x.shape) == 1 else x
    if isinstance(x, Pieces):
        return split(c.graph, x, list(sizes))
    results = [(shape, x.dtype) for shape in _parts(x, sizes, dim)]
    return c.graph.ops("Split", x, c.graph.ints(*sizes), results=results, axis=dim)


def split_evenly(c, call, x, size, dim=0):
    whole = x.shape[dim]
    sizes = [min(size, whole - i) for i in range(0, whole, size)]
    return split_with_sizes(c, call, x, sizes, dim)


def _parts(x: Value, sizes: list[int], dim: int):
    return [(*x.shape[:dim], s, *x.shape[dim % len(x.shape) + 1 :]) for s in sizes]


def pad(c, call, x, amounts, value=0.0):
    """Zeros around, or less of x where an amount is below 0."""
    count = len(x.shape)
    before, after = [0] * count, [0] * count
    for i in range(len(amounts) // 2):
        before[count - 1 - i], after[count - 1 - i] = amounts[2 * i : 2 * i + 2]
    return padded(c, cropped(c, x, before, after), before, after, value)


def cropped(c, x: Operand, before: list[int], after: list[int]) -> Operand:
    """Less of x where an amount is below 0."""
    axes = [d for d in range(len(x.shape)) if min(before[d], after[d]) < 0]
    if not axes:
        return x
    start = [max(-before[d], 0) for d in axes]
    end = [x.shape[d] + min(after[d], 0) for d in axes]
    shape = list(x.shape)
    for d, a, b in zip(axes, start, end, strict=True):
        shape[d] = b - a
    ints = c.graph.ints
    return c.graph.op(
        "Slice", x, ints(*start), ints(*end), ints(*axes), shape=tuple(shape), dtype=x.dtype
    )


def padded(c, x: Operand, before: list[int], after: list[int], value: float) -> Operand:
    before, after = ([max(e, 0) for e in amounts] for amounts in (before, after))
    if not any(before + after):
        return x
    sizes = zip(x.shape, before, after, strict=True)
    shape = tuple(s if not a + b else s + a + b for s, a, b in sizes)
    fill = torch.tensor(value, dtype=x.dtype)
    return c.graph.op("Pad", x, c.graph.ints(*before, *after), fill, shape=shape, dtype=x.dtype)


def gather(c, call, x, dim, index, **_):
    return c.graph.op("GatherElements", x, index, axis=dim, shape=call.shape, dtype=x.dtype)


def index_select(c, call, x, dim, index):
    return c.graph.op("Gather", x, index, axis=dim, shape=call.shape, dtype=x.dtype)


def index(c, call, x, indices):
    """x[i], of whole numbers along the first axis alone."""
    if len(indices) != 1:
        raise ValueError("export: an index along several axes is not supported")
    return c.graph.op(
        "Gather", x, cast(c, indices[0], torch.int64), axis=0, shape=call.shape, dtype=x.dtype
    )


def scatter_add(c, call, x, dim, index, source):
    return c.graph.op("ScatterElements", x, index, source, axis=dim, reduction="add", like=x)


def index_add(c, call, x, dim, index, source):
    """By a product with ones and zeros, which adds in a fixed order."""
    if not isinstance(index, Tensor) or dim % len(x.shape) != len(x.shape) - 1:
        raise ValueError("export: index_add is supported along the last axis, by a constant")
    ones = torch.nn.functional.one_hot(index, x.shape[-1]).to(x.dtype)  # [len(index), size]
    return joined(c, "Add", x, c.graph.matmul(source, ones))


def repeat(c, call, x, times):
    if all(t == 1 for t in times):
        return c.graph.reshape(x, call.shape)
    return c.graph.op("Tile", x, c.graph.ints(*times), shape=call.shape, dtype=x.dtype)


def flip(c, call, x, dims):
    for d in dims:
        order = torch.arange(x.shape[d] - 1, -1, -1)
        x = c.graph.op("Gather", x, order, axis=d % len(x.shape), like=x)
    return x


def mm(c, call, a, b):
    return c.graph.matmul(a, b)


def addmm(c, call, bias, a, b, beta=1, alpha=1):
    return joined(c, "Add", c.graph.matmul(a, b), bias)


OPERATORS = {
    "alias": same,
    "clone": same,
    "detach": same,
    "copy": lambda c, call, x, source, *_: expanded(
        c, cast(c, c.whole(source), x.dtype), call.shape
    ),
    "contiguous": same,
    "lift_fresh": same,
    "view": view,
    "_unsafe_view": view,
    "reshape": view,
    "unsqueeze": view,
    "squeeze": view,
    "permute": permute,
    "transpose": transpose,
    "t": t,
    "expand": expand,
    "cat": cat,
    "stack": stack,
    "slice": slice_,
    "slice_scatter": slice_scatter,
    "select": select,
    "split_with_sizes": split_with_sizes,
    "split": split_evenly,
    "constant_pad_nd": pad,
    "gather": gather,
    "index_select": index_select,
    "index": index,
    "scatter_add": scatter_add,
    "index_add": index_add,
    "repeat": repeat,
    "flip": flip,
    "mm": mm,
    "bmm": mm,
    "addmm": addmm,
}

# these can read a vector in pieces
PIECES = {"alias", "clone", "detach", "copy", "cat", "slice", "slice_scatter", "split_with_sizes"}

"""Vectors put together from pieces, some known and some computed in the graph.

The engine folds all batch norms as one vector. Kept as pieces, the part of the frozen layers stays
a constant, and a piece that is cut out again is the very value that was put in.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from gradfilter.export.graph import Graph, Operand, Value


class Pieces:
    """A vector as its pieces, in order."""

    def __init__(self, parts: list[Operand]):
        self.parts = [p for p in parts if p.shape[0]]
        self.shape = (sum(p.shape[0] for p in self.parts),)
        self.dtype = self.parts[0].dtype

    def whole(self, graph: Graph) -> Operand:
        """All of it as one operand."""
        return _joined(graph, self.merged(graph).parts)

    def merged(self, graph: Graph) -> Pieces:
        """Neighbours of one kind, constants or values, joined."""
        kinds = groupby(self.parts, key=lambda p: isinstance(p, Tensor))
        return Pieces([_joined(graph, list(group)) for _, group in kinds])

    def replaced(self, graph: Graph, source: Operand, start: int, end: int) -> Pieces:
        """With another piece in a place."""
        before, after = self.cut(graph, 0, start), self.cut(graph, end, self.shape[0])
        return Pieces([*before.parts, source, *after.parts])

    def cut(self, graph: Graph, start: int, end: int) -> Pieces:
        """From `start` to `end`."""
        parts, at = [], 0
        for p in self.parts:
            low, high = max(start - at, 0), min(end - at, p.shape[0])
            if low < high:
                parts.append(p if high - low == p.shape[0] else _slice(graph, p, low, high))
            at += p.shape[0]
        empty = torch.empty(0, dtype=self.dtype)
        return Pieces(parts) if parts else _Nothing(empty)


class _Nothing(Pieces):
    """A cut of no length."""

    def __init__(self, empty: Tensor):
        self.parts, self.shape, self.dtype = [], (0,), empty.dtype


def split(graph: Graph, x: Pieces, sizes: list[int]) -> list[Operand]:
    """Consecutive parts of these sizes; one node cuts all those of one value."""
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    cuts = list(zip(edges, edges[1:], strict=False))
    found: dict[tuple[int, int], Operand] = {}
    at = 0
    for p in x.parts:
        inside = [(a, b) for a, b in cuts if at <= a and b <= at + p.shape[0]]
        covered = sum(b - a for a, b in inside) == p.shape[0]
        if isinstance(p, Value) and len(inside) > 1 and covered:
            own = [b - a for a, b in inside]
            results = [((s,), p.dtype) for s in own]
            found |= dict(
                zip(
                    inside,
                    graph.ops("Split", p, graph.ints(*own), results=results, axis=0),
                    strict=True,
                )
            )
        at += p.shape[0]
    return [found.get(c) or x.cut(graph, *c).whole(graph) for c in cuts]


def elementwise(graph: Graph, apply: Callable[..., Operand], operands: list) -> Pieces | None:
    """An operation on vectors in pieces, piece by piece; None where their pieces do not match."""
    vectors = [x.merged(graph) for x in operands if isinstance(x, Pieces)]
    length = vectors[0].shape[0]
    for x in operands:
        if not isinstance(x, Pieces | Tensor) and tuple(getattr(x, "shape", ())) == (length,):
            return None
    edges = {tuple(p.shape[0] for p in v.parts) for v in vectors}
    if len(edges) != 1:
        return None
    parts, at = [], 0
    for i, size in enumerate(edges.pop()):
        of = iter(vectors)
        here = [
            next(of).parts[i]
            if isinstance(x, Pieces)
            else x[at : at + size]
            if isinstance(x, Tensor) and tuple(x.shape) == (length,)
            else x
            for x in operands
        ]
        parts.append(apply(*here))
        at += size
    return Pieces(parts)


def _joined(graph: Graph, parts: list[Operand]) -> Operand:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(p, Tensor) for p in parts):
        return torch.cat(parts)
    return graph.concat(parts, 0)


def _slice(graph: Graph, p: Operand, start: int, end: int) -> Operand:
    if isinstance(p, Tensor):
        return p[start:end]
    ints = graph.ints
    return graph.op(
        "Slice", p, ints(start), ints(end), ints(0), shape=(end - start,), dtype=p.dtype
    )

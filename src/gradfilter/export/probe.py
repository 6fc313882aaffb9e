"""A small network done both ways, by which a device finds out whether blocks of channels work."""

from __future__ import annotations

import torch

from gradfilter.export import blocked, convolutions, onthegrid, statistics
from gradfilter.export.arithmetic import add, joined
from gradfilter.export.graph import Graph, Value
from gradfilter.export.lower import Lowering

SIZE = 16  # of the maps
SIDES = ((8, 8), (6, 6))  # of their patches, whole ones and such that reach beyond
WEIGHTS = {"stem": (32, 3, 3, 3), "taps": (32, 1, 3, 3), "narrow": (24, 32, 1, 1)}
SHARE = 0.2  # of the numbers given, which have a deviation of 1


def probe() -> Graph:
    """All that a graph in blocks has: a first layer, a depthwise one, 1x1 ones whose channels fill
    no block, their sum, patch means and counted slopes; `plain` and `blocked` must be the same."""
    graph = Graph()
    x = graph.input("x", (1, 3, SIZE, SIZE), torch.float32)
    given = [graph.input(name, shape, torch.float32) for name, shape in WEIGHTS.items()]
    for name in ("plain", "blocked"):
        graph.blocked = name == "blocked"
        graph.output(name, _network(Lowering(graph, []), x, *given))
    graph.prune()
    blocked.fuse(graph)
    return graph


def _network(c, x: Value, *given: Value) -> Value:
    graph = c.graph
    stem, taps, narrow = (joined(c, "Mul", w, SHARE) for w in given)

    def layer(x: Value, w: Value, groups: int = 1) -> Value:
        pads, shape = [w.shape[2] // 2] * 4, (1, w.shape[0], SIZE, SIZE)
        return convolutions.conv(graph, x, w, None, (1, 1), pads, (1, 1), groups, shape)

    a = onthegrid.activated(c, layer(x, stem), "relu6", 0.0)
    b = onthegrid.activated(c, layer(a, taps, taps.shape[0]), "relu6", 0.0)
    parts = [
        add(c, None, layer(a, narrow), layer(b, narrow)),
        *(statistics.mean(c, a, side) for side in SIDES),
        *(statistics.slopes(c, b, "relu6", side) for side in SIDES),
    ]
    flat = [graph.reshape(p, (p.shape[1] * p.shape[2] * p.shape[3],)) for p in parts]
    return graph.concat(flat, 0)

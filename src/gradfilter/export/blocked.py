"""Convolutions in the layout of ONNX Runtime's own kernels, and what stays in it between them.

There a map lies in memory in blocks of 8 or 16 channels, as the processor has it. The runtime puts
layers with constant weights into that layout by itself; of those whose weights change it does the
depthwise ones channel by channel, several times slower. Its operators for the layout can be named
in a graph, and the one that reorders a map reorders taps too, so a graph need not know how large a
block is. Not every processor has such kernels: a blocked graph stands beside the plain one.

`Graph.in_blocks` has the maps that are there in blocks; what reads only those stays in them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradfilter.export.graph import BLOCKED, Graph, Node, Operand, Value

CHANNELS = 16  # a multiple of every block
INT64 = 7  # of ONNX
NARROW = 8  # channels below which a convolution reads a plain map
ACTIVATIONS = ("Relu", "Clip")


def fits(graph: Graph, w: Operand, groups: int) -> bool:
    """Whether a convolution is a depthwise one that is better done in blocks."""
    depthwise = groups > 1 and groups == w.shape[0] and w.shape[1] == 1
    changes = isinstance(w, Value)
    whole = isinstance(groups, int) and groups % CHANNELS == 0
    return graph.blocked and changes and depthwise and whole and w.dtype == torch.float32


def fits_dense(graph: Graph, x: Operand, w: Operand, pads, groups, shape) -> bool:
    """Whether a layer without groups is better done in blocks: a 1x1 one, or a network's first.

    That takes a new order of its weight at every step, so its maps must be larger than that.
    """
    changes = isinstance(w, Value) and w.dtype == torch.float32
    known = all(isinstance(s, int) for s in (*w.shape, *shape[1:]))
    if not (graph.blocked and changes and groups == 1 and known):
        return False
    if math.prod(w.shape) > (w.shape[0] + w.shape[1]) * shape[2] * shape[3]:
        return False
    if holds(graph, x):
        return tuple(w.shape[2:]) == (1, 1) and not any(pads)
    return w.shape[1] < NARROW and w.shape[0] % CHANNELS == 0


def holds(graph: Graph, x: Operand) -> bool:
    """Whether a map is there in blocks."""
    return isinstance(x, Value) and x.name in graph.in_blocks


def depthwise(graph: Graph, x: Operand, w: Value, b, shape, **attributes) -> Value:
    channels, _, *kernel = w.shape
    taps = _in_blocks(graph, graph.reshape(w, (1, channels, *kernel)))
    return _conv(graph, _in_blocks(graph, x), taps, w.shape, b, shape, **attributes)


def dense(graph: Graph, x: Operand, w: Value, b, shape, **attributes) -> Value:
    """A 1x1 layer of a map in blocks, or the first layer of a network.

    [O, C] taps as a map of O channels and C columns: in blocks, that is the order they must have.
    Channels that fill up a block are 0.
    """
    inside = graph.in_blocks.get(x.name, x)
    out, inner, *kernel = w.shape
    wide, deep = _whole(out), inside.shape[1]
    taps = graph.reshape(w, (out, inner * math.prod(kernel)))
    if (wide, deep) != (out, inner):
        taps = _filled(graph, taps, (wide, deep * math.prod(kernel)))
        b = b if b is None else _filled(graph, b, (wide,))
    taps = graph.reshape(taps, (1, wide, 1, deep * math.prod(kernel)))
    return _conv(
        graph, inside, _in_blocks(graph, taps), (wide, deep, *kernel), b, shape, **attributes
    )


def _conv(graph: Graph, x: Value, taps: Value, w_shape, b, shape, **attributes) -> Value:
    # as a reshaped value it would be known for w itself
    taps = graph.op("Reshape", taps, graph.ints(*w_shape), shape=w_shape, dtype=x.dtype)
    inside = (shape[0], w_shape[0], *shape[2:])
    bias = () if b is None else (b,)
    y = graph.op(
        "Conv", x, taps, *bias, domain=BLOCKED, shape=inside, dtype=x.dtype, **attributes
    )
    return back(graph, y, shape[1])


def elementwise(graph: Graph, kind: str, *given: Operand) -> Value | None:
    """An operator on maps that all lie in blocks, and on numbers; None where one does not."""
    maps = [x for x in given if holds(graph, x)]
    inside = [graph.in_blocks[x.name] if holds(graph, x) else x for x in given]
    if any(not holds(graph, x) and x.shape != () for x in given) or not maps:
        return None
    if len({(x.shape, graph.in_blocks[x.name].shape) for x in maps}) > 1:
        return None
    like = graph.in_blocks[maps[0].name]
    return back(graph, graph.op(kind, *inside, like=like), maps[0].shape[1])


def patch_mean(graph: Graph, x: Value, side, count, beyond, channels: int) -> Value:
    """Mean over each patch, with zeros beyond the map, of a map in blocks; a plain map.

    A depthwise layer of equal taps, which takes two thirds of the time of the AveragePool.
    """
    n, wide = x.shape[:2]
    taps = torch.full((wide, 1, *side), 1 / (side[0] * side[1]), dtype=x.dtype)
    y = graph.op(
        "Conv", x, taps, domain=BLOCKED, kernel_shape=list(side), strides=list(side),
        pads=[0, 0, *beyond], dilations=[1, 1], group=wide, shape=(n, wide, *count), dtype=x.dtype,
    )  # fmt: skip
    return back(graph, y, channels)


def patch_counts(graph: Graph, x: Value, ones: Tensor, count) -> Value:
    """Sums over each patch of bytes in blocks, in blocks.

    [N, C, H, W] -> [N, C, P, Q]; `ones` are [Q, pixels of a row of patches]. They are unsigned and
    the map signed bytes: for two unsigned matrices ONNX Runtime takes twice as long.
    """
    n, channels = x.shape[:2]
    rows = channels * count[0] // CHANNELS  # or twice as many
    inside = (n, rows, ones.shape[1], CHANNELS)
    sizes = graph.op(
        "Concat", graph.ints(0, -1, ones.shape[1]), _width(graph), axis=0, shape=(4,),
        dtype=torch.int64,
    )  # fmt: skip
    x = graph.op("Reshape", x, sizes, shape=inside, dtype=x.dtype)
    found = graph.op(
        "MatMulInteger", ones, x, shape=(n, rows, count[1], CHANNELS), dtype=torch.int32
    )
    return graph.reshape(found, (n, channels, *count))


def _width(graph: Graph) -> Value:
    """How many channels a block has here: 8 or 16, read off a map that lies in blocks."""
    found = torch.zeros(1, CHANNELS, 1, 2)
    found[0, 8, 0, 0], found[0, 0, 0, 1] = 16, 8  # one of them is the ninth number
    flat = graph.op("Reshape", _in_blocks(graph, found), graph.ints(-1), shape=(32,), like=found)
    ninth = graph.op("Slice", flat, graph.ints(8), graph.ints(9), shape=(1,), like=found)
    return graph.op("Cast", ninth, to=INT64, shape=(1,), dtype=torch.int64)


def back(graph: Graph, y: Value, channels: int) -> Value:
    """A map in blocks as a plain one, where that is read."""
    shape = (y.shape[0], channels, *y.shape[2:])
    plain = graph.op(
        "ReorderOutput", y, domain=BLOCKED, channels=channels, channels_last=0, shape=shape,
        dtype=y.dtype,
    )  # fmt: skip
    graph.in_blocks[plain.name] = y
    return plain


def _in_blocks(graph: Graph, x: Operand) -> Value:
    if holds(graph, x):
        return graph.in_blocks[x.name]
    return graph.op("ReorderInput", x, domain=BLOCKED, like=x)


def _whole(channels: int) -> int:
    return -(-channels // CHANNELS) * CHANNELS


def _filled(graph: Graph, x: Value, shape) -> Value:
    """With zeros behind it."""
    after = [want - have for want, have in zip(shape, x.shape, strict=True)]
    pads = graph.ints(*[0] * len(after), *after)
    return graph.op("Pad", x, pads, torch.tensor(0, dtype=x.dtype), shape=shape, dtype=x.dtype)


def used(graph: Graph) -> bool:
    bodies = [node.body.nodes for node in graph.nodes if node.body is not None]
    return any(n.domain == BLOCKED for nodes in (graph.nodes, *bodies) for n in nodes)


def fuse(graph: Graph) -> None:
    """What follows a blocked convolution becomes part of it: a sum, then an activation."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for _, value in graph.outputs}
    known = {name for name in (*graph.constants, *(v.name for v in graph.inputs))}
    gone: set[int] = set()
    for node in graph.nodes:
        while node.kind == "Conv" and node.domain == BLOCKED and id(node) not in gone:
            [y] = node.outputs
            after = readers.get(y, [])
            if len(after) != 1 or y in outputs or not _join(graph, node, after[0], known):
                break
            node.outputs = after[0].outputs
            gone.add(id(after[0]))
        known.update(node.outputs)
    graph.nodes = [node for node in graph.nodes if id(node) not in gone]


def _join(graph: Graph, conv: Node, after: Node, known: set[str]) -> bool:
    """Let a convolution do what comes after it too, if it can."""
    if "activation" in conv.attributes:
        return False
    if after.kind in ACTIVATIONS:
        conv.attributes |= _activation(graph, after)
        return True
    [y] = conv.outputs
    if after.kind != "Add" or len(conv.inputs) > 3 or after.inputs.count(y) != 1:
        return False
    [other] = [name for name in after.inputs if name != y]
    if other not in known or graph.values[other].shape != graph.values[y].shape:
        return False
    conv.inputs = [*conv.inputs, *[""] * (3 - len(conv.inputs)), other]
    return True


def _activation(graph: Graph, node: Node) -> dict:
    ends = [float(graph.constants[name]) for name in node.inputs[1:]]
    return {"activation": node.kind} | ({"activation_params": ends} if ends else {})

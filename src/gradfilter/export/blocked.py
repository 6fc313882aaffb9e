"""Depthwise convolutions in the layout of ONNX Runtime's own kernels.

There a map lies in memory in blocks of 8 or 16 channels, as the processor has it. The runtime puts
layers with constant weights into that layout by itself; those whose weights change it does channel
by channel, several times slower. Its operators for the layout can be named in a graph, and the one
that reorders a map reorders the taps of a depthwise layer too, so a graph need not know how large
a block is. Not every processor has such kernels: a blocked graph stands beside the plain one.
"""

from __future__ import annotations

import torch

from gradfilter.export.graph import BLOCKED, Graph, Node, Operand, Value

CHANNELS = 16  # a multiple of every block
ACTIVATIONS = ("Relu", "Clip")


def fits(graph: Graph, w: Operand, groups: int) -> bool:
    """Whether a convolution is a depthwise one that is better done in blocks."""
    depthwise = groups > 1 and groups == w.shape[0] and w.shape[1] == 1
    changes = isinstance(w, Value)
    whole = isinstance(groups, int) and groups % CHANNELS == 0
    return graph.blocked and changes and depthwise and whole and w.dtype == torch.float32


def depthwise(graph: Graph, x: Operand, w: Value, b, shape, **attributes) -> Value:
    channels, _, *kernel = w.shape
    taps = _in_blocks(graph, graph.reshape(w, (1, channels, *kernel)))
    # as a reshaped value it would be known for w itself
    taps = graph.op("Reshape", taps, graph.ints(*w.shape), shape=w.shape, dtype=w.dtype)
    y = graph.op(
        "Conv", _in_blocks(graph, x), taps, *(() if b is None else (b,)), domain=BLOCKED,
        shape=shape, dtype=x.dtype, **attributes,
    )  # fmt: skip
    return graph.op("ReorderOutput", y, domain=BLOCKED, channels=channels, channels_last=0, like=y)


def _in_blocks(graph: Graph, x: Operand) -> Value:
    return graph.op("ReorderInput", x, domain=BLOCKED, like=x)


def used(graph: Graph) -> bool:
    bodies = [node.body.nodes for node in graph.nodes if node.body is not None]
    return any(n.domain == BLOCKED for nodes in (graph.nodes, *bodies) for n in nodes)


def fuse(graph: Graph) -> None:
    """Activations that follow a blocked convolution become part of it."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    outputs = {value.name for _, value in graph.outputs}
    gone = set()
    for conv, back in zip(graph.nodes, graph.nodes[1:], strict=False):
        if back.kind != "ReorderOutput" or conv.domain != BLOCKED or conv.outputs != back.inputs:
            continue
        [y] = back.outputs
        after = readers.get(y, [])
        if len(after) == 1 and after[0].kind in ACTIVATIONS and y not in outputs:
            conv.attributes |= _activation(graph, after[0])
            back.outputs = after[0].outputs
            gone.add(id(after[0]))
    graph.nodes = [node for node in graph.nodes if id(node) not in gone]


def _activation(graph: Graph, node: Node) -> dict:
    ends = [float(graph.constants[name]) for name in node.inputs[1:]]
    return {"activation": node.kind} | ({"activation_params": ends} if ends else {})


def probe() -> Graph:
    """A convolution done both ways, by which a device finds out whether it has the layout."""
    graph = Graph(blocked=True)
    shape, kernel = (1, 2 * CHANNELS, 6, 6), (2 * CHANNELS, 1, 3, 3)
    x, w = (graph.input(n, s, torch.float32) for n, s in (("x", shape), ("w", kernel)))
    how = dict(kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1], dilations=[1, 1])
    how |= {"group": shape[1]}
    graph.output("plain", graph.op("Conv", x, w, like=x, **how))
    graph.output("blocked", depthwise(graph, x, w, None, shape, **how))
    return graph

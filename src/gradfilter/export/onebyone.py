"""The first part of a graph image by image, so that large maps exist for one image at a time.

With fixed batch-norm statistics no image of a forward pass knows of another. Up to the last large
map the nodes become the body of a Scan over the images, which puts out what the rest of the graph
reads: patch statistics and one small map. What depends on no image stays outside.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from gradfilter.export.graph import BLOCKED, Graph, Node, Value

LARGE, SMALLER = 2**18, 1 / 3  # bytes of a map of one image; what stays of the largest
IMAGES, EACH = "images", "each."  # before the names inside the body
COPIES = ("Pad", "Reshape")  # of maps that there are anyway
ELEMENTWISE = {
    "Abs", "Add", "And", "Cast", "Clip", "Div", "Equal", "Erf", "Exp", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
    "Neg", "Not", "Or", "Pow", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Tanh", "Where", "Xor",
}  # fmt: skip
MAPS = {
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "GlobalAveragePool", "MaxPool",
    "Pad", "Reshape",
}  # fmt: skip


def one_by_one(graph: Graph) -> None:
    """Rewrite the graph, if its maps are large and it takes more than one image."""
    images = next(v for v in graph.inputs if v.name == IMAGES)
    front = [] if images.shape[0] == 1 else _front(graph, images.shape[0])
    while front and not _pays(graph, front):
        front.pop()
    if not front:
        return
    scan, inside = _scan(graph, images, front), {id(node) for node in front}
    last = graph.nodes.index(front[-1])
    before = [node for node in graph.nodes[:last] if id(node) not in inside]
    graph.nodes = [*before, scan, *graph.nodes[last + 1 :]]


def _pays(graph: Graph, front: list[Node]) -> bool:
    """Whether there are large maps in it, and all that the rest reads is much smaller.

    A layer with an exact gradient keeps its map for all images anyway.
    """
    made = (n for node in front if node.kind not in COPIES for n in node.outputs)
    most = max((_size(graph.values[name]) for name in made), default=0)
    given = (_size(graph.values[name]) for name in _given(graph, front))
    return most >= LARGE and max(given, default=0) <= SMALLER * most


def _given(graph: Graph, front: list[Node]) -> list[str]:
    """What the rest of the graph reads of these nodes."""
    inside = {id(node) for node in front}
    rest = (node for node in graph.nodes if id(node) not in inside)
    read = {name for node in rest for name in node.inputs} | {v.name for _, v in graph.outputs}
    return [name for node in front for name in node.outputs if name in read]


def _front(graph: Graph, count) -> list[Node]:
    """The nodes up to the last that has to do with a large map; none is of several images."""
    known, front, end = {IMAGES}, [], 0
    for node in graph.nodes:
        if "targets" in node.inputs:
            break
        if known.isdisjoint(node.inputs):
            continue
        if not _per_image(graph, node, known, count):
            break
        front.append(node)
        known.update(node.outputs)
        maps = {*node.inputs, *node.outputs} & known
        if any(_size(graph.values[name]) >= LARGE for name in maps):
            end = len(front)
    return front[:end]


def _per_image(graph: Graph, node: Node, known: set[str], count) -> bool:
    """Whether a node treats every image by itself."""
    values = [graph.values[name] for name in node.outputs]
    of_images = [graph.values[name] for name in node.inputs if name in known]
    if any(not v.shape or v.shape[0] != count for v in (*values, *of_images)):
        return False
    rank = len(values[0].shape)
    others = [graph.values[n] for n in node.inputs if n in graph.values and n not in known]
    if node.kind in ELEMENTWISE:
        return all(len(v.shape) == rank for v in of_images) and all(
            len(v.shape) < rank or v.shape[0] == 1 for v in others
        )
    if node.kind in ("MatMul", "MatMulInteger"):
        own = all(len(v.shape) == rank for v in of_images) and rank > 2
        return own and all(len(v.shape) < rank for v in others)
    if node.domain == BLOCKED or node.kind in MAPS:  # a fourth input is added to the result
        return node.inputs[0] in known and known.isdisjoint(node.inputs[1:3])
    if node.kind in ("Concat", "GatherElements"):
        return node.attributes["axis"] % rank > 0 and len(of_images) == len(node.inputs)
    if node.kind == "Transpose":
        return node.attributes["perm"][0] == 0
    if node.kind in ("ReduceMean", "ReduceSum"):
        return 0 not in graph.constants.get(node.inputs[1], [0])
    return False


def _size(value: Value) -> int:
    """Bytes for one image."""
    return math.prod(value.shape[1:]) * value.dtype.itemsize


def _scan(graph: Graph, images: Value, front: list[Node]) -> Node:
    """The nodes as the body of a Scan, under names of their own."""
    body, given = Graph(prefix=EACH), _given(graph, front)
    names = {name: EACH + name for node in front for name in node.outputs} | {IMAGES: EACH + IMAGES}
    image = body.input(IMAGES + ".0", images.shape[1:], images.dtype)
    whole = graph.constant(np.array([1, *images.shape[1:]]))
    body.nodes = [Node("Reshape", [image.name, whole], [names[IMAGES]], {})]
    for node in front:
        inputs = [names.get(name, name) for name in node.inputs]
        if node.kind == "Reshape" and inputs[1] in graph.constants:  # others keep the first size
            inputs[1] = graph.constant(np.array([1, *graph.constants[inputs[1]][1:]]))
        body.nodes.append(
            replace(node, inputs=inputs, outputs=[names[name] for name in node.outputs])
        )
    for name in given:
        value = graph.values[name]
        out = names[name] + ".0"
        _write_out(graph, body, names[name], out, value.shape[1:])
        body.outputs.append((out, replace(value, name=out, shape=value.shape[1:])))
    own = {image.name, *(name for node in body.nodes for name in node.outputs)}
    read = dict.fromkeys(name for node in body.nodes for name in node.inputs if name)
    body.constants = {EACH + n: graph.constants[n] for n in read if n in graph.constants}
    for node in body.nodes:
        node.inputs = [EACH + n if n in graph.constants else n for n in node.inputs]
    outside = [n for n in read if n not in own and n not in graph.constants]
    return Node("Scan", [IMAGES, *outside], given, {"num_scan_inputs": 1}, body=body)


def _write_out(graph: Graph, body: Graph, name: str, out: str, shape) -> None:
    """Let the body put out a value without its first size of 1.

    Where the node that makes it can do so itself, it writes straight to the Scan's output; a
    Reshape behind it would be a copy.
    """
    [maker] = (node for node in body.nodes if name in node.outputs)
    read = any(name in node.inputs for node in body.nodes)
    makers = {n: node for node in body.nodes for n in node.outputs}
    others = [graph.values[n] for n in maker.inputs if n not in makers and n in graph.values]
    able = maker.kind in (*ELEMENTWISE, "MatMul", "MatMulInteger") and not read
    if not able or any(len(v.shape) > len(shape) for v in others):
        body.nodes.append(Node("Reshape", [name, _sizes(graph, shape)], [out], {}))
        return
    at = body.nodes.index(maker)
    for i, n in enumerate(maker.inputs):
        if n in makers:
            before = makers[n]
            inner = graph.values[n.removeprefix(EACH)].shape[1:]
            source = before.inputs[0] if before.kind == "Reshape" else n
            view = f"{out}.{i}"
            body.nodes.insert(at, Node("Reshape", [source, _sizes(graph, inner)], [view], {}))
            maker.inputs[i] = view
    maker.outputs = [out]


def _sizes(graph: Graph, shape) -> str:
    return graph.constant(np.array(shape, np.int64))

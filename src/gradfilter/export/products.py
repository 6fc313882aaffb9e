"""Sums that have to do with matrix products, written with less work.

A Linear layer with its bias is one Gemm. So is `momentum * buffer + gradient` where the gradient is
a product, that of a Linear or a 1x1 layer, which nothing else reads; and of rows, as products with
one number, any `momentum * buffer + gradient` and `parameter - rate * buffer`.
<gw, w> of a 1x1 layer, w with its gradient g x^T row by row, is <g, y> of its output y = w x,
which for the last, small maps is far less.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
import torch

from gradfilter.export.graph import Graph, Node, Value
from gradfilter.export.inplace import in_order


def accumulate(graph: Graph) -> None:
    """Rewrite such sums, and those with a bias; in float32, of which the factors of a Gemm are."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    readers = _readings(graph)
    for node in graph.nodes:
        [whole, *_] = (graph.values[name] for name in node.outputs)
        if node.kind != "Add" or whole.dtype != torch.float32 or len(whole.shape) != 2:
            continue
        for added, product in (node.inputs, node.inputs[::-1]):
            factors = _factors(graph, makers.get(product), makers)
            if factors is None or readers[product] > 1:
                continue
            buffer, momentum = added, 1.0
            if readers[added] == 1:
                buffer, momentum = _scaled(graph, makers.get(added)) or (added, 1.0)
            if graph.values[buffer].shape in (whole.shape, whole.shape[1:]):
                node.kind, node.inputs = "Gemm", [*factors[0], buffer]
                node.attributes = factors[1] | {"beta": momentum}
                break
    graph.prune()


def by_rows(graph: Graph) -> None:
    """x - number * y of rows, and constant * x + y, as a product added to x; in float32.

    That is one pass and no memory beside; a Mul needs some for all of the row. The result may lie
    where x does, but not where y does.
    """
    makers = {name: node for node in graph.nodes for name in node.outputs}
    readers, inputs = _readings(graph), {v.name for v in graph.inputs}

    def scaled(name: str) -> Node | None:
        """The Mul that makes a value for one reader."""
        maker = makers.get(name)
        return maker if maker is not None and maker.kind == "Mul" and readers[name] == 1 else None

    def lasting(name: str) -> bool:
        return _origin(makers, name) in inputs

    for node in list(graph.nodes):
        result = graph.values[node.outputs[0]]
        row = len(result.shape) == 2 and result.shape[0] == 1
        sides = [graph.values.get(name) for name in node.inputs]
        same = all(s is not None and s.shape == result.shape for s in sides)
        if node.kind not in ("Add", "Sub") or not (row and same) or result.dtype != torch.float32:
            continue
        found = (_less if node.kind == "Sub" else _more)(graph, node.inputs, scaled, lasting)
        if found is not None:
            node.kind, (node.inputs, node.attributes) = "Gemm", found
    graph.nodes = in_order(graph)
    graph.prune()


def _less(graph: Graph, names: list[str], scaled, lasting) -> tuple[list[str], dict] | None:
    """x - number * y: what a Gemm reads for it, and how."""
    parts = _times(graph, scaled(names[1]))
    if parts is None or lasting(parts[0].name):
        return None
    y, number = parts
    less = graph.op("Neg", graph.reshape(number, (1, 1)), shape=(1, 1), dtype=y.dtype)
    return [less.name, y.name, names[0]], {}


def _more(graph: Graph, names: list[str], scaled, lasting) -> tuple[list[str], dict] | None:
    """constant * x + y, where y may have such a factor too."""
    for one, other in (names, names[::-1]):
        if (parts := _scaled(graph, scaled(one))) is None:
            continue
        y, factor = _scaled(graph, scaled(other)) or (other, 1.0)
        if not lasting(y):
            factor = graph.constant(np.full((1, 1), factor, np.float32))
            return [factor, y, parts[0]], {"beta": parts[1]}
    return None


def onto_products(graph: Graph, groups: set[str], keeps: tuple[str, ...], new: str) -> set[str]:
    """Those of the groups whose every memory is a Gemm that adds their gradient to it."""
    made = {name: value.name for name, value in graph.outputs}
    kinds = {name: node.kind for node in graph.nodes for name in node.outputs}
    return {n for n in groups if all(kinds[made[f"{new}{k}.{n}"]] == "Gemm" for k in keeps)}


def _readings(graph: Graph) -> Counter:
    """How often each value is read, or put out."""
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    readers.update(value.name for _, value in graph.outputs)
    return readers


def _origin(makers: dict[str, Node], name: str) -> str:
    """What a value was before it was reshaped."""
    while name in makers and makers[name].kind == "Reshape":
        name = makers[name].inputs[0]
    return name


def _times(graph: Graph, node: Node | None) -> tuple[Value, Value] | None:
    """A value of a product's shape, and the one number that it is multiplied by."""
    if node is None or node.kind != "Mul":
        return None
    for names in (node.inputs, node.inputs[::-1]):
        y, number = (graph.values[name] for name in names)
        if y.shape == graph.values[node.outputs[0]].shape and number.shape == ():
            return y, number
    return None


def _scaled(graph: Graph, node: Node | None) -> tuple[str, float] | None:
    """What is scaled by a constant number, and that number."""
    parts = _times(graph, node)
    if parts is None or parts[1].name not in graph.constants:
        return None
    return parts[0].name, float(graph.constants[parts[1].name])


def _factors(
    graph: Graph, node: Node | None, makers: dict[str, Node]
) -> tuple[list[str], dict] | None:
    """Both sides of a product of two matrices, and how a Gemm is to read them."""
    if node is None:
        return None
    if node.kind == "Gemm" and len(node.inputs) == 2:
        return node.inputs, node.attributes
    if node.kind != "MatMul" or any(len(graph.values[n].shape) != 2 for n in node.inputs):
        return None
    names, attributes = [], {}
    for name, key in zip(node.inputs, ("transA", "transB"), strict=True):
        before, shape = makers.get(name), graph.values[name].shape
        turned = before is not None and before.kind in ("Transpose", "Reshape")
        turned = turned and graph.values[before.inputs[0]].shape == shape[::-1]
        if turned and before.kind == "Reshape":  # of a single row or column
            turned = 1 in shape
        names.append(before.inputs[0] if turned else name)
        attributes[key] = int(turned)
    return names, attributes


def by_outputs(graph: Graph) -> None:
    """<g x^T, w> as <g, w x> where the graph has w x."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    origin = partial(_origin, makers)
    products = {
        (origin(n.inputs[0]), origin(n.inputs[1])): n.outputs[0]
        for n in graph.nodes
        if n.kind == "Conv" and len(n.inputs) == 2 and not n.domain
    }
    for node in list(graph.nodes):
        dots = makers.get(node.inputs[0]) if node.kind == "ReduceSum" else None
        if dots is None or dots.kind != "Mul" or len(graph.values[node.outputs[0]].shape) != 1:
            continue
        gemm, w = makers.get(origin(dots.inputs[0])), origin(dots.inputs[1])
        if gemm is None or gemm.kind != "Gemm" or gemm.attributes != {"transB": 1}:
            continue
        g = graph.values[gemm.inputs[0]]
        y = graph.values.get(products.get((origin(gemm.inputs[1]), w), ""))
        if y is not None and math.prod(y.shape) == math.prod(g.shape):
            product = graph.op("Mul", g, graph.reshape(y, g.shape), like=g)
            node.inputs = [product.name, *node.inputs[1:]]
    graph.nodes = in_order(graph)
    graph.prune()

"""Sums that have to do with matrix products, written with less work.

`momentum * buffer + gradient` is one Gemm where the gradient is a product: a Linear layer's.
<gw, w> of a 1x1 layer, w with its gradient g x^T row by row, is <g, y> of its output y = w x,
which for the last, small maps is far less.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from gradfilter.export.graph import Graph, Node
from gradfilter.export.inplace import in_order


def accumulate(graph: Graph) -> None:
    """Rewrite such sums; in float32, of which the factors of a Gemm are."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    readers.update(value.name for _, value in graph.outputs)
    for node in graph.nodes:
        [whole, *_] = (graph.values[name] for name in node.outputs)
        if node.kind != "Add" or whole.dtype != torch.float32 or len(whole.shape) != 2:
            continue
        for memory, gradient in (node.inputs, node.inputs[::-1]):
            scaled, product = makers.get(memory), makers.get(gradient)
            if scaled is None or product is None or readers[memory] + readers[gradient] > 2:
                continue
            parts, factors = _scaled(graph, scaled), _factors(graph, product, makers)
            if parts is not None and factors is not None:
                buffer, momentum = parts
                node.kind, node.inputs = "Gemm", [*factors[0], buffer]
                node.attributes = factors[1] | {"beta": momentum}
                break
    graph.prune()


def _scaled(graph: Graph, node: Node) -> tuple[str, float] | None:
    """What is scaled by a constant number, and that number."""
    if node.kind != "Mul":
        return None
    for value, number in (node.inputs, node.inputs[::-1]):
        of_output = graph.values[value].shape == graph.values[node.outputs[0]].shape
        if of_output and number in graph.constants and graph.constants[number].ndim == 0:
            return value, float(graph.constants[number])
    return None


def _factors(graph: Graph, node: Node, makers: dict[str, Node]) -> tuple[list[str], dict] | None:
    """Both sides of a product of two matrices, and how a Gemm is to read them."""
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

    def origin(name: str) -> str:
        while name in makers and makers[name].kind == "Reshape":
            name = makers[name].inputs[0]
        return name

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

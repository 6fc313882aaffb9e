"""A graph as an ONNX file: what is not read left out, what can be freed early run early."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from gradfilter.export.arithmetic import ONNX_TYPES
from gradfilter.export.graph import BLOCKED, IR_VERSION, OPSET, Batch, Graph, Node, Value

LARGE = 1024  # bytes of a constant that does not stand in the graph itself
PAGE = 4096


class Constants:
    """A file of constants that several graphs share; equal ones are stored once."""

    def __init__(self, path: Path):
        self.path, self.places, self.size = path, {}, 0
        path.write_bytes(b"")

    def place(self, data: bytes) -> int:
        """Where the data lies in the file."""
        key = hashlib.sha256(data).digest()
        if key not in self.places:
            at = -(-self.size // PAGE) * PAGE  # so that it can be mapped into memory
            with open(self.path, "ab") as file:
                file.write(bytes(at - self.size) + data)
            self.places[key], self.size = at, at + len(data)
        return self.places[key]


def save(graph: Graph, path: Path, store: Constants) -> None:
    """Write a graph; its larger constants go to the store."""
    import onnx

    found = model(graph, path.stem)
    for tensor in found.graph.initializer:
        if len(tensor.raw_data) >= LARGE:
            at = store.place(tensor.raw_data)
            place = {"location": store.path.name, "offset": at, "length": len(tensor.raw_data)}
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            tensor.ClearField("raw_data")
    path.write_bytes(found.SerializeToString())


def model(graph: Graph, name: str):
    """The graph as an onnx.ModelProto."""
    import onnx
    from onnx import helper

    nodes = ordered(graph)
    used = {i for node in nodes for i in node.inputs}
    constants = [
        onnx.numpy_helper.from_array(array, key)
        for key, array in graph.constants.items()
        if key in used
    ]
    written = [
        helper.make_node(n.kind, n.inputs, n.outputs, name=f"{i}", domain=n.domain, **n.attributes)
        for i, n in enumerate(nodes)
    ]
    inputs = [_info(v.name, v) for v in graph.inputs]
    outputs = [_info(key, v) for key, v in graph.outputs]
    body = helper.make_graph(written, name, inputs, outputs, constants)
    opset = [helper.make_opsetid("", OPSET)]
    if any(n.domain == BLOCKED for n in nodes):
        opset.append(helper.make_opsetid(BLOCKED, 1))
    return helper.make_model(
        body, opset_imports=opset, ir_version=IR_VERSION, producer_name="gradfilter"
    )


def _info(name: str, value: Value):
    from onnx import helper

    shape = ["images" if isinstance(s, Batch) else s for s in value.shape]
    return helper.make_tensor_value_info(name, ONNX_TYPES[value.dtype], shape)


def ordered(graph: Graph) -> list[Node]:
    """The nodes that lead to an output, in the order in which they are best run.

    That is the order in which they were written, but for two things. What leads to outputs alone
    (the gradient and the update of a parameter, patch means that only a gradient reads) runs as
    soon as it can, so that what it reads is free. What depends on no image runs when it is needed.
    """
    nodes = _living(graph)
    last = _ends(nodes)
    place = {v.name: -1.0 for v in graph.inputs if v.name == "images"}
    keys: dict[int, float] = {}
    for i, node in enumerate(nodes):
        made = [place[name] for name in node.inputs if name in place]
        if made:
            keys[i] = max(made) + 1e-6 if last[i] and max(made) >= 0 else float(i)
            place |= dict.fromkeys(node.outputs, keys[i])
    by_image = [nodes[i] for i in sorted(keys, key=lambda i: (keys[i], i))]
    makers = {
        name: nodes[i] for i in range(len(nodes)) if i not in keys for name in nodes[i].outputs
    }
    found: list[Node] = []
    for node in by_image:
        _needed(node, makers, found)
        found.append(node)
    for node in list(makers.values()):  # an output that depends on no image: a count of steps
        _needed(Node("", node.outputs, [], {}), makers, found)
    return found


def _needed(node: Node, makers: dict[str, Node], found: list[Node]) -> None:
    """Put before a node what it reads of those that depend on no image."""
    for name in node.inputs:
        maker = makers.get(name)
        if maker is not None:
            for output in maker.outputs:
                makers.pop(output, None)
            _needed(maker, makers, found)
            found.append(maker)


def _living(graph: Graph) -> list[Node]:
    """The nodes that lead to an output."""
    wanted = {key for key, _ in graph.outputs}
    kept: list[Node] = []
    for node in reversed(_renamed(graph)):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _ends(nodes: list[Node]) -> list[bool]:
    """Whether a node leads to outputs alone, through nodes that do."""
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(i)
    found = [False] * len(nodes)
    for i in range(len(nodes) - 1, -1, -1):
        after = [j for name in nodes[i].outputs for j in readers.get(name, ())]
        found[i] = all(found[j] for j in after)
    return found


def _renamed(graph: Graph) -> list[Node]:
    """Nodes that write the outputs under their own names."""
    names = {v.name: key for key, v in graph.outputs}
    return [
        Node(
            n.kind,
            [names.get(i, i) for i in n.inputs],
            [names.get(o, o) for o in n.outputs],
            n.attributes,
            n.domain,
        )
        for n in graph.nodes
    ]


def numpy_type(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def in_place(graph: Graph, names: list[str], new: str) -> bool:
    """Whether each of these inputs is read only on the way to its own new value.

    A runtime may then let the new value overwrite it, in whatever order it runs the nodes.
    """
    nodes = _living(graph)
    makers = {name: node for node in nodes for name in node.outputs}
    readers: dict[str, list[Node]] = {name: [] for name in names}
    for node in nodes:
        for name in node.inputs:
            if name in readers:
                readers[name].append(node)
    return all(_leads(node, makers[new + name], makers) for name in names for node in readers[name])


def _leads(node: Node, to: Node, makers: dict[str, Node]) -> bool:
    """Whether the result of a node is needed for that of another (or is it)."""
    to_see, seen = [to], set()
    while to_see:
        here = to_see.pop()
        if here is node:
            return True
        if id(here) not in seen:
            seen.add(id(here))
            to_see.extend(makers[name] for name in here.inputs if name in makers)
    return False

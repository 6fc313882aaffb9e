"""A graph as an ONNX file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gradfilter.export.arithmetic import ONNX_TYPES
from gradfilter.export.graph import BLOCKED, IR_VERSION, OPSET, Batch, Graph, Node, Value
from gradfilter.export.onebyone import IMAGES
from gradfilter.export.order import ordered

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
    for tensor in _constants_of(found.graph):
        # shapes stay: a runtime reads them before it loads anything
        if len(tensor.raw_data) >= LARGE and tensor.data_type != onnx.TensorProto.INT64:
            at = store.place(tensor.raw_data)
            place = {"location": store.path.name, "offset": at, "length": len(tensor.raw_data)}
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            tensor.ClearField("raw_data")
    path.write_bytes(found.SerializeToString())


def _constants_of(graph) -> Iterator:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from _constants_of(attribute.g)


def model(graph: Graph, name: str):
    """The graph as an onnx.ModelProto."""
    from onnx import helper

    nodes = ordered(graph, _renamed(graph), IMAGES)
    body = helper.make_graph(_written(nodes), name, *_ends(graph), _constants(graph, nodes))
    opset = [helper.make_opsetid("", OPSET)]
    if graph.blocked:
        opset.append(helper.make_opsetid(BLOCKED, 1))
    return helper.make_model(
        body, opset_imports=opset, ir_version=IR_VERSION, producer_name="gradfilter"
    )


def _constants(graph: Graph, nodes: list[Node]) -> list:
    """Those that the nodes read themselves; a body's own are in it, so that it can be optimized."""
    import onnx

    used = {name for node in nodes if node.body is None for name in node.inputs}
    return [onnx.numpy_helper.from_array(a, n) for n, a in graph.constants.items() if n in used]


def _written(nodes: list[Node]) -> list:
    from onnx import helper

    found = []
    for i, n in enumerate(nodes):
        inputs, attributes = n.inputs, n.attributes
        if n.body is not None:  # ONNX does not tell what a body reads from outside
            own = _constants(n.body, n.body.nodes)
            body = helper.make_graph(_written(n.body.nodes), n.kind, *_ends(n.body), own)
            inputs, attributes = inputs[: len(n.body.inputs)], attributes | {"body": body}
        node = helper.make_node(n.kind, inputs, n.outputs, f"{i}", domain=n.domain, **attributes)
        found.append(node)
    return found


def _ends(graph: Graph) -> tuple[list, list]:
    return [_info(v.name, v) for v in graph.inputs], [_info(key, v) for key, v in graph.outputs]


def _info(name: str, value: Value):
    from onnx import helper

    shape = ["images" if isinstance(s, Batch) else s for s in value.shape]
    return helper.make_tensor_value_info(name, ONNX_TYPES[value.dtype], shape)


def _renamed(graph: Graph) -> list[Node]:
    """Nodes that write the outputs under their own names."""
    names = {v.name: key for key, v in graph.outputs}
    return [
        replace(n, **{k: [names.get(i, i) for i in getattr(n, k)] for k in ("inputs", "outputs")})
        for n in graph.nodes
    ]


def numpy_type(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))

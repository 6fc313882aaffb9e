"""An ONNX graph as it is written: values with shapes, nodes in order, constants once each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

OPSET = 18
IR_VERSION = 9  # of 2023, so that runtimes of that age read it
BLOCKED = "com.microsoft.nchwc"  # ONNX Runtime's operators on maps in blocks of channels


@dataclass(frozen=True)
class Batch:
    """A size that is so many times the number of images."""

    times: int = 1


Size = int | Batch
Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Value:
    """A tensor of the graph."""

    name: str
    shape: Shape
    dtype: torch.dtype


Operand = Value | Tensor  # a Tensor is a constant


@dataclass
class Node:
    """One ONNX operator."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict
    domain: str = ""
    body: Graph | None = None  # of a Scan; what that reads from outside is in `inputs` too


class Graph:
    """Nodes in the order in which they are to run; `blocked` allows maps in blocks of channels.

    The names in a body begin with a prefix, or they would hide those outside.
    """

    def __init__(self, blocked: bool = False, prefix: str = ""):
        self.blocked, self.prefix = blocked, prefix
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self.inputs: list[Value] = []
        self.outputs: list[tuple[str, Value]] = []
        self.values: dict[str, Value] = {}  # by name: inputs, constants and what nodes put out
        self.in_blocks: dict[str, Value] = {}  # the same map in blocks, where there is one
        self._by_content: dict[tuple, str] = {}
        self._by_node: dict[tuple, tuple[str, ...]] = {}
        self._reshaped: dict[str, Value] = {}  # what a reshaped value was before
        self._count = 0

    def input(self, name: str, shape: Shape, dtype: torch.dtype) -> Value:
        value = self.values[self.prefix + name] = Value(self.prefix + name, shape, dtype)
        self.inputs.append(value)
        return value

    def output(self, name: str, value: Operand) -> None:
        """Name a result; one that is an input, a constant or another result too is copied."""
        taken = {v.name for v in self.inputs} | {v.name for _, v in self.outputs}
        if isinstance(value, Tensor) or value.name in taken:
            value = self.op("Identity", value, like=value)
        self.outputs.append((name, value))

    def op(
        self,
        kind: str,
        *inputs: Operand | None,
        like: Operand = None,
        shape=None,
        dtype=None,
        **attributes,
    ) -> Value:
        """Add a node of one output, which has the shape and type given, or those of `like`."""
        return self.ops(
            kind,
            *inputs,
            results=[
                (
                    tuple(like.shape if shape is None else shape),
                    like.dtype if dtype is None else dtype,
                )
            ],
            **attributes,
        )[0]

    def ops(
        self, kind: str, *inputs: Operand | None, results: list, domain: str = "", **attributes
    ) -> list[Value]:
        """Add a node of several outputs; one that is there already is not added again."""
        names = ["" if x is None else self.name(x) for x in inputs]
        key = domain, kind, tuple(names), repr(sorted(attributes.items())), len(results)
        if key not in self._by_node:
            outputs = tuple(self._new(kind) for _ in results)
            self.nodes.append(Node(kind, names, list(outputs), attributes, domain))
            self._by_node[key] = outputs
        pairs = zip(self._by_node[key], results, strict=True)
        found = [Value(name, tuple(shape), dtype) for name, (shape, dtype) in pairs]
        self.values |= {v.name: v for v in found}
        return found

    def name(self, x: Operand) -> str:
        return x.name if isinstance(x, Value) else self.constant(x.detach().cpu().numpy())

    def constant(self, array: np.ndarray) -> str:
        """The name of a constant; equal ones are stored once."""
        array = np.array(array, order="C")  # 0-d stays 0-d
        key = array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest()
        if key not in self._by_content:
            name = self._by_content[key] = self._new("constant")
            self.constants[name] = array
            self.values[name] = Value(name, array.shape, torch.from_numpy(array).dtype)
        return self._by_content[key]

    def _new(self, kind: str) -> str:
        self._count += 1
        return f"{self.prefix}{kind.lower()}_{self._count}"

    def body(self) -> Graph:
        """A graph for what is done to one image, to be filled and given to `scan`."""
        return Graph(self.blocked, self._new("each") + ".")

    def scan(self, body: Graph, *inputs: Value) -> list[Value]:
        """The outputs of a body that reads no value from outside, for all images."""
        count = inputs[0].shape[0]
        found = [Value(self._new("scan"), (count, *v.shape), v.dtype) for _, v in body.outputs]
        self.values |= {v.name: v for v in found}
        names = [v.name for v in inputs], [v.name for v in found]
        self.nodes.append(Node("Scan", *names, {"num_scan_inputs": len(inputs)}, body=body))
        return found

    # shapes

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def sizes(self, shape: Shape) -> Operand:
        """A shape as a tensor; it is computed where it depends on the number of images."""
        if all(isinstance(s, int) for s in shape):
            return self.ints(*shape)
        whole = dict(shape=(1,), dtype=torch.int64)
        images = self.op("Shape", self._images(), start=0, end=1, **whole)
        parts = [
            self.ints(s)
            if isinstance(s, int)
            else self.op("Mul", images, self.ints(s.times), **whole)
            for s in shape
        ]
        return self.concat(parts, 0)

    def _images(self) -> Value:
        free = (v for v in self.inputs if v.shape and isinstance(v.shape[0], Batch))
        return next(free)

    def prune(self) -> None:
        """Leave out the nodes that lead to no output."""
        wanted = {value.name for _, value in self.outputs}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if not wanted.isdisjoint(node.outputs):
                wanted.update(node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]

    def reshape(self, x: Operand, shape: Shape) -> Operand:
        if isinstance(x, Tensor):
            return x.reshape(shape)
        x = self._reshaped.get(x.name, x)
        if tuple(x.shape) == tuple(shape):
            return x
        if sum(isinstance(s, Batch) for s in shape) > 1:
            raise ValueError(f"export: a map with two free sizes: {shape}")
        sizes = [-1 if isinstance(s, Batch) else s for s in shape]
        found = self.op("Reshape", x, self.ints(*sizes), shape=shape, dtype=x.dtype)
        self._reshaped[found.name] = x
        return found

    def permute(self, x: Operand, order: list[int]) -> Operand:
        if isinstance(x, Tensor):
            return x.permute(order).contiguous()
        order = [d % len(x.shape) for d in order]
        if order == sorted(order):
            return x
        shape = tuple(x.shape[d] for d in order)
        moved = [d for d in order if x.shape[d] != 1]
        if moved == sorted(moved):  # only sizes of 1 move: no data does
            return self.reshape(x, shape)
        return self.op("Transpose", x, perm=order, shape=shape, dtype=x.dtype)

    def concat(self, parts: list[Operand], axis: int) -> Operand:
        """Tensors one behind the other along an axis, in all other sizes of which they agree."""
        axis %= len(parts[0].shape)
        shapes = [p.shape for p in parts]
        if len({(*s[:axis], *s[axis + 1 :]) for s in shapes}) > 1:
            raise ValueError(f"export: shapes {shapes} cannot be joined along axis {axis}")
        shape = list(shapes[0])
        sizes = [s[axis] for s in shapes]
        if all(isinstance(s, Batch) for s in sizes):
            shape[axis] = Batch(sum(s.times for s in sizes))
        elif any(isinstance(s, Batch) for s in sizes):
            raise ValueError(f"export: shapes {shapes} cannot be joined along axis {axis}")
        else:
            shape[axis] = sum(sizes)
        return self.op("Concat", *parts, axis=axis, shape=tuple(shape), dtype=parts[0].dtype)

    def sum(self, x: Operand, axes: list[int], keep: bool = False, kind="ReduceSum") -> Operand:
        axes = sorted(d % len(x.shape) for d in axes)
        shape = tuple(1 if d in axes else s for d, s in enumerate(x.shape) if keep or d not in axes)
        if all(x.shape[d] == 1 for d in axes):
            return self.reshape(x, shape)
        return self.op(kind, x, self.ints(*axes), keepdims=int(keep), shape=shape, dtype=x.dtype)

    def matmul(self, a: Operand, b: Operand) -> Value:
        lead = broadcast(a.shape[:-2], b.shape[:-2])
        dtype = a.dtype
        return self.op("MatMul", a, b, shape=(*lead, a.shape[-2], b.shape[-1]), dtype=dtype)

    def binary(self, kind: str, a: Operand, b: Operand, dtype=None) -> Operand:
        """An elementwise operator.

        Trailing sizes of 1 are left out for it: ONNX Runtime goes through a tensor in runs as long
        as both sides have in common from the end, and those would be runs of 1.
        """
        shape = broadcast(a.shape, b.shape)
        extra = 0
        while a.shape != b.shape and extra < len(shape) - 1 and shape[-1 - extra] == 1:
            extra += 1
        if extra:
            a, b = (self.reshape(x, x.shape[: max(len(x.shape) - extra, 0)]) for x in (a, b))
        found = self.op(kind, a, b, shape=shape[: len(shape) - extra], dtype=dtype or a.dtype)
        return self.reshape(found, shape)


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of an elementwise operation on two tensors."""
    count = max(len(a), len(b))
    a, b = ((1,) * (count - len(s)) + tuple(s) for s in (a, b))
    for x, y in zip(a, b, strict=True):
        if x != y and x != 1 and y != 1:
            raise ValueError(f"export: shapes {a} and {b} do not go together")
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))

"""From a traced graph to steps: each node becomes a step, joins the step before it, or stays."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from gradfilter.geometry import Geometry
from gradfilter.methods import Method
from gradfilter.region import grid
from gradfilter.region.activations import FUNCTIONS, activation_of
from gradfilter.region.conv import Conv
from gradfilter.region.step import NONE, Act, MaxPool, Step
from gradfilter.region.steps import Add, Chunk, Concat, DropPath, Gate, Pointwise, Pool, Shuffle
from gradfilter.region.trace import IN_PLACE, Refused, drops_paths, hooked, unobserved


@dataclass
class Outside:
    """A node that no region takes: it runs as the traced code says. `why` is for the plan."""

    node: fx.Node
    out: int
    why: str


@dataclass
class Region:
    """Consecutive steps of one method; values it reads from outside, and gives back."""

    method: Method
    steps: list[Step]
    inputs: list[int]
    outputs: list[int]


class Lowering:
    """Walks a graph once; `items` are steps and outside nodes in an order that can run."""

    def __init__(self, root: nn.Module, graph: fx.Graph, seen: Seen):
        self.modules = dict(root.named_modules())
        self.whole: dict[nn.Module, str] = getattr(graph, "whole", {})  # and why
        self.shapes, self.owners = seen.shapes, seen.owners
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        if any(map(self._writes_to_part, graph.nodes)):
            raise Refused(root, "writes to a part of a map that is read again")
        self.memory: dict[int, fx.Node] = {}  # of values
        self.values: dict[fx.Node, int] = {}
        self.items: list[Step | Outside] = []
        self.users: dict[int, int] = {}
        self.chunks: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.inputs: dict[int, object] = {}  # the value of an argument -> its default
        self.varying: set[fx.Node] = set()  # what depends on the input
        self.one_size = False  # whether the program may be another for images of another size
        for node in graph.nodes:
            self._node(node)

    def _node(self, node: fx.Node) -> None:
        if node.op == "placeholder" or not self.varying.isdisjoint(node.all_input_nodes):
            self.varying.add(node)
        if node.op == "placeholder":
            self.inputs[self._value(node)] = node.args[0] if node.args else None
        elif node.op == "output":
            self.output = node.args[0]
        else:
            why = self._step(node)
            if why is not None:
                self.items.append(Outside(node, self._value(node), why))

    def _value(self, node: fx.Node) -> int:
        value = self.values.setdefault(node, len(self.values))
        self.memory.setdefault(value, self.owners[node])
        return value

    def _step(self, node: fx.Node) -> str | None:
        """Take a node into the steps; the reason when that cannot be."""
        if node not in self.varying:
            return "the same for every input"
        if self._mutates(node) and self._read_after(node, node.args[0]):
            return "an in-place operation on a map that is read again"
        if node.op == "call_module":
            return self._module(node, self.modules[node.target])
        if node.op in ("call_function", "call_method"):
            return self._function(node)
        return f"{node.op} {node.target}"

    def _mutates(self, node: fx.Node) -> bool:
        """Whether a node overwrites its first argument."""
        if not node.args or not isinstance(node.args[0], fx.Node):
            return False
        if node.op == "call_module":
            return getattr(self.modules[node.target], "inplace", False)
        name = _name(node)
        in_place = node.target in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        return in_place or _argument(node, 1, "inplace") is True

    def _writes_to_part(self, node: fx.Node) -> bool:
        """Whether a node overwrites a map by way of a view of it, and the map is read again.

        Regions have their maps where they like, and a view of one may be a copy there.
        """
        if not self._mutates(node):
            return False
        x = node.args[0]
        owner, own = self.owners[x], self.place[node]
        older = (n for n, i in self.place.items() if i < own and self.owners[n] is owner)
        return any(self._read_after(node, n) for n in older if n is not x)

    def _read_after(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether x is read after a node."""
        return any(self.place[user] > self.place[node] for user in x.users)

    def _module(self, node: fx.Node, m: nn.Module) -> str | None:
        x = node.args[0] if node.args else None
        if len(node.args) != 1 or not self._is_map(x):
            return f"{type(m).__name__} between"
        if m in self.whole:
            return self.whole[m]
        if hooked(m):
            return f"{type(m).__name__} has hooks"
        act = activation_of(m)
        if isinstance(m, nn.Conv2d):
            return self._conv(node, m, x)
        if isinstance(m, _BatchNorm):
            return self._norm(node, m, x)
        if act is not None:
            return self._act(node, act, x)
        if isinstance(m, nn.Identity) or (isinstance(m, nn.Dropout) and m.p == 0):
            return self._alias(node, x)
        if drops_paths(m):
            return self._add(node, DropPath, x, module=m) if m.training else self._alias(node, x)
        if isinstance(m, nn.AdaptiveAvgPool2d) and m.output_size in (1, (1, 1)):
            return self._add(node, Pool, x)
        if isinstance(m, nn.MaxPool2d) and not m.ceil_mode and not m.return_indices:
            return self._max_pool(node, x, m.kernel_size, m.stride, m.padding, m.dilation)
        return f"{type(m).__name__} between"

    def _function(self, node: fx.Node) -> str | None:
        target, name = node.target, _name(node)
        x, other = _argument(node, 0, "input"), _argument(node, 1, "other")
        if target is operator.getitem and isinstance(x, fx.Node) and x in self.chunks:
            x, chunks = self.chunks[x]
            return self._add(node, Chunk, x, index=other, chunks=chunks)
        if target in (torch.cat, torch.concat) and _argument(node, 1, "dim") == 1:
            maps = _argument(node, 0, "tensors")
            if isinstance(maps, list | tuple) and all(map(self._is_map, maps)):
                return self._add(node, Concat, *maps)
        if not self._is_map(x):
            return f"{name} between"
        if target in FUNCTIONS:
            return self._act(node, (FUNCTIONS[target], 0.0), x)
        if name in ("add", "iadd") and self._is_map(other) and "alpha" not in node.kwargs:
            return self._sum(node, x, other)
        if name in ("mul", "imul") and self._is_map(other):
            return self._gate(node, x, other)
        if name == "chunk" and _argument(node, 2, "dim") == 1 and _taken_apart(node):
            return self._chunk(node, x, _argument(node, 1, "chunks"))
        if name == "channel_shuffle":
            return self._add(node, Shuffle, x, groups=_argument(node, 1, "groups"))
        if name == "adaptive_avg_pool2d" and _argument(node, 1, "output_size") in (1, (1, 1)):
            return self._add(node, Pool, x)
        if name == "mean" and _over_pixels(node):
            return self._add(node, Pool, x)
        return f"{name} between"

    def _is_map(self, node) -> bool:
        shape = self.shapes.get(node) if isinstance(node, fx.Node) else None
        return shape is not None and len(shape) == 4

    def _add(self, node: fx.Node, kind: type[Step], *inputs: fx.Node, **fields) -> None:
        read = tuple(self._value(n) for n in inputs)
        self.items.append(kind(out=self._value(node), inputs=read, **fields))

    def _alias(self, node: fx.Node, x: fx.Node) -> None:
        self.values[node] = self._value(x)
        # the alias stands for x, so x has x's other users and the alias's
        self.users[self.values[node]] = self._users(x) - 1 + len(node.users)

    def _users(self, node: fx.Node) -> int:
        return self.users.get(self._value(node), len(node.users))

    def _producer(self, node: fx.Node, kind: type) -> Step | None:
        """The step that wrote a value nobody else reads, if it is of this kind."""
        if self._users(node) != 1:
            return None
        value = self._value(node)
        later: list[Outside] = []
        for item in reversed(self.items):
            if item.out == value:
                fits = isinstance(item, kind) and not self._overwritten(item, later)
                return item if fits else None
            later += [item] if isinstance(item, Outside) else []
        return None

    def _overwritten(self, step: Step, later: list[Outside]) -> bool:
        """Whether one of these nodes overwrites what the step reads, which must then run before."""
        nodes = [item.node for item in later if self._mutates(item.node)]
        read = {self.memory[value] for value in step.inputs}
        return any(self.owners[node.args[0]] in read for node in nodes)

    def _extend(self, step: Step, node: fx.Node) -> None:
        """The step now writes this node's value, and runs where the node stands."""
        self.items.remove(step)
        self.items.append(step)
        step.out = self._value(node)

    def _conv(self, node: fx.Node, m: nn.Conv2d, x: fx.Node) -> str | None:
        layer = getattr(m, "gf", None)
        if layer is None:
            return f"{type(m).__name__} is not converted"
        if "weight" not in m._parameters:
            return "its weight is computed from other parameters"
        if not grid.takes(layer.method):
            return f"{type(layer.method).__name__} has no patch grid"
        if not isinstance(layer.shape, Geometry) or layer.shape.mode != "zeros":
            return f"{layer.shape.mode} padding"
        return self._add(node, Conv, x, module=m, shape=layer.shape)

    def _norm(self, node: fx.Node, m: nn.Module, x: fx.Node) -> str | None:
        act, drop = getattr(m, "act", None), getattr(m, "drop", None)
        kind = NONE if act is None or isinstance(act, nn.Identity) else activation_of(act)
        if kind is None or not isinstance(drop, nn.Identity | None) or not _usual_norm(m):
            return f"{type(m).__name__} between"
        step = self._producer(x, Conv)
        if step and step.norm is None and step.act == NONE and step.residual is step.pool is None:
            self._extend(step, node)
            step.norm, step.act = m, kind
            return None
        if m.training or m.running_mean is None:
            return "batch norm in training mode after no convolution"
        return self._add(node, Pointwise, x, norm=m, act=kind)

    def _act(self, node: fx.Node, act: Act, x: fx.Node) -> None:
        step = self._producer(x, Conv | Pointwise)
        if step and step.act == NONE and not getattr(step, "pool", None):
            self._extend(step, node)
            step.act = act
        else:
            self._add(node, Pointwise, x, act=act)

    def _sum(self, node: fx.Node, a: fx.Node, b: fx.Node) -> str | None:
        if self.shapes[a] != self.shapes[b]:
            return "a sum of maps of two sizes"
        if not self.varying.issuperset((a, b)):
            return "a sum with a constant, which may be the same for all images"
        self._note_pixels(a, b)
        if self._value(a) == self._value(b):
            return self._add(node, Add, a, b)
        for one, other in ((a, b), (b, a)):
            step = self._producer(one, Conv)
            if step and step.act == NONE and step.residual is None and step.pool is None:
                self._extend(step, node)
                step.residual = self._value(other)
                step.inputs = (*step.inputs, step.residual)
                return None
        return self._add(node, Add, a, b)

    def _note_pixels(self, a: fx.Node, b: fx.Node) -> None:
        """Of two maps of one pixel, either may be the one that has more in larger images."""
        self.one_size |= tuple(self.shapes[a][2:]) == tuple(self.shapes[b][2:]) == (1, 1)

    def _gate(self, node: fx.Node, a: fx.Node, b: fx.Node) -> str | None:
        self._note_pixels(a, b)
        for x, s in ((a, b), (b, a)):
            if tuple(self.shapes[s][1:]) == (self.shapes[x][1], 1, 1):
                return self._add(node, Gate, x, s)
        return "a product of two maps"

    def _chunk(self, node: fx.Node, x: fx.Node, chunks: int) -> None:
        self.chunks[node] = x, chunks
        self.users[self._value(x)] = self._users(x) - 1 + len(node.users)

    def _max_pool(self, node: fx.Node, x: fx.Node, *geometry) -> None:
        pair = [g if isinstance(g, tuple) else (g, g) for g in geometry]
        step = self._producer(x, Conv)
        if step and step.pool is None:
            self._extend(step, node)
            step.pool = MaxPool(*pair)
            return None
        return self._add(node, Pool, x, pool=MaxPool(*pair))


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _argument(node: fx.Node, position: int, name: str):
    """An argument of a call, by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _taken_apart(node: fx.Node) -> bool:
    """Whether every use of a tuple takes one element out of it."""
    return all(u.target is operator.getitem and isinstance(u.args[1], int) for u in node.users)


def _over_pixels(node: fx.Node) -> bool:
    """Whether a mean is over all pixels and keeps their axes."""
    dims, keep = _argument(node, 1, "dim"), _argument(node, 2, "keepdim")
    return isinstance(dims, list | tuple) and sorted(d % 4 for d in dims) == [2, 3] and bool(keep)


def _usual_norm(m: nn.Module) -> bool:
    """Whether a batch norm is PyTorch's own arithmetic, perhaps with timm's activation behind."""
    if isinstance(m, nn.SyncBatchNorm):
        return not m.training
    return type(m).forward is _BatchNorm.forward or type(m).__name__ == "BatchNormAct2d"


@dataclass
class Seen:
    """What a run of a graph showed of its nodes.

    The shapes of tensors, and of nodes that share memory the one that had it first.
    """

    shapes: dict[fx.Node, tuple | None]
    owners: dict[fx.Node, fx.Node]


def seen(root: nn.Module, graph: fx.Graph, example: tuple) -> Seen:
    """Run a graph once and look; nothing else notices."""
    found = Seen({}, {})

    class Watch(fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            found.shapes[n] = tuple(result.shape) if isinstance(result, Tensor) else None
            own = _storages(result)
            shared = (i for i in n.all_input_nodes if own & _storages(self.env[i]))
            found.owners[n] = next((found.owners[i] for i in shared), n)
            return result

    with torch.no_grad(), unobserved(root), torch.random.fork_rng(devices=[]):
        Watch(root, graph=graph).run(*(x.clone() for x in example))
    return found


def _storages(values) -> set[int]:
    """The memory that the tensors in a result have."""
    tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor))
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}


def regions(lowered: Lowering) -> list[Region | Outside]:
    """Join consecutive steps of one method into regions."""
    parts: list[list[Step] | Outside] = []
    for item in lowered.items:
        if isinstance(item, Outside):
            parts.append(item)
            continue
        here = parts[-1] if parts and isinstance(parts[-1], list) else None
        if here is None or not _agree(here, item):
            parts.append([item])
        else:
            here.append(item)
    wanted = set(_leaves(lowered.output, lowered.values))
    result: list[Region | Outside] = []
    for part in reversed(parts):
        if isinstance(part, Outside):
            wanted |= set(_leaves((part.node.args, part.node.kwargs), lowered.values))
            result.append(part)
            continue
        written = {s.out for s in part}
        read = {v for s in part for v in s.inputs} - written
        method = next((m for s in part if (m := _method(s)) is not None), None)
        result.append(Region(method, part, sorted(read), sorted(written & wanted)))
        wanted |= read
    return result[::-1]


def _method(step: Step) -> Method | None:
    return step.module.gf.method if isinstance(step, Conv) else None


def _agree(steps: list[Step], new: Step) -> bool:
    methods = {m for s in (*steps, new) if (m := _method(s)) is not None}
    return len(methods) <= 1


def _leaves(tree, values: dict[fx.Node, int]) -> list[int]:
    found: list[int] = []
    fx.node.map_arg(tree, lambda n: found.append(values[n]))
    return found

"""The engine on a model: its forward pass as regions and what lies outside them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress, repeat
from operator import attrgetter, is_

import torch
from torch import Tensor, fx, nn

from gradfilter.order import evaluating
from gradfilter.region.conv import Conv
from gradfilter.region.lower import Lowering, Outside, Region, regions, seen
from gradfilter.region.plain import Plain
from gradfilter.region.run import Runner
from gradfilter.region.trace import CONSTANT, Refused, called, hooked, hooks_of, trace

TRACING = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
# What a program takes of modules as it was when it was traced; of a dropout, whether it drops.
SETTINGS = ("negative_slope", "alpha", "min_val", "max_val")
DROPS = "p"
LAYER = "gf"
SIMPLE = (bool, int, float, str)
PROGRAMS = 32  # that an engine remembers
_training = attrgetter("training")
_traced: ContextVar[bool] = ContextVar("traced", default=False)


@contextmanager
def traced() -> Iterator[None]:
    """The engine runs although its calls are traced, for a while: its own steps are to be seen."""
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)


class Program:
    """A traced forward pass; runs its regions by the engine, or at the layer level."""

    def __init__(self, root: nn.Module, graph: fx.Graph, example: tuple, fused: bool):
        with evaluating(root):
            found = seen(root, graph, example)
        self.lowered = Lowering(root, graph, found)
        self.root, self.parts, self.fused = root, regions(self.lowered), fused
        self.runners = [
            part
            if isinstance(part, Outside)
            else Runner(part) if fused and part.method is not None else Plain(part)
            for part in self.parts
        ]
        reads = [self._reads(part) for part in (*self.parts, self.lowered.output)]
        last_use = {v: i for i, values in enumerate(reads) for v in values}
        self.spent = [{v for v in values if last_use[v] == i} for i, values in enumerate(reads)]

    def _reads(self, part) -> list[int]:
        if isinstance(part, Region):
            return part.inputs
        found: list[int] = []
        tree = (part.node.args, part.node.kwargs) if isinstance(part, Outside) else part
        fx.node.map_arg(tree, lambda n: found.append(self.lowered.values[n]))
        return found

    def __call__(self, *args):
        values = self.lowered.inputs | dict(zip(self.lowered.inputs, args, strict=False))
        for i, (part, runner) in enumerate(zip(self.parts, self.runners, strict=True)):
            if isinstance(part, Outside):
                values[part.out] = self._call(part.node, values)
            else:
                results = runner([values[v] for v in part.inputs])
                values.update(zip(part.outputs, results, strict=True))
                del results
            for v in self.spent[i]:
                values.pop(v, None)
        return _handed_out(self._fill(self.lowered.output, values), args[0].is_contiguous())

    def _fill(self, tree, values: dict):
        return fx.node.map_arg(tree, lambda n: values[self.lowered.values[n]])

    def _call(self, node: fx.Node, values: dict):
        """Run one node as the traced code says."""
        args, kwargs = self._fill(node.args, values), self._fill(node.kwargs, values)
        if node.op == "call_module":
            return self.root.get_submodule(node.target)(*args, **kwargs)
        if node.op == "call_method":
            # maps are in channels-last order here, and a view may not fit that
            sizes = node.target == "view" and not isinstance(args[1], torch.dtype)
            return getattr(args[0], "reshape" if sizes else node.target)(*args[1:], **kwargs)
        if node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            return getattr(self.root.get_submodule(owner), name)
        return node.target(*args, **kwargs)

    def places(self, name: str = "") -> dict[nn.Module, str]:
        """Where each convolution runs; `name` is that of the part of a model this is."""
        found: dict[nn.Module, str] = {}
        modules = self.lowered.modules
        count = 0
        for part in self.parts:
            if isinstance(part, Outside):
                if part.node.op == "call_module":
                    inside = modules[part.node.target].modules()
                    found |= dict.fromkeys(inside, f"layer level: {part.why}")
            elif part.method is not None:
                count += 1
                region = f"region {count}" + (f" of {name}" if name else "")
                where = region if self.fused else "layer level: engine='layer'"
                found |= {s.module: where for s in part.steps if isinstance(s, Conv)}
        return found


def _handed_out(tree, contiguous: bool):
    """A result as the model's own forward pass gives it, so that its users notice nothing.

    Maps get the memory order they would have, or a view of them might fail; lists and dicts are
    no longer the immutable ones of torch.fx.
    """
    if isinstance(tree, Tensor):
        return tree.contiguous() if contiguous and tree.ndim == 4 else tree
    if isinstance(tree, dict):
        return {key: _handed_out(t, contiguous) for key, t in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [_handed_out(t, contiguous) for t in tree]
        named = hasattr(tree, "_fields")
        return parts if isinstance(tree, list) else type(tree)(*parts) if named else tuple(parts)
    return tree


class Engine:
    """What an engine-run module carries: its programs, by the state its modules are in."""

    def __init__(self, fused: bool):
        self.fused = fused
        self.programs: dict[tuple, Program | str] = {}
        self.modules: list[nn.Module] = []
        # where each module stands: its owner's table, its name there, and it
        self.tables: list[dict] = []
        self.names: list[str] = []
        self.placed: list[nn.Module | None] = []
        self.hooks: list[dict] = []
        # what the modules have: how many children, parameters and buffers, which are None, settings
        self.owned: list[dict] = []
        self.counts: list[int] = []
        self.tensors: tuple[list[dict], list[str]] = [], []
        self.missing: list[bool] = []
        self.layers: tuple[list[dict], list[str]] = [], []
        self.carried: list = []  # what converted layers carry, None for other modules
        self.settings: tuple[list[dict], list[str]] = [], []
        self.drops: tuple[list[dict], list[str]] = [], []
        # what containers have, which may be in a graph or not: by state, which of it is heeded
        self.numbers: tuple[list[dict], list[str]] = [], []
        self.heeded: dict[tuple, list[bool]] = {}
        self.written: dict[tuple, tuple[Program | str, list]] = {}  # by state, and the graph

    def __deepcopy__(self, memo):
        return Engine(self.fused)  # a copy's programs must hold the copy's modules

    def __reduce__(self):
        return Engine, (self.fused,)

    def _look_at(self, root: nn.Module) -> None:
        """Start afresh from the modules that the model has now."""
        self.programs.clear()
        self.modules = list(root.modules())
        self.tables = [m._modules for m in self.modules for _ in m._modules]
        self.names = [name for m in self.modules for name in m._modules]
        self.placed = [child for m in self.modules for child in m._modules.values()]
        self.hooks = [hooks for m in self.modules for hooks in hooks_of(m)]
        tables = [(m._parameters, m._buffers) for m in self.modules]
        self.owned = [m._modules for m in self.modules] + [own for both in tables for own in both]
        self.counts = list(map(len, self.owned))
        self.tensors = _columns([(own, n) for both in tables for own in both for n in own])
        self.missing = self._missing()
        attributes = [vars(m) for m in self.modules]
        self.layers = _columns([(own, LAYER) for own in attributes])
        self.carried = list(map(dict.get, *self.layers))
        known = [(own, n) for own in attributes for n in SETTINGS if n in own]
        self.settings = _columns(known)
        containers = [vars(m) for m in self.modules if not called(m)]
        simple = [(own, n) for own in containers for n, v in own.items() if type(v) in SIMPLE]
        self.numbers = _columns([(own, n) for own, n in simple if n != "training"])
        self.heeded.clear()
        self.written.clear()
        self.drops = _columns([(own, DROPS) for own in attributes if DROPS in own])

    def _missing(self) -> list[bool]:
        """Which parameters and buffers are None."""
        return list(map(is_, map(dict.get, *self.tensors), repeat(None)))

    def _as_seen(self) -> bool:
        """Whether the modules are those that were looked at, with as many parameters each, and no
        part of the model was converted or reverted since.
        """
        # by map, without a line of Python for every module: this is done at every step
        return (
            bool(self.modules)
            and all(map(is_, map(dict.get, self.tables, self.names), self.placed))
            and list(map(len, self.owned)) == self.counts
            and self._missing() == self.missing
            and all(map(is_, map(dict.get, *self.layers), self.carried))
        )

    def program(self, root: nn.Module, args: tuple) -> Program | str:
        """The program for the modules' present modes and hooks, or why there is none."""
        if not self._as_seen():
            self._look_at(root)
        state = len(args), *map(_training, self.modules), *map(dict.get, *self.settings)
        state += tuple(map(bool, map(dict.get, *self.drops)))
        if any(self.hooks):
            state += tuple(map(hooked, self.modules))
        sizes = tuple(tuple(a.shape[2:]) for a in args)
        key = state, self._numbers(state)
        found = self.programs.get(key) or self.programs.get((sizes, key))
        if found is None:
            found = self._made(root, args, (sizes, state))
            one_size = not isinstance(found, str) and found.lowered.one_size
            if len(self.programs) >= PROGRAMS:
                self.programs.clear()
            key = state, self._numbers(state)
            self.programs[(sizes, key) if one_size else key] = found
        return found

    def _numbers(self, state: tuple) -> tuple:
        """The numbers of containers that programs of this state heed."""
        values, heeded = map(dict.get, *self.numbers), self.heeded.get(state)
        return tuple(values) if heeded is None else tuple(compress(values, heeded))

    def _made(self, root: nn.Module, args: tuple, at: tuple) -> Program | str:
        """A program, or the one that there is if the graph is the same: then it does not heed the
        numbers that have changed.
        """
        graph, numbers = _trace(root, len(args)), list(map(dict.get, *self.numbers))
        text = str(graph)
        if CONSTANT not in text and (at, text) in self.written:
            found, before = self.written[at, text]
            heeded = self.heeded.setdefault(at[1], [True] * len(numbers))
            same = [a == b for a, b in zip(numbers, before, strict=True)]
            self.heeded[at[1]] = [a and b for a, b in zip(heeded, same, strict=True)]
            return found
        found = graph if isinstance(graph, str) else _program(root, graph, args, self.fused)
        if len(self.written) >= PROGRAMS:
            self.written.clear()
        self.written[at, text] = found, numbers
        return found


def _columns(pairs: list[tuple[dict, str]]) -> tuple[list[dict], list[str]]:
    return [own for own, _ in pairs], [name for _, name in pairs]


def _trace(root: nn.Module, count: int) -> fx.Graph | str:
    """Trace the module's own forward, not the engine's."""
    swapped = type(root)
    root.__class__ = swapped.gf_original
    try:
        return trace(root, count)
    finally:
        root.__class__ = swapped


def _program(root: nn.Module, graph: fx.Graph, args: tuple, fused: bool) -> Program | str:
    """The program of a graph, or why there is none."""
    try:
        return Program(root, graph, args, fused)
    except Refused as refused:
        return f"not traceable: {refused}"


class Engined:
    """A module whose forward pass the engine runs wherever a gradient is wanted."""

    gf_engine: Engine

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled() or _observed(args) or hasattr(self, "_is_replica"):
            return super().forward(*args, **kwargs)  # a replica of nn.DataParallel is no copy
        if why := unsuitable(args, kwargs):
            warnings.warn(
                f"{type(self).__name__} is {why}, so it runs at the layer level instead of by the "
                "engine: pass its maps, and nothing else, by position",
                stacklevel=2,
            )
            return super().forward(*args, **kwargs)
        program = self.gf_engine.program(self, args)
        return super().forward(*args) if isinstance(program, str) else program(*args)


def _observed(args: tuple) -> bool:
    """Whether this call is compiled, traced or transformed rather than run."""
    if _traced.get():
        return False
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or any(isinstance(a, fx.Proxy) for a in args)  # of a model around this one
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(torch._C._get_dispatch_mode(key) is not None for key in TRACING)
    )


def unsuitable(args, kwargs) -> str | None:
    """Why the engine cannot take a call with these arguments."""
    if kwargs:
        return "called with keyword arguments"
    if not all(isinstance(a, Tensor) and a.ndim == 4 for a in args):
        return "called with what is no [N, C, H, W] tensor"
    return None

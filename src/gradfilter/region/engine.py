"""The engine on a model: its forward pass as regions and what lies outside them."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from gradfilter.order import evaluating
from gradfilter.region.lower import Lowering, Outside, Region, regions, shapes_of
from gradfilter.region.run import Plain, Runner
from gradfilter.region.steps import Conv
from gradfilter.region.trace import trace


class Program:
    """A traced forward pass; runs its regions by the engine, or at the layer level."""

    def __init__(self, root: nn.Module, graph: fx.Graph, example: tuple, fused: bool):
        with evaluating(root):
            shapes = shapes_of(root, graph, example)
        self.lowered = Lowering(root, graph, shapes)
        self.root, self.parts = root, regions(self.lowered)
        self.runners = [
            part
            if isinstance(part, Outside)
            else Runner(part) if fused and part.method is not None else Plain(part)
            for part in self.parts
        ]
        self.last_use: dict[int, int] = {}
        for i, part in enumerate(self.parts):
            for v in self._reads(part):
                self.last_use[v] = i
        for v in self._reads(self.lowered.output):
            self.last_use[v] = len(self.parts)

    def _reads(self, part) -> list[int]:
        if isinstance(part, Region):
            return part.inputs
        found: list[int] = []
        tree = (part.node.args, part.node.kwargs) if isinstance(part, Outside) else part
        fx.node.map_arg(tree, lambda n: found.append(self.lowered.values[n]))
        return found

    def __call__(self, *args):
        values = dict(zip(self.lowered.inputs, args, strict=False))
        for i, (part, runner) in enumerate(zip(self.parts, self.runners, strict=True)):
            if isinstance(part, Outside):
                values[part.out] = self._call(part.node, values)
            else:
                results = runner([values[v] for v in part.inputs])
                values.update(zip(part.outputs, results, strict=True))
                del results
            for v in self._reads(part):
                if self.last_use[v] == i:
                    values.pop(v, None)
        return self._fill(self.lowered.output, values)

    def _fill(self, tree, values: dict):
        return fx.node.map_arg(tree, lambda n: values[self.lowered.values[n]])

    def _call(self, node: fx.Node, values: dict):
        """Run one node as the traced code says."""
        args, kwargs = self._fill(node.args, values), self._fill(node.kwargs, values)
        if node.op == "call_module":
            return self.root.get_submodule(node.target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        if node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            return getattr(self.root.get_submodule(owner), name)
        return node.target(*args, **kwargs)

    def places(self) -> dict[nn.Module, str]:
        """Where each convolution runs."""
        found: dict[nn.Module, str] = {}
        modules = self.lowered.modules
        count = 0
        for part in self.parts:
            if isinstance(part, Outside):
                if part.node.op == "call_module":
                    found[modules[part.node.target]] = f"layer level: {part.why}"
            elif part.method is not None:
                count += 1
                for step in part.steps:
                    if isinstance(step, Conv):
                        found[step.module] = f"region {count}"
        return found


class Engine:
    """What an engine-run module carries: its programs, by the modes of its modules."""

    def __init__(self, fused: bool):
        self.fused = fused
        self.programs: dict[tuple[bool, ...], Program] = {}
        self.modules: list[nn.Module] | None = None

    def __deepcopy__(self, memo):
        return Engine(self.fused)  # a copy's programs must hold the copy's modules

    def __reduce__(self):
        return Engine, (self.fused,)

    def program(self, root: nn.Module, args: tuple) -> Program | str:
        """The program for the modules' present modes, or why there is none."""
        if self.modules is None:
            self.modules = list(root.modules())
        modes = tuple(m.training for m in self.modules)
        if modes not in self.programs:
            graph = _trace(root)
            if isinstance(graph, str):
                return graph
            self.programs[modes] = Program(root, graph, args, self.fused)
        return self.programs[modes]


def _trace(root: nn.Module) -> fx.Graph | str:
    """Trace the module's own forward, not the engine's."""
    swapped = type(root)
    root.__class__ = swapped.gf_original
    try:
        return trace(root)
    finally:
        root.__class__ = swapped


class Engined:
    """A module whose forward pass the engine runs wherever a gradient is wanted."""

    gf_engine: Engine

    def forward(self, *args, **kwargs):
        if not _usable(args, kwargs):
            return super().forward(*args, **kwargs)
        return self.gf_engine.program(self, args)(*args)


def _usable(args: tuple, kwargs: dict) -> bool:
    return (
        torch.is_grad_enabled()
        and not kwargs
        and all(isinstance(a, Tensor) and a.ndim == 4 for a in args)
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
    )

"""A model as a chain: its layers in the order they run, each with what runs before the next one."""

from __future__ import annotations

import copy
from bisect import bisect_right
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradfilter import trial
from gradfilter.convert import Converted, convert
from gradfilter.methods import Exact, Method
from gradfilter.order import execution_order, first_calls
from gradfilter.region.grid import takes


@dataclass(frozen=True)
class Link:
    """One layer. `modules` are itself and what is first called after it, before the next layer.

    `methods` are those of the candidates that it takes; `trainable` says whether its weight was
    trained when we came, `parameters` are its parameters that were, and those of its modules.
    `reads` is the first link that reads the same input: itself, unless branches meet there.
    """

    name: str
    kind: str
    methods: tuple[Method, ...]
    modules: tuple[str, ...]
    trainable: bool
    reads: int
    parameters: tuple[nn.Parameter, ...] = field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters)


class Chain:
    """The links of a model, and copies of it that train all layers by one method.

    The copies share the parameters of `model`, which must be ours alone: what is trained and its
    gradients are the same in all of them.
    """

    def __init__(self, model: nn.Module, example, candidates: tuple[Method, ...]):
        self.model, self.one = model, sized(example, 1)  # one picture makes a program as well
        self.trained = {id(p) for p in model.parameters() if p.requires_grad}
        order = execution_order(model, self.one)
        self.names = {module: name for name, module in model.named_modules()}
        self.exact = self.copy()
        plan = self.entries = convert(self.exact, {"*": Exact()}, example=self.one)
        called = [n for n in plan if model.get_submodule(n) in order]
        self.starts = [order[model.get_submodule(n)] for n in called]
        self.owner = {name: self._link(module, order) for module, name in self.names.items()}
        reads = self._reads(called)
        self.links = [
            self._made(i, name, reads[i], plan, candidates) for i, name in enumerate(called)
        ]
        self.uniforms: dict[Method, nn.Module] = {Exact(): self.exact}
        self.anchoreds: dict[Method, nn.Module] = {}
        # the first link that can run on the grid, and on which grid
        found = ((i, m) for i, x in enumerate(self.links) for m in x.methods if takes(m))
        self.anchor, self.grid = next(found, (None, Exact()))
        self.front = [name for name, i in self.owner.items() if i is None]

    def copy(self) -> nn.Module:
        """A copy of the modules around the same parameters and buffers."""
        shared = [*self.model.parameters(), *self.model.buffers()]
        return copy.deepcopy(self.model, {id(t): t for t in shared})

    def uniform(self, method: Method) -> nn.Module:
        """A copy with the method on every link that takes it, the others exact."""
        if method not in self.uniforms:
            self.uniforms[method] = self._converted(self._taking(method))
        return self.uniforms[method]

    def anchored(self, method: Method) -> nn.Module:
        """As `uniform`, but the anchor has a method of the grid, as in plans that freeze it.

        Then the engine runs the model, and with it what lies between layers of any method.
        """
        if takes(method) or self.anchor is None:
            return self.uniform(method)
        if method not in self.anchoreds:
            own = self._taking(method) | {self.links[self.anchor].name: self.grid}
            self.anchoreds[method] = self._converted(own)
        return self.anchoreds[method]

    def _taking(self, method: Method) -> dict[str, Method]:
        """The method for every link that takes it; a layer that takes none has no entry."""
        layers = ((x, self.exact.get_submodule(x.name)) for x in self.links)
        return {
            x.name: method
            for x, layer in layers
            if method in x.methods and isinstance(layer, Converted)
        }

    def _converted(self, methods: dict[str, Method]) -> nn.Module:
        copied = self.copy()
        convert(copied, methods, example=self.one)
        return copied

    def train(self, chosen: set[int]) -> None:
        """Train these links and nothing else."""
        for p in self.model.parameters():
            p.requires_grad_(False)
            p.grad = None
        for i in chosen:
            for p in self.links[i].parameters:
                p.requires_grad_(True)

    def inside(self, name: str) -> list[int]:
        """The links within a module."""
        prefix = f"{name}." if name else ""
        return [i for i, x in enumerate(self.links) if x.name.startswith(prefix)]

    def _link(self, module: nn.Module, order: dict[nn.Module, int]) -> int | None:
        """The link a module belongs to; None where it runs before the first, or never.

        A module that is never called may be read by the one it is in.
        """
        name = self.names[module]
        while module not in order and name:
            name = name.rpartition(".")[0]
            module = self.model.get_submodule(name)
        if module not in order:
            return None
        i = bisect_right(self.starts, order[module]) - 1
        return None if i < 0 else i

    def _reads(self, names: list[str]) -> list[int]:
        """For each layer the first one that reads the same tensor."""
        calls = first_calls(self.model, self.one)
        inputs = [next(iter((*a, *k.values())), None) for a, k in (
            calls[self.model.get_submodule(n)] for n in names)]  # fmt: skip
        return [next(j for j, x in enumerate(inputs) if x is own) for own in inputs]

    def _made(self, i: int, name: str, reads: int, plan, candidates: tuple[Method, ...]) -> Link:
        layer = self.exact.get_submodule(name)
        ends = i == len(self.starts) - 1
        # as in convert: a Linear layer that ends the network stays exact
        only_exact = not isinstance(layer, Converted) or (ends and plan[name].kind == "linear")
        taken = [] if only_exact else [m for m in candidates if not m.supports(layer.gf.shape.op)]
        modules = tuple(n for n, owner in self.owner.items() if owner == i)
        parameters = [
            p
            for n in modules
            for p in self.model.get_submodule(n).parameters(recurse=False)
            if id(p) in self.trained
        ]
        trainable = plan[name].trained
        methods = tuple(taken) or (Exact(),)
        return Link(name, plan[name].kind, methods, modules, trainable, reads, tuple(parameters))


def sized(example, batch: int):
    """An example or target with so many pictures: its own again and again."""
    first = example if isinstance(example, Tensor) else next(iter(trial.tensors(example)), ())
    count = len(first)

    def change(x: Tensor) -> Tensor:
        if x.ndim == 0 or len(x) != count:
            return x
        return x[torch.arange(batch, device=x.device) % count]

    return trial.mapped(example, change)

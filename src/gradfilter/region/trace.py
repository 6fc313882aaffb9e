"""From a module to a flat graph of calls, by torch.fx; what cannot be traced says why.

A graph does the same at every call. What a forward pass does beside calling things with its input
would be done once, while it is traced, or never: it is found and refused.
"""

from __future__ import annotations

import inspect
import operator
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, fx, nn

from gradfilter.order import contents_kept

# modules that stay one call; everything else is traced into
LEAVES = (
    nn.Conv2d,
    nn.Linear,
    nn.modules.batchnorm._BatchNorm,
    nn.Dropout,
    nn.Identity,
    nn.LayerNorm,
    nn.MultiheadAttention,
)
# functions of other libraries whose body cannot be traced, or is better known by name
WRAPPED = (
    ("torchvision.models.shufflenetv2", "channel_shuffle"),
    ("torchvision.ops.stochastic_depth", "stochastic_depth"),
)
DROP_PATHS = {"StochasticDepth", "DropPath"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MADE_BY_FX = "_tensor_constant"
CONSTANT = "constant_of_the_graph"
IN_PLACE = {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "pow")}


class Refused(Exception):
    """What a module's forward pass does that a graph cannot do again."""

    def __init__(self, module: nn.Module, what: str):
        super().__init__(f"{type(module).__name__} {what}")
        self.module = module


def _in_place(operation: Callable) -> Callable:
    def run(proxy: fx.Proxy, other) -> fx.Proxy:
        return proxy.tracer.create_proxy("call_function", operation, (proxy, other), {})

    return run


class _Proxy(fx.Proxy):
    """A proxy to which `x += y` writes: without a method for it, Python makes it `x = x + y`."""


for _operation in IN_PLACE:
    setattr(_Proxy, f"__{_operation.__name__}__", _in_place(_operation))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # or what is computed from buffers would be computed once

    def __init__(self, functions: tuple, whole: dict[nn.Module, str]):
        super().__init__(autowrap_functions=functions)
        self.whole = whole  # modules that are not traced into, and why
        self.inside: list[nn.Module] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return called(m) or hooked(m) or m in self.whole

    def trace(self, root: nn.Module, defaults: dict) -> fx.Graph:
        self.inside, self.modes = [root], _modes()
        with _watched(root):
            return super().trace(root, defaults)

    def call_module(self, m: nn.Module, forward, args, kwargs):
        if isinstance(m, nn.Sequential) and m not in self.submodule_paths:  # a slice of another
            return forward(*args, **kwargs)
        if self.is_leaf_module(m, ""):
            return super().call_module(m, forward, args, kwargs)
        self.inside.append(m)
        with _watched(m):
            found = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        return found

    def create_proxy(self, *args, **kwargs):
        if _modes() != self.modes:
            raise Refused(self.inside[-1], "switches gradients on or off")
        return super().create_proxy(*args, **kwargs)


def _modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def called(m: nn.Module) -> bool:
    """Whether a module stays one call, whatever its hooks."""
    from_torch = type(m).__module__.startswith("torch.nn.modules")
    return (
        isinstance(m, LEAVES)
        or drops_paths(m)
        or (from_torch and not isinstance(m, nn.Sequential | nn.ModuleList))
        or type(m).__module__.startswith("timm.layers.activations")
    )


def drops_paths(m: nn.Module) -> bool:
    """Whether a module is torchvision's or timm's stochastic depth."""
    known = type(m).__module__.startswith(("torchvision.", "timm."))
    return known and type(m).__name__ in DROP_PATHS


def hooked(m: nn.Module) -> bool:
    """Whether a module has hooks, which run only when it is called."""
    return any(hooks_of(m))


def hooks_of(m: nn.Module) -> tuple[dict, ...]:
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


@contextmanager
def unobserved(root: nn.Module) -> Iterator[None]:
    """No hook runs for a while."""
    modules = [(m, {name: vars(m)[name] for name in HOOKS}) for m in root.modules()]
    for m, _ in modules:
        vars(m).update({name: OrderedDict() for name in HOOKS})
    try:
        yield
    finally:
        for m, own in modules:
            vars(m).update(own)


def trace(module: nn.Module, count: int = 1) -> fx.Graph | str:
    """The graph of a module's forward pass of `count` arguments, or why there is none.

    A part that does what a graph cannot do is one call of it; `graph.whole` says why.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    defaults = {p.name: p.default for p in parameters[count:] if p.default is not p.empty}
    functions = tuple(
        getattr(sys.modules[name], function) for name, function in WRAPPED if name in sys.modules
    )
    whole: dict[nn.Module, str] = {}
    try:
        while True:
            try:
                return _graph(module, defaults, functions, whole)
            except Refused as refused:
                if refused.module is module or refused.module in whole:
                    return f"not traceable: {refused}"
                whole[refused.module] = str(refused)
    except Exception as error:  # fx raises whatever the traced code raises on a proxy
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"not traceable: {first}"


def _graph(module: nn.Module, defaults: dict, functions: tuple, whole: dict) -> fx.Graph:
    tracer = _Tracer(functions, whole)
    with _unswitched(tracer), contents_kept(module):
        try:
            graph = tracer.trace(module, defaults)
            _hold_constants(module, graph)
        finally:
            for name in [n for n in vars(module) if n.startswith(MADE_BY_FX)]:
                del vars(module)[name]
    graph.whole = whole
    return graph


@contextmanager
def _unswitched(tracer: _Tracer) -> Iterator[None]:
    """Gradients on and no autocast, whatever is outside; autocast within is refused."""
    enter = torch.autocast.__enter__

    def refuse(_):
        raise Refused(tracer.inside[-1], "switches autocast on or off")

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        torch.autocast.__enter__ = refuse
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter


@contextmanager
def _watched(module: nn.Module) -> Iterator[None]:
    """Refuse a module that draws random numbers or writes its attributes; put these back."""
    tables = [vars(module), module._parameters, module._buffers, module._modules]
    before = [dict(own) for own in tables]
    drawn, changed = _drawn(), []
    try:
        yield
    finally:
        for own, old in zip(tables, before, strict=True):
            kept = {n: v for n, v in own.items() if n.startswith(MADE_BY_FX)}
            differ = (n for n in {*own, *old} if own.get(n, own) is not old.get(n, old))
            if names := [n for n in differ if n not in kept]:
                changed += names
                own.clear()
                own.update(old | kept)
    if drawn():
        raise Refused(module, "draws random numbers by itself")
    if changed:
        raise Refused(module, f"writes its {changed[0]!r}")


def _drawn() -> Callable[[], bool]:
    """Tells whether random numbers have been drawn since, and puts their sources back."""
    numbers, own, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def found() -> bool:
        now = np.random.get_state()
        torchs = not torch.get_rng_state().equal(numbers)
        others = random.getstate() != own or now[2:] != numpys[2:] or (now[1] != numpys[1]).any()
        torch.set_rng_state(numbers)
        random.setstate(own)
        np.random.set_state(numpys)
        return torchs or bool(others)

    return found


class _Constant:
    """A tensor that no argument had a part in, as a function: it stays no attribute of a module."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.__name__ = tensor, CONSTANT

    def __call__(self) -> Tensor:
        return self.tensor


def _hold_constants(module: nn.Module, graph: fx.Graph) -> None:
    """Put what fx made attributes of the module into the graph."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.target.startswith(MADE_BY_FX):
            tensor = vars(module).get(node.target)
            if not isinstance(tensor, Tensor):
                continue
            if tensor.grad_fn is not None:
                raise Refused(module, "computes with parameters that it does not own")
            if any(_overwrites(user, node) for user in node.users):
                raise Refused(module, "writes to a tensor of its own")
            node.op, node.target = "call_function", _Constant(tensor)


def _overwrites(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node writes to another's tensor."""
    name = getattr(user.target, "__name__", str(user.target))
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name == "setitem" or user.target in IN_PLACE
    return in_place and bool(user.args) and user.args[0] is node

"""From a module to a flat graph of calls, by torch.fx; what cannot be traced says why.

A graph does the same at every call. What a forward pass does beside calling things with its input
would be done once, while it is traced, or never: it is found and refused.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

# modules that stay one call; everything else is traced into
LEAVES = (
    nn.Conv2d,
    nn.Linear,
    nn.modules.batchnorm._BatchNorm,
    nn.Dropout,
    nn.Identity,
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


class _Refused(Exception):
    """What a forward pass does that a graph cannot do again."""


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # or what is computed from buffers would be computed once

    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return called(m) or hooked(m)

    def trace(self, root: nn.Module, defaults: dict) -> fx.Graph:
        self.modes = _modes()
        return super().trace(root, defaults)

    def call_module(self, m: nn.Module, forward, args, kwargs):
        if isinstance(m, nn.Sequential) and m not in self.submodule_paths:  # a slice of another
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(self, *args, **kwargs):
        if _modes() != self.modes:
            raise _Refused("switches gradients or autocast on or off within")
        return super().create_proxy(*args, **kwargs)


def _modes() -> tuple[bool, ...]:
    autocast = map(torch.is_autocast_enabled, ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


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
    """The graph of a module's forward pass of `count` arguments, or why there is none."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    defaults = {p.name: p.default for p in parameters[count:] if p.default is not p.empty}
    functions = tuple(
        getattr(sys.modules[name], function) for name, function in WRAPPED if name in sys.modules
    )
    try:
        with _watched(module):
            graph = _Tracer(autowrap_functions=functions).trace(module, defaults)
            _hold_constants(module, graph)
        return graph
    except Exception as error:  # fx raises whatever the traced code raises on a proxy
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"not traceable: {first}"


@contextmanager
def _watched(module: nn.Module) -> Iterator[None]:
    """Refuse a forward pass that draws random numbers or writes attributes; put these back."""
    tables = [(m, vars(m)) for m in module.modules()]
    tables += [(m, own) for m, _ in tables for own in (m._parameters, m._buffers, m._modules)]
    before = [dict(own) for _, own in tables]
    numbers, own_numbers = torch.get_rng_state(), random.getstate()
    written = None
    try:
        yield
    finally:
        for (m, own), old in zip(tables, before, strict=True):
            changed = [n for n in {*own, *old} if own.get(n, own) is not old.get(n, old)]
            if changed:
                written = f"{type(m).__name__} writes its {changed[0]!r}"
                own.clear()
                own.update(old)
        drawn = random.getstate() != own_numbers or not torch.get_rng_state().equal(numbers)
        torch.set_rng_state(numbers)
        random.setstate(own_numbers)
    if drawn:
        raise _Refused("draws random numbers by itself")
    if written:
        raise _Refused(written)


class _Constant:
    """A tensor that no argument had a part in, as a function: it stays no attribute of a module."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.__name__ = tensor, "constant"

    def __call__(self) -> Tensor:
        return self.tensor


def _hold_constants(module: nn.Module, graph: fx.Graph) -> None:
    """Take what fx put on the module off it again."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.target.startswith(MADE_BY_FX):
            tensor = vars(module).get(node.target)
            if isinstance(tensor, Tensor):
                node.op, node.target = "call_function", _Constant(tensor)
    for name in [n for n in vars(module) if n.startswith(MADE_BY_FX)]:
        del vars(module)[name]

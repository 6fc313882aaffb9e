"""Put methods on the layers of a model, by class swap, and take them off again.

The modules, their Parameters, hooks and state-dict keys stay the same objects; only the class of a
layer changes, to a subclass of its own class with another forward.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradfilter import autograd
from gradfilter.geometry import Geometry, geometry
from gradfilter.layers import ConvOp, LinearOp
from gradfilter.methods import Exact, Method
from gradfilter.order import execution_order
from gradfilter.plan import FROZEN, Entry, Plan

Spec = Method | Mapping[str, Method | str] | Plan
Layers = dict[str, tuple[nn.Module, Geometry | str]]


def convert(model: nn.Module, what: Spec, *, last=None, example=None, norm="frozen") -> Plan:
    """Give the layers of `model` the backward pass of `what`, in place; returns the plan.

    `what` is a method for every layer that it supports, a mapping of name patterns to methods
    (or "frozen"; later patterns override earlier ones), or a Plan. `last=k` trains only the last k
    such layers and what follows them, and freezes every parameter before: counted in execution
    order when an `example` input is given, else in registration order. `norm="frozen"` keeps
    batch-norm statistics fixed even after `model.train()`; "batch" leaves batch norm as it was.

    Converting again replaces the earlier plan.
    """
    _check(model, what, last, norm)
    revert(model)
    layers = _layers(model, example)
    entries, chosen = _entries(layers, what)
    if last is not None:
        if last > len(chosen):
            raise ValueError(f"convert: last={last}, but the model has {len(chosen)} such layers")
        _freeze_front(model, layers[chosen[-last]][0], example)
    for name, (module, shape) in layers.items():
        if not entries[name].trained:
            _freeze(module)
        entries[name] = replace(entries[name], trained=module.weight.requires_grad)
        # frozen layers are swapped too: plain PyTorch keeps the input of a frozen convolution
        if isinstance(shape, Geometry):
            _swap(module, Converted)
            module.gf = Layer(shape, entries[name].method)
    if norm == "frozen":
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                _swap(module, FrozenNorm)
                module.train(module.training)
    return Plan(entries)


def revert(model: nn.Module) -> None:
    """Take every method off `model`: the original classes and frozen flags, exactly."""
    for module in list(model.modules()):
        for name in module.__dict__.pop("gf_froze", ()):
            module.get_parameter(name).requires_grad_(True)
        if isinstance(module, FrozenNorm):
            module.training = module.__dict__.pop("gf_mode")
        if isinstance(module, Swapped):
            module.__dict__.pop("gf", None)
            module.__class__ = module.gf_original


class Layer:
    """What a converted layer carries beside its parameters."""

    def __init__(self, shape: Geometry, method: Method):
        self.shape, self.method = shape, method
        self.state: tuple[Tensor, ...] = ()  # of a warm-started method
        self.before: tuple[Tensor, ...] = ()  # the state the last forward pass started from

    def start(self) -> tuple[Tensor, ...]:
        """The state to start from: a recomputed forward pass starts where the first one did."""
        return self.before if torch._C._current_graph_task_id() != -1 else self.state

    def remember(self, kept: tuple[Tensor, ...]) -> None:
        state = self.method.next_state(kept)
        transformed = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in state)
        if state and not transformed and torch._C._current_graph_task_id() == -1:
            self.before, self.state = self.state, tuple(t.detach() for t in state)


class Swapped:
    """A module whose class was swapped; it pickles and copies by its original class."""

    gf_original: type[nn.Module]

    def __reduce_ex__(self, protocol):
        mixin = next(m for m in (Converted, FrozenNorm) if isinstance(self, m))
        return _rebuild, (self.gf_original, mixin), self.__dict__.copy()


class Converted(Swapped):
    """A layer with another backward pass."""

    gf: Layer

    def forward(self, x: Tensor) -> Tensor:
        single = x.ndim == (3 if isinstance(self.gf.shape.op, ConvOp) else 1)
        x, op = self.gf.shape(x[None] if single else x)
        if self.gf.method.stateful:
            y, kept = autograd.apply(
                op, self.gf.method, x, self.weight, self.bias, self.gf.start()
            )
            self.gf.remember(kept)
        else:
            y, _ = autograd.apply(op, self.gf.method, x, self.weight, self.bias)
        return y[0] if single else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backward={self.gf.method!r}"


class FrozenNorm(Swapped):
    """A batch norm that stays in evaluation mode; remembers the mode it was asked for."""

    def train(self, mode: bool = True):
        self.gf_mode = mode
        return super().train(False)


def _rebuild(original: type[nn.Module], mixin: type) -> nn.Module:
    module = original.__new__(original)
    _swap(module, mixin)
    return module


@lru_cache(maxsize=None)
def _swapped_class(original: type[nn.Module], mixin: type) -> type:
    return type(original.__name__, (mixin, original), {"gf_original": original})


def _swap(module: nn.Module, mixin: type) -> None:
    module.__class__ = _swapped_class(type(module), mixin)


def _check(model: nn.Module, what: Spec, last: int | None, norm: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(what, Method | Mapping):
        raise TypeError(f"convert: give a method, a mapping of patterns or a Plan, got {what!r}")
    if norm not in ("frozen", "batch"):
        raise ValueError(f"convert: norm must be 'frozen' or 'batch', got {norm!r}")
    if last is not None and (not isinstance(last, int) or last < 1):
        raise ValueError(f"convert: last must be a whole number >= 1, got {last!r}")
    for name, module in model.named_modules():
        where = f"layer '{name}'" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"convert: {where} is scripted; convert the nn.Module before scripting")
        if ".quantized." in f"{type(module).__module__}.":
            raise TypeError(
                f"convert: {where} ({type(module).__name__}) is already quantised; "
                "convert the float model"
            )


def _layers(model: nn.Module, example) -> Layers:
    """The convolutions and Linear layers in the order they are counted, with their geometry."""
    inside_attention = {
        child
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
    }
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        if module in inside_attention:
            found[name] = module, "nn.MultiheadAttention reads its weight without calling it"
        else:
            found[name] = module, geometry(module)
    if example is None:
        return found
    order = execution_order(model, example)
    for name, (module, _) in found.items():
        if module not in order:
            found[name] = module, "the example does not reach it"
    return dict(sorted(found.items(), key=lambda item: order.get(item[1][0], -1)))


def _entries(layers: Layers, what: Spec) -> tuple[dict[str, Entry], list[str]]:
    """The entry of every layer, and the names of those that got the method asked for."""
    if isinstance(what, Plan):
        return _replay(layers, what)
    if isinstance(what, Mapping):
        return _match(layers, what)
    entries = {name: _entry(*layer, what) for name, layer in layers.items()}
    entries |= _exact_head(entries)
    chosen = [name for name, e in entries.items() if not e.reason]
    if not chosen:
        reasons = sorted({e.reason for e in entries.values()})
        why = f" ({'; '.join(reasons[:3])})" if reasons else ""
        kind = type(what).__name__
        raise ValueError(f"convert: this model has no layer that {kind} can take{why}")
    return entries, chosen


def _exact_head(entries: dict[str, Entry]) -> dict[str, Entry]:
    """A Linear layer that ends the network is small, new in most fine-tuning, and stays exact."""
    *others, (name, e) = entries.items() or [("", None)]
    if not others or e.kind != LinearOp.kind or e.reason:
        return {}
    return {name: replace(e, method=Exact(), reason="the output layer stays exact")}


def _replay(layers: Layers, plan: Plan) -> tuple[dict[str, Entry], list[str]]:
    """Entries from the plan of an earlier conversion."""
    unknown = [name for name in plan if name not in layers]
    if unknown:
        raise ValueError(f"convert: the plan is of another model: no layer {unknown[0]!r}")
    entries = {name: _entry(*layer, None) for name, layer in layers.items()}
    for name, e in plan.items():
        if not e.reason:
            entries[name] = replace(_entry(*layers[name], e.method, name), trained=e.trained)
        elif not e.trained:
            entries[name] = replace(entries[name], trained=False)
    return entries, list(plan.converted)


def _match(layers: Layers, what: Mapping[str, Method | str]) -> tuple[dict[str, Entry], list[str]]:
    """Entries from name patterns; a layer asked for by its full name must take its method."""
    asked: dict[str, Method | str] = {}
    for pattern, method in what.items():
        if not isinstance(method, Method) and method != FROZEN:
            raise TypeError(f"convert: {pattern!r} must be a method or 'frozen', got {method!r}")
        names = [name for name in layers if name == pattern or fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, layers, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise ValueError(f"convert: {pattern!r} matches no convolution or Linear layer{hint}")
        asked |= dict.fromkeys(names, method)
    entries = {}
    for name, layer in layers.items():
        method = asked.get(name)
        if method == FROZEN:
            entries[name] = replace(_entry(*layer, None), trained=False)
        else:
            entries[name] = _entry(*layer, method, name if name in what else None)
    chosen = [n for n, method in asked.items() if method != FROZEN and not entries[n].reason]
    return entries, [name for name in layers if name in chosen]


def _entry(
    module: nn.Module, shape: Geometry | str, method: Method | None, name: str | None = None
) -> Entry:
    """What a plan says of a layer for which `method` was asked (None: not asked for).

    With a `name` the layer was asked for by name, and must take the method.
    """
    kind = (LinearOp if isinstance(module, nn.Linear) else ConvOp).kind
    trained = module.weight.requires_grad
    reason = shape if isinstance(shape, str) else method.supports(shape.op) if method else None
    if reason and name is not None:
        raise ValueError(f"convert: layer {name!r} cannot have {method!r}: {reason}")
    return Entry(kind, Exact() if reason or not method else method, trained, reason)


def _freeze_front(model: nn.Module, first: nn.Module, example) -> None:
    """Freeze every parameter of what comes before the module `first`."""
    modules = list(model.modules())
    if example is not None:
        order = execution_order(model, example)
        modules.sort(key=lambda m: order.get(m, -1))
    for module in modules[: modules.index(first)]:
        _freeze(module)


def _freeze(module: nn.Module) -> None:
    """Freeze the parameters a module owns itself; `revert` thaws those that were trained."""
    names = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    if names:
        module.__dict__.setdefault("gf_froze", []).extend(names)

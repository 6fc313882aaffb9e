"""Which layer of a model gets which method: from one method, from name patterns, or from a plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.conv import _ConvNd

from gradfilter.geometry import Geometry, geometry, read_by_parent
from gradfilter.layers import ConvOp, LinearOp
from gradfilter.methods import Exact, Method
from gradfilter.plan import FROZEN, Entry, Plan

Spec = Method | Mapping[str, Method | str] | Plan
Layers = dict[str, tuple[nn.Module, Geometry | str]]
Order = dict[nn.Module, int]


def layers_of(model: nn.Module, order: Order | None) -> Layers:
    """The convolutions and Linear layers in the order they are counted, with their geometry."""
    read = {
        parent._modules[child]: f"{type(parent).__name__} reads its weight without calling it"
        for parent in model.modules()
        for child in read_by_parent(parent)
    }
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, _ConvNd | nn.Linear):
            continue
        called = module not in read if order is None else module in order
        shape = geometry(module) if called else read.get(module, "the example does not reach it")
        found[name] = module, shape
    if order is None:
        return found
    return dict(sorted(found.items(), key=lambda item: order.get(item[1][0], -1)))


def entries_of(layers: Layers, what: Spec) -> tuple[dict[str, Entry], list[str], list[str]]:
    """The entry of every layer; which layers got the method asked for; which are to be frozen."""
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
    return entries, chosen, []


def _exact_head(entries: dict[str, Entry]) -> dict[str, Entry]:
    """A Linear layer that ends the network is small, new in most fine-tuning, and stays exact."""
    *others, (name, e) = entries.items() or [("", None)]
    if not others or e.kind != LinearOp.kind or e.reason:
        return {}
    return {name: replace(e, method=Exact(), reason="the output layer stays exact")}


def _replay(layers: Layers, plan: Plan) -> tuple[dict[str, Entry], list[str], list[str]]:
    """Entries from the plan of an earlier conversion."""
    unknown = [name for name in plan if name not in layers]
    if unknown:
        raise ValueError(f"convert: the plan is of another model: no layer {unknown[0]!r}")
    entries = {name: _entry(*layers[name], None) for name in (*plan, *layers)}
    frozen = [name for name in plan.frozen if entries[name].trained]
    for name, e in plan.items():
        if e.reason:
            entries[name] = replace(entries[name], reason=entries[name].reason or e.reason)
        else:
            entries[name] = _entry(*layers[name], e.method, name)
    return entries, list(plan.converted), frozen


def _match(
    layers: Layers, what: Mapping[str, Method | str]
) -> tuple[dict[str, Entry], list[str], list[str]]:
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
    frozen = [name for name, method in asked.items() if method == FROZEN]
    entries = {}
    for name, layer in layers.items():
        method = None if name in frozen else asked.get(name)
        entries[name] = _entry(*layer, method, name if method and name in what else None)
    chosen = [n for n in layers if n in asked and n not in frozen and not entries[n].reason]
    return entries, chosen, frozen


def _entry(
    module: nn.Module, shape: Geometry | str, method: Method | None, name: str | None = None
) -> Entry:
    """What a plan says of a layer for which `method` was asked (None: not asked for).

    With a `name` the layer was asked for by name, and must take the method.
    """
    kind = (LinearOp if isinstance(module, nn.Linear) else ConvOp).kind
    reason = shape if isinstance(shape, str) else method.supports(shape.op) if method else None
    if reason and name is not None:
        raise ValueError(f"convert: layer {name!r} cannot have {method!r}: {reason}")
    return Entry(kind, Exact() if reason or not method else method, is_trained(module), reason)


def is_trained(module: nn.Module) -> bool:
    """Whether the weight is trained, or what it is computed from."""
    if "weight" in module._parameters:
        return module.weight.requires_grad
    return any(p.requires_grad for p in module.parameters())


def modules_before(model: nn.Module, first: nn.Module, order: Order | None) -> list[str]:
    """Names of the modules that come before the module `first`."""
    names = {module: name for name, module in model.named_modules()}
    modules = list(names) if order is None else sorted(names, key=lambda m: order.get(m, -1))
    return [names[module] for module in modules[: modules.index(first)]]

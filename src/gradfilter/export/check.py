"""A trace is searched for exact convolution gradients of layers that are to be filtered."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gradfilter.export.trace import Call, NoForm, Result, Trace
from gradfilter.layers import ConvOp
from gradfilter.methods import Exact, GalerkinFilter, GradientFilter
from gradfilter.methods.method import Method

ANYWHERE = (Exact, GalerkinFilter, GradientFilter)  # methods that any layer can be exported with
BACKWARD = torch.ops.aten.convolution_backward.default
# operators that hand a gradient on: looking back for where it was computed goes through them
HANDED_ON = {
    "alias", "clone", "detach", "copy", "view", "_unsafe_view", "permute", "transpose", "t",
    "expand", "unsqueeze", "squeeze", "mul", "div", "add", "slice", "_to_copy",
}  # fmt: skip


def filtered(model: nn.Module) -> dict[str, Method]:
    """The convolutions of a converted model whose gradients are to be approximate."""
    return {
        name: m.gf.method
        for name, m in model.named_modules()
        if hasattr(m, "gf") and isinstance(m.gf.shape.op, ConvOp)
        if not isinstance(m.gf.method, Exact)
    }


def no_exact_gradient(trace: Trace, model: nn.Module, parameters: list[str], grads: list) -> None:
    """Refuse a trace in which a filtered convolution has an exact gradient after all.

    `grads` are the gradients of `parameters`, the first inputs of the trace.
    """
    names = [f"{name}.weight" for name in filtered(model)]
    inputs = zip(trace.inputs, parameters, strict=False)
    weights = {call: name for call, name in inputs if name in names}
    for call in trace.calls:
        if call.target is BACKWARD and (found := _sources(call.args[2]) & weights.keys()):
            raise ValueError(_told(weights[found.pop()], "its input"))
    for name, grad in zip(parameters, grads, strict=True):
        if name in names and any(call.target is BACKWARD for call in _sources(grad)):
            raise ValueError(_told(name, "it"))


@contextmanager
def naming_methods(model: nn.Module):
    """Say with what has no form in a graph which method it can be due to."""
    try:
        yield
    except NoForm as error:
        for name, m in model.named_modules():
            if error.where not in ("", name):  # of a module that is known, and another one
                continue
            if hasattr(m, "gf") and m.weight.requires_grad and type(m.gf.method) not in ANYWHERE:
                told = f"{error}; layer {name!r} has {m.gf.method!r}: give it another method"
                raise NoForm(told) from error
        raise


def _told(name: str, what: str) -> str:
    return f"export: the plan filters {name}, but the gradient of {what} came out exact"


def _sources(x) -> set[Call]:
    """The calls that a value comes from, past those that hand it on."""
    found, to_see, seen = set(), [x], set()
    while to_see:
        x = to_see.pop()
        if not isinstance(x, Result) or x.call in seen:
            continue
        seen.add(x.call)
        if x.call.name in HANDED_ON:
            to_see.extend(tree_leaves((x.call.args, x.call.kwargs)))
        else:
            found.add(x.call)
    return found

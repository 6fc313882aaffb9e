"""The one autograd function of the layer level: exact forward, the method's backward."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from gradfilter.layers import Op
from gradfilter.methods.method import Kept, Method


class _Layer(torch.autograd.Function):
    """y = op(x, w, b); what the method keeps is returned too, so that transforms can see it."""

    @staticmethod
    def forward(x, w, b, op: Op, method: Method, train_weight: bool, *state):
        kept = method.keep(op, x, state) if train_weight else ()
        # x itself may not be an output as well as an input; its alias may
        return op.forward(x, w, b), *(t.detach() if t is x else t for t in kept)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, _, op, method, _, *_ = inputs
        _, *kept = output
        ctx.op, ctx.method, ctx.x_shape, ctx.count = op, method, tuple(x.shape), len(inputs)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        # w is needed for gx alone, and the first trained layer computes no gx
        ctx.save_for_backward(w if ctx.needs_input_grad[0] else None, *kept)

    @staticmethod
    def backward(ctx, g, *_):
        if g is None:
            return (None,) * ctx.count
        w, *kept = ctx.saved_tensors
        op, method = ctx.op, ctx.method
        with torch.no_grad(), _no_autocast(g):
            gx = gw = gb = None
            filtered = method.filter(op, g)
            if ctx.needs_input_grad[0]:
                gx = method.grad_input(op, filtered, w, ctx.x_shape)
            if ctx.needs_input_grad[1]:
                gw = method.grad_weight(op, filtered, tuple(kept), ctx.x_shape)
            if ctx.needs_input_grad[2]:
                gb = op.grad_bias(g)
        grads = [gx, gw, gb]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = [d if d is None else _Once.apply(d, g, w, repr(method)) for d in grads]
        return *grads, *(None,) * (ctx.count - 3)


class _Once(torch.autograd.Function):
    """A gradient that refuses to be differentiated again; g and w tie it to the graph."""

    @staticmethod
    def forward(d, g, w, method: str):
        return d.view_as(d)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.method = inputs[3]

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            f"double backward through a layer converted to {ctx.method}: the gradient of a "
            "converted layer has no derivative; revert the model first"
        )


def apply(
    op: Op, method: Method, x: Tensor, w: Tensor, b: Tensor | None, state: Kept = ()
) -> tuple[Tensor, Kept]:
    """Run a layer; gives y and what was kept of x (nothing where no gradient is wanted)."""
    x, w, b = _autocast(x, w, b)
    if not x.numel():  # no image: nothing to keep, and gradients that autograd makes of zeros
        return op.forward(x, w, b), ()
    needs = (x, w) if b is None else (x, w, b)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in needs)):
        return op.forward(x, w, b), ()
    with _no_autocast(x):
        y, *kept = _Layer.apply(x, w, b, op, method, w.requires_grad, *state)
    return y, tuple(kept)


def _autocast(x: Tensor, w: Tensor, b: Tensor | None):
    """What autocast would do to a convolution's arguments, done where autograd can see it."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not on or x.dtype == torch.float64:
        return x, w, b
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)


def _no_autocast(t: Tensor):
    """Autocast off, so that a method's own arithmetic keeps the precision it asks for."""
    kind = t.device.type
    if not torch.amp.is_autocast_available(kind):  # the meta device
        return nullcontext()
    return torch.autocast(kind, enabled=False)

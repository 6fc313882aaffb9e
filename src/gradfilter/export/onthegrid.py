"""The kernels of the patch grid: statistics next to their layer, gradients as small products."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.export import convolutions, galerkin, gradientfilter
from gradfilter.export.arithmetic import add, clamp, joined, relu
from gradfilter.export.graph import Operand
from gradfilter.export.statistics import mean, slopes
from gradfilter.export.trace import Result, traced
from gradfilter.kernels.eager import ACTIVATIONS, IDEMPOTENT
from gradfilter.region.grid import _Filtered

FEWER = 2  # how many times, for the passes over it are more
CONVOLUTION = torch.ops.aten.convolution.default


def patch_mean(c, call, x, side):
    return mean(c, x, side)


def epilogue(c, call, y, scale, shift, act, parameter, side, residual, stats):
    """A convolution with what follows it; scale and shift go into its weight and bias."""
    whole = all(min(r, s) == 1 for r, s in zip(side, y.shape[2:], strict=True))
    z = _folded(c, call, y, scale, shift, whole)
    if residual is not None:
        z = add(c, call, z, residual)
    a = activated(c, z, act, parameter)
    read = call.read
    means = mean(c, a, side) if stats and 1 in read else None
    slope = None
    if stats and 2 in read and act != "none":
        if act in IDEMPOTENT:
            slope = slopes(c, a, act, side)
        else:
            slope = mean(c, inlined(c, ACTIVATIONS[act].slope, z, parameter), side)
    return a, means, slope


def _folded(c, call, y, scale, shift, whole: bool) -> Operand:
    """y * scale + shift; `whole` if y is its own patch means."""
    before = call.args[0]
    own = before.call if isinstance(before, Result) else None
    if own is not None and own.target is CONVOLUTION and own.read == {0: 1}:
        x, w, b = (c.value(a) for a in own.args[:3])
        stride, padding, dilation, transposed, _, groups = own.args[3:9]
        if b is None and not transposed:
            x, pads = convolutions.padded(c, own, x, padding)
            if scale is not None and whole and _smaller(y, w, stride):
                y = convolutions.conv(c.graph, x, w, b, stride, pads, dilation, groups, y.shape)
                return _affine(c, y, scale, shift)
            if scale is not None:
                w = times(c, w, c.graph.reshape(scale, (*scale.shape, 1, 1, 1)))
            return convolutions.conv(c.graph, x, w, shift, stride, pads, dilation, groups, y.shape)
    if scale is not None:
        y = joined(c, "Mul", y, c.graph.reshape(scale, (*scale.shape, 1, 1)))
    return y if shift is None else joined(c, "Add", y, c.graph.reshape(shift, (*shift.shape, 1, 1)))


def _smaller(y: Operand, w: Operand, stride) -> bool:
    """Whether there is less to scale in one image's y than in the weight of its 1x1 layer."""
    one = y.shape[0] == 1 and tuple(w.shape[2:]) == tuple(stride) == (1, 1)
    return one and w.shape[1] > FEWER * y.shape[2] * y.shape[3]


def _affine(c, y: Operand, scale: Operand, shift: Operand | None) -> Operand:
    nothing, one = torch.zeros(y.shape[1], dtype=y.dtype), torch.ones(y.shape[1], dtype=y.dtype)
    shift = nothing if shift is None else shift
    return c.graph.op("BatchNormalization", y, scale, shift, nothing, one, epsilon=0.0, like=y)


def times(c, a: Operand, b: Operand) -> Operand:
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return a * b if both else joined(c, "Mul", a, b)


def activated(c, z: Operand, act: str, parameter: float) -> Operand:
    if act == "none":
        return z
    if act == "relu":
        return relu(c, None, z)
    if act == "relu6":
        return clamp(c, None, z, 0.0, 6.0)
    return inlined(c, ACTIVATIONS[act].f, z, parameter)


def inlined(c, f, z: Operand, parameter: float) -> Operand:
    """A pointwise function of PyTorch, written out operator by operator."""
    from gradfilter.export.lower import Lowering

    example = torch.ones((), dtype=z.dtype)  # its shape has no part in the result
    trace = traced(lambda t: (f(t, parameter),), [example])
    return Lowering(c.graph, [], shaped=False).run(trace, [z])[0]


def grid_backward(c, call, g, x, w, number, need_gx, need_gw):
    conv = c.convolutions[number]
    body = gradientfilter if isinstance(conv, _Filtered) else galerkin
    found = body.backward(c, conv, g, x, w, need_gx, need_gw)
    shapes = zip(found, call.shapes, strict=True)
    return tuple(None if t is None else c.graph.reshape(t, shape) for t, shape in shapes)


OPERATORS = {"patch_mean": patch_mean, "epilogue": epilogue, "grid_backward": grid_backward}

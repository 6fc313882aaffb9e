"""The kernels of the patch grid: statistics next to their layer, gradients as small products."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.export import blocked, convolutions, galerkin, gradientfilter
from gradfilter.export.arithmetic import add, cast, clamp, compare, joined, relu
from gradfilter.export.graph import Operand, Value
from gradfilter.export.trace import Result, traced
from gradfilter.kernels.eager import ACTIVATIONS, IDEMPOTENT
from gradfilter.patches import divide_up, patch_area
from gradfilter.region.grid import _Filtered

FEW = 16  # patches a row, up to which a product with all of them is the fastest mean
FEWER = 2  # how many times, for the passes over it are more
ROW = 64  # pixels of a row of patches, below which a product of bytes is slower than a mean
CONVOLUTION = torch.ops.aten.convolution.default


def patch_mean(c, call, x, side):
    return mean(c, x, side)


def mean(c, x: Operand, side) -> Operand:
    """Mean over each patch; patches at the far edges over the pixels they have."""
    size = tuple(x.shape[2:])
    side = [min(r, s) for r, s in zip(side, size, strict=True)]
    if side == [1, 1]:
        return x
    count = tuple(divide_up(s, r) for s, r in zip(size, side, strict=True))
    if _in_blocks(c, x, side):
        return blocked.patch_mean(c.graph, c.graph.in_blocks[x.name], side, x.shape[1])
    if size[0] % side[0] == 0 and count[1] <= FEW:
        return _by_product(c, x, side, count)
    beyond = [n * r - s for n, r, s in zip(count, side, size, strict=True)]
    found = c.graph.op(
        "AveragePool", x, kernel_shape=side, strides=side, pads=[0, 0, *beyond],
        count_include_pad=1, shape=(*x.shape[:2], *count), dtype=x.dtype,
    )  # fmt: skip
    if not any(beyond):
        return found
    like = torch.empty(0, dtype=x.dtype)
    return joined(c, "Mul", found, side[0] * side[1] / patch_area(like, size, count, side))


def _by_product(c, x: Operand, side, count) -> Operand:
    """One matrix product.

    ONNX Runtime's AveragePool takes twice as long, or changes the order in memory first.
    """
    of = _columns(x.shape[3], side, count)
    weight = (of.double() / (of.sum(0) * side[0])).repeat(side[0], 1)
    return c.graph.matmul(_in_patches(c, x, side, count), weight.to(x.dtype))


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
        slope = slopes(c, a if act in IDEMPOTENT else z, act, parameter, side)
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


def slopes(c, x: Operand, act: str, parameter: float, side) -> Operand:
    """Patch means of f' at x; of an idempotent activation x must be f's own output."""
    if act not in IDEMPOTENT:
        return mean(c, inlined(c, ACTIVATIONS[act].slope, x, parameter), side)
    size = tuple(x.shape[2:])
    side = [min(r, s) for r, s in zip(side, size, strict=True)]
    count = [divide_up(s, r) for s, r in zip(size, side, strict=True)]
    if _in_blocks(c, x, side):
        return _slopes_in_blocks(c, x, act, side, count)
    if size[0] % side[0] or count[1] > FEW or side == [1, 1]:
        return mean(c, cast(c, _inside(c, x, act), x.dtype), side)
    inside = cast(c, _inside(c, _in_patches(c, x, side, count), act), torch.uint8)
    of, shape = _columns(size[1], side, count), (*x.shape[:2], *count)
    ones = of.to(torch.int8).repeat(side[0], 1)  # as patch_counts has them
    found = c.graph.op("MatMulInteger", inside, ones, shape=shape, dtype=torch.int32)
    pixels = of.sum(0) * side[0]
    if (pixels == pixels[0]).all():  # one number for all is divided by several times faster
        pixels = pixels[0]
    return joined(c, "Div", cast(c, found, x.dtype), pixels.to(x.dtype))


def _in_blocks(c, x: Operand, side) -> bool:
    """Whether statistics are taken of a map in blocks: where it is, and all patches are whole."""
    whole = not any(s % r for s, r in zip(x.shape[2:], side, strict=True))
    return blocked.holds(c.graph, x) and whole and tuple(side) != (1, 1)


def _slopes_in_blocks(c, x: Value, act: str, side, count) -> Operand:
    inside, width = _inside(c, c.graph.in_blocks[x.name], act), x.shape[3]
    if side[0] * width < ROW or count[1] > FEW:
        return blocked.patch_mean(c.graph, cast(c, inside, x.dtype), side, x.shape[1])
    ones = _columns(width, side, count).T.to(torch.uint8).repeat(1, side[0])
    found = blocked.patch_counts(c.graph, cast(c, inside, torch.int8), ones, count)
    pixels = torch.tensor(side[0] * side[1], dtype=x.dtype)
    return blocked.back(c.graph, joined(c, "Div", cast(c, found, x.dtype), pixels), x.shape[1])


def _inside(c, x: Operand, act: str) -> Operand:
    """Where the slope of a ReLU or ReLU6 is 1, of its output: neither 0 nor 6.

    These are the tests that ONNX Runtime has the fastest kernels for.
    """
    inside = cast(c, x, torch.bool)
    if act == "relu6":
        inside = joined(c, "Xor", inside, compare("Equal")(c, None, x, 6.0))
    return inside


def _in_patches(c, x: Operand, side, count) -> Operand:
    """[N, C, H, W] -> [N, C, rows of patches, their pixels], which lie next to each other."""
    return c.graph.reshape(x, (*x.shape[:2], count[0], side[0] * x.shape[3]))


def _columns(width: int, side, count) -> Tensor:
    """[W, Q]: which column of pixels is of which column of patches."""
    return torch.arange(width)[:, None] // side[1] == torch.arange(count[1])


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

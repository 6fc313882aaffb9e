"""Operators that act element by element, and sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradfilter.export import blocked
from gradfilter.export.graph import Batch, Operand, Value, broadcast


def operand(c, x, like) -> Operand:
    """A number as a constant of the type it is computed in; a tensor as it is."""
    if isinstance(x, Value | Tensor):
        return x
    if isinstance(x, Batch):
        raise ValueError("export: the step computes with the number of images; fix it with batch")
    return torch.tensor(x, dtype=like.dtype)


def cast(c, x: Operand, dtype: torch.dtype) -> Operand:
    if x.dtype == dtype:
        return x
    if isinstance(x, Tensor):
        return x.to(dtype)
    return c.graph.op("Cast", x, to=ONNX_TYPES[dtype], shape=x.shape, dtype=dtype)


ONNX_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float64: 11,
}


def joined(c, kind: str, a, b, dtype=None) -> Operand:
    """A binary operator; both sides get one type. Maps that lie in blocks stay there."""
    like = a if isinstance(a, Value | Tensor) else b
    a, b = operand(c, a, like), operand(c, b, like)
    if dtype is None and (found := blocked.elementwise(c.graph, kind, a, b)) is not None:
        return found
    common = torch.promote_types(a.dtype, b.dtype)
    if 0 in (a.ndim if isinstance(a, Tensor) else 1, b.ndim if isinstance(b, Tensor) else 1):
        common = (b if isinstance(a, Tensor) and a.ndim == 0 else a).dtype
    a, b = cast(c, a, common), cast(c, b, common)
    return c.graph.binary(kind, a, b, dtype)


def unary(kind: str):
    return lambda c, call, x, **_: c.graph.op(kind, x, like=x)


def binary(kind: str):
    return lambda c, call, a, b, **_: joined(c, kind, a, b)


def compare(kind: str):
    return lambda c, call, a, b: joined(c, kind, a, b, torch.bool)


def add(c, call, a, b, alpha=1):
    return joined(c, "Add", a, b if alpha == 1 else joined(c, "Mul", b, alpha))


def sub(c, call, a, b, alpha=1):
    return joined(c, "Sub", a, b if alpha == 1 else joined(c, "Mul", b, alpha))


def rsub(c, call, a, b, alpha=1):
    return sub(c, call, b, a, alpha)


def rsqrt(c, call, x):
    return c.graph.op("Reciprocal", c.graph.op("Sqrt", x, like=x), like=x)


def addcmul(c, call, x, a, b, value=1):
    product = joined(c, "Mul", a, b)
    return add(c, call, x, product) if value == 1 else sub(c, call, x, product, -value)


def div(c, call, a, b, rounding_mode=None):
    if rounding_mode is None and not a.dtype.is_floating_point:
        a = cast(c, a, torch.get_default_dtype())
    found = joined(c, "Div", a, b)
    # whole numbers here are positions and sizes, never negative
    if rounding_mode is None or not found.dtype.is_floating_point:
        return found
    return c.graph.op("Floor", found, like=found)


def remainder(c, call, a, b):
    return joined(c, "Mod", a, b)


def power(c, call, a, b):
    if isinstance(b, int | float) and b == 2:
        return joined(c, "Mul", a, a)
    return joined(c, "Pow", a, b)


def clamp(c, call, x, min=None, max=None):
    ends = [None if e is None else operand(c, e, x) for e in (min, max)]
    inside = None if None in ends else blocked.elementwise(c.graph, "Clip", x, *ends)
    return inside or c.graph.op("Clip", x, *ends, like=x)


def relu(c, call, x):
    return blocked.elementwise(c.graph, "Relu", x) or c.graph.op("Relu", x, like=x)


def where(c, call, condition, a, b):
    common = torch.promote_types(a.dtype, b.dtype)
    if isinstance(a, Tensor) and a.ndim == 0:
        common = b.dtype
    if isinstance(b, Tensor) and b.ndim == 0:
        common = a.dtype
    shape = broadcast(condition.shape, broadcast(a.shape, b.shape))
    a, b = cast(c, a, common), cast(c, b, common)
    return c.graph.op("Where", condition, a, b, shape=shape, dtype=common)


def masked_fill(c, call, x, mask, value):
    return where(c, call, mask, operand(c, value, x), x)


def to_copy(c, call, x, dtype=None, **_):
    return x if dtype is None else cast(c, x, dtype)


def total(c, call, x, axes=None, keepdim=False, dtype=None):
    if dtype is not None or x.dtype == torch.bool:
        x = cast(c, x, dtype or torch.int64)
    axes = axes if axes else range(len(x.shape))
    return c.graph.sum(x, list(axes), keepdim)


def mean(c, call, x, axes=None, keepdim=False, dtype=None):
    axes = axes if axes else range(len(x.shape))
    return c.graph.sum(x, list(axes), keepdim, kind="ReduceMean")


def largest(c, call, x, axes=(), keepdim=False):
    return c.graph.sum(x, list(axes) or range(len(x.shape)), keepdim, kind="ReduceMax")


def var_mean(c, call, x, axes, correction=1, keepdim=False):
    """Variance and mean over axes of known size."""
    graph, axes = c.graph, list(axes)
    centre = graph.sum(x, axes, True, kind="ReduceMean")
    off = joined(c, "Sub", x, centre)
    var = graph.sum(joined(c, "Mul", off, off), axes, keepdim, kind="ReduceMean")
    count = math.prod(x.shape[d] for d in axes)
    if correction:
        var = joined(c, "Mul", var, count / (count - correction))
    return var, centre if keepdim else graph.reshape(centre, var.shape)


def var(c, call, x, axes=None, unbiased=True, keepdim=False, *, correction=None):
    """aten.var in any of its forms."""
    axes = list(axes) if axes else list(range(len(x.shape)))
    correction = int(unbiased) if correction is None else correction
    return var_mean(c, call, x, axes, correction, keepdim)[0]


def std(c, call, x, *args, **kwargs):
    found = var(c, call, x, *args, **kwargs)
    return c.graph.op("Sqrt", found, like=found)


def filled(value):
    def body(c, call, *args, **_):
        given = args[1] if value is None else value
        dtype = call.dtypes[0]
        return expanded(c, torch.tensor(given, dtype=dtype), call.shape)

    return body


def expanded(c, x: Operand, shape) -> Operand:
    """x repeated to that shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    if isinstance(x, Tensor) and all(isinstance(s, int) for s in shape):
        return x.expand(shape).contiguous()
    lead = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
    inner = [d for d, (have, want) in enumerate(zip(lead, shape, strict=True)) if have != want]
    if x.dtype.is_floating_point and inner == [*range(inner[0], len(shape))]:
        sizes = [shape[d] for d in inner]
        if all(isinstance(s, int) for s in sizes):  # a Mul takes several times that, Expand more
            outer = tuple(shape[: inner[0]]) or (1,)
            ones = torch.ones(1, math.prod(sizes), dtype=x.dtype)
            return c.graph.reshape(c.graph.matmul(c.graph.reshape(x, (*outer, 1)), ones), shape)
    # a size of 1 leaves the one that is there
    asked = tuple(1 if have == want else want for have, want in zip(lead, shape, strict=True))
    return c.graph.op("Expand", x, c.graph.sizes(asked), shape=shape, dtype=x.dtype)


def log_softmax(c, call, x, dim, _half):
    """Of maps step by step: down another axis than the last ONNX Runtime's own is slow."""
    if dim % len(x.shape) == len(x.shape) - 1:
        return c.graph.op("LogSoftmax", x, axis=dim, like=x)
    less = joined(c, "Sub", x, c.graph.sum(x, [dim], True, kind="ReduceMax"))
    whole = c.graph.sum(c.graph.op("Exp", less, like=less), [dim], True)
    return joined(c, "Sub", less, c.graph.op("Log", whole, like=whole))


def log_softmax_backward(c, call, g, y, dim, _dtype):
    """g - exp(y) * sum(g)"""
    shares = c.graph.op("Exp", y, like=y)
    return joined(c, "Sub", g, joined(c, "Mul", shares, c.graph.sum(g, [dim], True)))


def softmax(c, call, x, dim, _half):
    return c.graph.op("Softmax", x, axis=dim, like=x)


def hardtanh(c, call, x, low=-1.0, high=1.0):
    return clamp(c, call, x, low, high)


def inside(c, call, g, x, low, high):
    """The gradient of a clip: g where x is strictly inside."""
    both = joined(c, "And", compare("Greater")(c, call, x, low), compare("Less")(c, call, x, high))
    return joined(c, "Mul", g, cast(c, both, g.dtype))


def threshold_backward(c, call, g, x, threshold):
    return joined(c, "Mul", g, cast(c, compare("Greater")(c, call, x, threshold), g.dtype))


OPERATORS = {
    "neg": unary("Neg"),
    "abs": unary("Abs"),
    "exp": unary("Exp"),
    "log": unary("Log"),
    "expm1": lambda c, call, x: joined(c, "Sub", c.graph.op("Exp", x, like=x), 1.0),
    "log1p": lambda c, call, x: c.graph.op("Log", joined(c, "Add", x, 1.0), like=x),
    "sqrt": unary("Sqrt"),
    "rsqrt": rsqrt,
    "reciprocal": unary("Reciprocal"),
    "sigmoid": unary("Sigmoid"),
    "tanh": unary("Tanh"),
    "erf": unary("Erf"),
    "floor": unary("Floor"),
    "sign": unary("Sign"),
    "sgn": unary("Sign"),
    "relu": relu,
    "logical_not": unary("Not"),
    "bitwise_not": unary("Not"),
    "mul": binary("Mul"),
    "add": add,
    "sub": sub,
    "rsub": rsub,
    "div": div,
    "floor_divide": lambda c, call, a, b: div(c, call, a, b, "floor"),
    "remainder": remainder,
    "pow": power,
    "maximum": binary("Max"),
    "minimum": binary("Min"),
    "eq": compare("Equal"),
    "gt": compare("Greater"),
    "ge": compare("GreaterOrEqual"),
    "lt": compare("Less"),
    "le": compare("LessOrEqual"),
    "bitwise_and": binary("And"),
    "logical_and": binary("And"),
    "bitwise_or": binary("Or"),
    "logical_or": binary("Or"),
    "addcmul": addcmul,
    "clamp": clamp,
    "clamp_min": lambda c, call, x, low: clamp(c, call, x, low),
    "hardtanh": hardtanh,
    "hardtanh_backward": inside,
    "threshold_backward": threshold_backward,
    "where": where,
    "masked_fill": masked_fill,
    "_to_copy": to_copy,
    "sum": total,
    "mean": mean,
    "var_mean": var_mean,
    "var": var,
    "std": std,
    "amax": largest,
    "full": filled(None),
    "full_like": filled(None),
    "new_full": lambda c, call, x, size, value, **_: filled(value)(c, call),
    "zeros": filled(0),
    "zeros_like": filled(0),
    "new_zeros": filled(0),
    "ones": filled(1),
    "ones_like": filled(1),
    "new_ones": filled(1),
    "empty": filled(0),
    "empty_like": filled(0),
    "new_empty": filled(0),
    "_log_softmax": log_softmax,
    "_log_softmax_backward_data": log_softmax_backward,
    "_softmax": softmax,
}

# these may act on a vector piece by piece
PIECEWISE = {
    "neg", "abs", "sqrt", "rsqrt", "reciprocal", "mul", "add", "sub", "div", "eq", "gt", "ge",
    "lt", "le", "where", "addcmul", "_to_copy",
}  # fmt: skip

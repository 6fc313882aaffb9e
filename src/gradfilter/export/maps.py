"""Operators on maps: pools, resizing and batch norm.

What is linear along each axis on its own is written as a product with a matrix per axis, whose
transposes give the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.export.arithmetic import joined
from gradfilter.export.graph import Operand, Value


def per_axis(c, x: Value, rows: Tensor, columns: Tensor) -> Operand:
    """rows @ x @ columns.T on every map."""
    rows, columns = rows.to(x.dtype), columns.to(x.dtype)
    if not _identity(columns):
        x = c.graph.matmul(x, columns.T.contiguous())
    return x if _identity(rows) else c.graph.matmul(rows, x)


def _identity(m: Tensor) -> bool:
    return m.shape[0] == m.shape[1] and torch.equal(m, torch.eye(len(m), dtype=m.dtype))


def windows(size: int, out: int, kernel: int, stride: int, padding: int) -> Tensor:
    """[out, size]: 1 where a window has a pixel."""
    start = torch.arange(out)[:, None] * stride - padding
    i = torch.arange(size)
    return ((i >= start) & (i < start + kernel)).double()


def pool_matrices(
    size, out, kernel, stride=None, padding=0, ceil=False, count_pad=True, divisor=None
):
    """The matrix of an average pool along each axis."""
    kernel, stride, padding = (_pair(v) for v in (kernel, stride or kernel, padding))
    found = []
    for i in (0, 1):
        m = windows(size[i], out[i], kernel[i], stride[i], padding[i])
        if divisor is not None:
            area = torch.full((out[i], 1), float(divisor) if i == 0 else 1.0).double()
        elif count_pad:
            start = torch.arange(out[i])[:, None] * stride[i] - padding[i]
            area = (start + kernel[i]).clamp(max=size[i] + padding[i]) - start
        else:
            area = m.sum(1, keepdim=True)
        found.append(m / area)
    return found


def avg_pool(
    c, call, x, kernel, stride=(), padding=(0, 0), ceil=False, count_pad=True, divisor=None
):
    size, out = x.shape[2:], call.shape[2:]
    kernel, stride, padding = (_pair(v) for v in (kernel, stride or kernel, padding))
    inside = all(
        (o - 1) * s + k <= n + 2 * p
        for n, o, k, s, p in zip(size, out, kernel, stride, padding, strict=True)
    )
    if not inside or (divisor is not None and any(padding)):
        matrices = pool_matrices(size, out, kernel, stride, padding, ceil, count_pad, divisor)
        return per_axis(c, x, *matrices)
    mean = c.graph.op(
        "AveragePool", x, kernel_shape=list(kernel), strides=list(stride), pads=[*padding] * 2,
        count_include_pad=int(count_pad), shape=call.shape, dtype=x.dtype,
    )  # fmt: skip
    ratio = 1 if divisor is None else kernel[0] * kernel[1] / divisor
    return mean if ratio == 1 else joined(c, "Mul", mean, ratio)


def avg_pool_backward(c, call, g, x, kernel, stride, padding, ceil, count_pad, divisor):
    matrices = pool_matrices(
        x.shape[2:], g.shape[2:], kernel, stride, padding, ceil, count_pad, divisor
    )
    return per_axis(c, g, *(m.T for m in matrices))


def adaptive_matrices(size, out) -> list[Tensor]:
    found = []
    for n, o in zip(size, out, strict=True):
        m = torch.zeros(o, n, dtype=torch.float64)
        for i in range(o):
            start, end = i * n // o, -(-(i + 1) * n // o)
            m[i, start:end] = 1 / (end - start)
        found.append(m)
    return found


def adaptive_pool(c, call, x, out):
    return per_axis(c, x, *adaptive_matrices(x.shape[2:], call.shape[2:]))


def adaptive_pool_backward(c, call, g, x):
    return per_axis(c, g, *(m.T for m in adaptive_matrices(x.shape[2:], g.shape[2:])))


def bilinear_matrices(size, out, align: bool, scales) -> list[Tensor]:
    resize = torch.ops.aten.upsample_bilinear2d.default
    return [
        resize(torch.eye(n).double()[None, :, :, None], [o, 1], align, scale, None)[0, :, :, 0].T
        for n, o, scale in zip(size, out, scales, strict=True)
    ]


def bilinear(c, call, x, size, align, scale_h=None, scale_w=None):
    scales = (scale_h, scale_w)
    if isinstance(scale_h, list | tuple):  # the form that has one list of both
        scales = tuple(scale_h)
    matrices = bilinear_matrices(x.shape[2:], call.shape[2:], align, scales)
    return per_axis(c, x, *matrices)


def bilinear_backward(c, call, g, out, size, align, scale_h=None, scale_w=None):
    matrices = bilinear_matrices(call.shape[2:], g.shape[2:], align, (scale_h, scale_w))
    return per_axis(c, g, *(m.T for m in matrices))


def nearest_matrices(size, out, scales) -> list[Tensor]:
    resize = torch.ops.aten.upsample_nearest2d.default
    return [
        resize(torch.eye(n).double()[None, :, :, None], [o, 1], scale, None)[0, :, :, 0].T
        for n, o, scale in zip(size, out, scales, strict=True)
    ]


def nearest(c, call, x, size, scale_h=None, scale_w=None):
    scales = tuple(scale_h) if isinstance(scale_h, list | tuple) else (scale_h, scale_w)
    return per_axis(c, x, *nearest_matrices(x.shape[2:], call.shape[2:], scales))


def nearest_backward(c, call, g, out, size, scale_h=None, scale_w=None):
    matrices = nearest_matrices(call.shape[2:], g.shape[2:], (scale_h, scale_w))
    return per_axis(c, g, *(m.T for m in matrices))


def max_pool(c, call, x, kernel, stride=(), padding=0, dilation=1, ceil=False):
    kernel, padding, dilation = (_pair(v) for v in (kernel, padding, dilation))
    stride = _pair(stride or kernel)
    g, shape = c.graph, call.shape
    window = dict(
        kernel_shape=list(kernel), strides=list(stride), pads=[*padding, *padding],
        dilations=list(dilation), ceil_mode=int(ceil),
    )  # fmt: skip
    if 1 not in call.read:
        return g.op("MaxPool", x, shape=shape, dtype=x.dtype, **window), None
    results = [(shape, x.dtype), (shape, torch.int64)]
    y, place = g.ops("MaxPool", x, results=results, **window)
    # ONNX counts through all maps, PyTorch within each
    return y, joined(c, "Mod", place, x.shape[2] * x.shape[3])


def max_pool_backward(c, call, grad, x, kernel, stride, padding, dilation, ceil, place):
    from gradfilter.export.arithmetic import expanded

    g = c.graph
    n, channels, height, width = x.shape
    zeros = expanded(c, torch.zeros((1, 1, 1), dtype=x.dtype), (n, channels, height * width))
    flat = (n, channels, grad.shape[2] * grad.shape[3])
    place, grad = g.reshape(place, flat), g.reshape(grad, flat)
    gx = g.op("ScatterElements", zeros, place, grad, axis=2, reduction="add", like=zeros)
    return g.reshape(gx, x.shape)


def batch_norm(c, call, x, gamma, beta, mean, var, training, momentum, eps):
    """Batch norm with fixed statistics; nothing else comes here."""
    if training or mean is None:
        raise ValueError(
            "export: batch norm must have fixed statistics: convert with norm='frozen'"
        )
    ones = torch.ones_like(mean)
    gamma = ones if gamma is None else gamma
    beta = torch.zeros_like(mean) if beta is None else beta
    # an attribute is a float32, so epsilon is added to the variance here
    y = c.graph.op("BatchNormalization", x, gamma, beta, mean, var + eps, epsilon=0.0, like=x)
    return y, None, None


def batch_norm_backward(
    c, call, g, x, gamma, mean, var, saved_mean, saved_rstd, training, eps, wanted
):
    read, rstd = call.read, torch.rsqrt(var + eps)
    scale = rstd if gamma is None else joined(c, "Mul", gamma, rstd)
    gx = ggamma = gbeta = None
    if 0 in read:
        column = c.graph.reshape(scale, (*scale.shape, 1, 1))
        gx = joined(c, "Mul", g, column)
    if 1 in read or 2 in read:
        gbeta = c.graph.sum(g, [0, 2, 3])
    if 1 in read:
        dots = c.graph.sum(joined(c, "Mul", g, x), [0, 2, 3])
        ggamma = joined(c, "Mul", joined(c, "Sub", dots, joined(c, "Mul", gbeta, mean)), rstd)
    return gx, ggamma, gbeta


def _pair(v) -> tuple[int, int]:
    v = list(v) if isinstance(v, list | tuple) else [v]
    return tuple(v * 2) if len(v) == 1 else tuple(v)


OPERATORS = {
    "avg_pool2d": avg_pool,
    "avg_pool2d_backward": avg_pool_backward,
    "_adaptive_avg_pool2d": adaptive_pool,
    "_adaptive_avg_pool2d_backward": adaptive_pool_backward,
    "upsample_bilinear2d": bilinear,
    "upsample_bilinear2d_backward": bilinear_backward,
    "upsample_nearest2d": nearest,
    "upsample_nearest2d_backward": nearest_backward,
    "max_pool2d_with_indices": max_pool,
    "max_pool2d_with_indices_backward": max_pool_backward,
    "native_batch_norm": batch_norm,
    "_native_batch_norm_legit_no_training": lambda c, call, x, w, b, m, v, momentum, eps: (
        batch_norm(c, call, x, w, b, m, v, False, momentum, eps)
    ),
    "native_batch_norm_backward": batch_norm_backward,
}

"""Convolutions and their exact gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradfilter.export import blocked
from gradfilter.export.arithmetic import operand
from gradfilter.export.graph import Batch, Graph, Operand, Value
from gradfilter.export.trace import Result
from gradfilter.layers import ConvOp

PAD = torch.ops.aten.constant_pad_nd.default
LARGE = 2**16  # elements of a weight that is read ahead


def padded(c, call, x, padding) -> tuple[Operand, list[int]]:
    """The input of a convolution before zeros were put around it, and all pads of the convolution.

    A padding that is not symmetric is an operator of its own in PyTorch, and a copy of the map.
    """
    pads = [*padding, *padding]
    before = call.args[0]
    if not isinstance(before, Result) or before.call.target is not PAD:
        return x, pads
    inner, amounts, *value = before.call.args
    if any(value) or min(amounts) < 0 or len(amounts) != 4:
        return x, pads
    left, right, top, bottom = amounts
    extra = [top, left, bottom, right]
    return c.value(inner), [p + e for p, e in zip(pads, extra, strict=True)]


def convolution(c, call, x, w, b, stride, padding, dilation, transposed, extra, groups):
    if len(w.shape) != 4:
        raise ValueError("export: a convolution that is not of two dimensions is not supported")
    if transposed:
        return _transposed(c, call, x, w, b, stride, padding, dilation, extra, groups)
    x, pads = padded(c, call, x, padding)
    return conv(c.graph, x, w, b, stride, pads, dilation, groups, call.shape)


def conv(graph: Graph, x, w, b, stride, pads, dilation, groups, shape) -> Operand:
    """`pads` are [top, left, bottom, right]."""
    how = dict(
        kernel_shape=list(w.shape[2:]), pads=list(pads), strides=list(stride),
        dilations=list(dilation), group=groups,
    )  # fmt: skip
    if blocked.fits(graph, w, groups):
        return blocked.depthwise(graph, x, w, b, shape, **how)
    if blocked.fits_dense(graph, x, w, pads, groups, shape):
        return blocked.dense(graph, x, w, b, shape, **how)
    bias = () if b is None else (b,)
    return graph.op("Conv", x, w, *bias, shape=shape, dtype=x.dtype, **how)


def _transposed(c, call, x, w, b, stride, padding, dilation, extra, groups):
    return c.graph.op(
        "ConvTranspose", x, w, *(() if b is None else (b,)), kernel_shape=list(w.shape[2:]),
        pads=[*padding, *padding], strides=list(stride), dilations=list(dilation), group=groups,
        output_padding=list(extra), shape=call.shape, dtype=x.dtype,
    )  # fmt: skip


def backward(c, call, g, x, w, bias, stride, padding, dilation, transposed, extra, groups, mask):
    """The exact gradients at x, w and b."""
    if transposed:
        raise ValueError("export: the gradient of a transposed convolution is not supported")
    read = call.read
    pads = (padding[0], padding[0], padding[1], padding[1])
    op = ConvOp(tuple(w.shape[2:]), tuple(stride), pads, tuple(dilation), groups)
    gx = grad_input(c, op, g, w, x.shape) if 0 in read else None
    gw = grad_weight(c, op, g, operand(c, x, g), w.shape) if 1 in read else None
    gb = c.graph.sum(g, [0, 2, 3]) if 2 in read else None
    return gx, gw, gb


def grad_input(c, op: ConvOp, g: Operand, w: Operand, x_shape) -> Operand:
    """A transposed convolution, or for a 1x1 layer a product.

    A depthwise layer of stride 1 whose maps may lie in blocks is a convolution backwards.
    """
    if op.pointwise and op.stride == (1, 1) and op.groups == 1:
        n, o, height, width = g.shape
        return c.graph.reshape(across(c.graph, g, w), x_shape)
    kh, kw = op.kernel
    inside = all(p < k for p, k in zip(op.padding, (kh, kh, kw, kw), strict=True))
    if inside and blocked.fits(c.graph, w, op.groups) and op.stride == op.dilation == (1, 1):
        return slid(c, op, g, w, torch.eye(kh * kw, dtype=g.dtype))
    top, bottom, left, right = op.padding
    after = [
        size - ((out - 1) * s - sum(pads) + d * (k - 1) + 1)
        for size, out, s, pads, d, k in zip(
            x_shape[2:], g.shape[2:], op.stride, ((top, bottom), (left, right)), op.dilation,
            op.kernel, strict=True,
        )
    ]  # fmt: skip
    return c.graph.op(
        "ConvTranspose", g, w, kernel_shape=list(op.kernel), strides=list(op.stride),
        pads=[top, left, bottom, right], dilations=list(op.dilation), group=op.groups,
        output_padding=after, shape=tuple(x_shape), dtype=g.dtype,
    )  # fmt: skip


def across(graph: Graph, g: Operand, w: Operand) -> Value:
    """w^T g at every pixel: [N, O, P, Q], [O, C, 1, 1] -> [N, C, P * Q]"""
    n, out, *size = g.shape
    pixels, taps = size[0] * size[1], graph.reshape(w, tuple(w.shape[:2]))
    if n == 1:  # a Gemm takes the weight as it lies, and less time than a product of many
        found = graph.op(
            "Gemm", taps, graph.reshape(g, (out, pixels)), *_read_ahead(graph, taps), transA=1,
            beta=0.0, shape=(taps.shape[1], pixels), dtype=g.dtype,
        )  # fmt: skip
        return graph.reshape(found, (1, taps.shape[1], pixels))
    return graph.matmul(graph.permute(taps, [1, 0]), graph.reshape(g, (n, out, pixels)))


def _read_ahead(graph: Graph, w: Operand) -> tuple[Value, ...]:
    """A number of a large weight that a Gemm takes and leaves alone.

    To have it the weight is read from one end to the other, which brings it near the processor.
    The Gemm itself goes down its columns, and would wait for every line of it.
    """
    if graph.blocked and isinstance(w, Value) and math.prod(w.shape) >= LARGE:
        return (graph.sum(w, [0, 1], keep=True, kind="ReduceMax"),)
    return ()


def slid(c, op: ConvOp, g: Operand, w: Operand, mix: Tensor) -> Operand:
    """A depthwise convolution of stride 1 backwards: a convolution with its taps in reverse order.

    Its taps are those of w, mixed. [taps of w, taps of the convolution]
    """
    graph, channels = c.graph, w.shape[0]
    rows = graph.reshape(w, (channels, len(mix)))
    turned = graph.matmul(rows, mix.to(g.dtype).flip(1))
    turned = graph.reshape(turned, (channels, 1, *op.kernel))
    top, bottom, left, right = op.padding
    kh, kw = op.kernel
    pads = [kh - 1 - top, kw - 1 - left, kh - 1 - bottom, kw - 1 - right]
    size = [g.shape[2 + i] + pads[i] + pads[2 + i] - op.kernel[i] + 1 for i in (0, 1)]
    return conv(graph, g, turned, None, (1, 1), pads, (1, 1), channels, (*g.shape[:2], *size))


def grad_weight(c, op: ConvOp, g: Operand, x: Operand, w_shape) -> Operand:
    """[O, C / groups, kh, kw]"""
    if op.pointwise and op.stride == (1, 1) and op.groups == 1:
        return c.graph.reshape(product(c, g, x), w_shape)
    if op.groups == 1:
        return _by_convolution(c, op, g, x, w_shape)
    if not op.groups == w_shape[0] == x.shape[1]:
        return _by_taps(c, op, g, x, w_shape)
    if not isinstance(g.shape[0], Batch):
        return _by_own_convolutions(c.graph, op, g, x, w_shape)
    return (_by_images if slides_in_blocks(c, g) else _by_taps)(c, op, g, x, w_shape)


def slides_in_blocks(c, g: Operand) -> bool:
    """Whether the maps of a depthwise layer can slide over their own g in blocks."""
    n, channels = g.shape[:2]
    maps = channels if isinstance(n, Batch) else n * channels
    return blocked.fits(c.graph, Value("", (maps, 1, *g.shape[2:]), g.dtype), maps)


def _by_images(c, op: ConvOp, g, x, w_shape):
    """One image after the other: so many groups a convolution has, and not as many as there are."""
    body = c.graph.body()
    maps = [
        body.reshape(body.input(name, t.shape[1:], t.dtype), (1, *t.shape[1:]))
        for name, t in (("g", g), ("x", x))
    ]
    gw = _by_own_convolutions(body, op, *maps, w_shape)
    body.outputs.append((gw.name, gw))
    [each] = c.graph.scan(body, g, x)
    return c.graph.sum(each, [0])


def product(c, g: Operand, x: Operand, times: float = 1) -> Operand:
    """sum over images and pixels of g x^T: [N, O, P, Q], [N, C, P, Q] -> [O, C]

    It is multiplied by a number on the way, which must be a float32.
    """
    scale = {} if times == 1 else {"alpha": float(times)}
    shape = g.shape[1], x.shape[1]
    return c.graph.op(
        "Gemm", rows(c, g), rows(c, x), transB=1, shape=shape, dtype=g.dtype, **scale
    )


def rows(c, x: Operand) -> Operand:
    """[N, C, P, Q] -> [C, N * P * Q]"""
    n, channels, *size = x.shape
    pixels = size[0] * size[1]
    if n == 1:
        return c.graph.reshape(x, (channels, pixels))
    count = Batch(n.times * pixels) if isinstance(n, Batch) else n * pixels
    moved = c.graph.permute(c.graph.reshape(x, (n, channels, pixels)), [1, 0, 2])
    return c.graph.reshape(moved, (channels, count))


def _by_convolution(c, op: ConvOp, g, x, w_shape):
    """Images as channels: x slides over g, a stride becomes a dilation and the other way round."""
    top, bottom, left, right = op.padding
    reach = [
        x.shape[2 + i]
        + op.padding[2 * i]
        + op.padding[2 * i + 1]
        - op.stride[i] * (g.shape[2 + i] - 1)
        for i in (0, 1)
    ]
    sizes = [-(-r // d) for r, d in zip(reach, op.dilation, strict=True)]
    swapped = [c.graph.permute(t, [1, 0, 2, 3]) for t in (x, g)]
    found = conv(
        c.graph, *swapped, None, op.dilation, [top, left, bottom, right], op.stride, 1,
        (x.shape[1], g.shape[1], *sizes),
    )  # fmt: skip
    return c.graph.permute(_first(c.graph, found, op.kernel), [1, 0, 2, 3])


def _by_own_convolutions(graph: Graph, op: ConvOp, g, x, w_shape):
    """A depthwise layer: every map of every image slides over its own g."""
    n, channels = x.shape[:2]
    top, bottom, left, right = op.padding
    flat_x = graph.reshape(x, (1, n * channels, *x.shape[2:]))
    flat_g = graph.reshape(g, (n * channels, 1, *g.shape[2:]))
    sizes = [
        -(
            -(
                x.shape[2 + i]
                + op.padding[2 * i]
                + op.padding[2 * i + 1]
                - op.stride[i] * (g.shape[2 + i] - 1)
            )
            // op.dilation[i]
        )
        for i in (0, 1)
    ]
    found = conv(
        graph, flat_x, flat_g, None, op.dilation, [top, left, bottom, right], op.stride,
        n * channels, (1, n * channels, *sizes),
    )  # fmt: skip
    found = graph.reshape(_first(graph, found, op.kernel), (n, channels, *op.kernel))
    return graph.reshape(graph.sum(found, [0]), w_shape)


def _by_taps(c, op: ConvOp, g, x, w_shape):
    """Tap by tap: the pixels of x that a tap reads, times g."""
    graph, groups = c.graph, op.groups
    n, channels = x.shape[:2]
    top, bottom, left, right = op.padding
    zeros = graph.ints(0, 0, top, left, 0, 0, bottom, right)
    height, width = x.shape[2] + top + bottom, x.shape[3] + left + right
    if any(op.padding):
        fill = torch.tensor(0, dtype=g.dtype)
        x = graph.op("Pad", x, zeros, fill, shape=(n, channels, height, width), dtype=g.dtype)
    out, inner = w_shape[0] // groups, channels // groups
    pixels = g.shape[2] * g.shape[3]
    left_side = graph.reshape(g, (n, groups, out, pixels))
    taps = []
    for a in range(op.kernel[0]):
        for b in range(op.kernel[1]):
            part = _read(c, op, x, (a, b), g.shape[2:])
            part = graph.permute(graph.reshape(part, (n, groups, inner, pixels)), [0, 1, 3, 2])
            taps.append(graph.sum(graph.matmul(left_side, part), [0]))  # [G, O / G, C / G]
    stacked = [graph.reshape(t, (w_shape[0], inner, 1)) for t in taps]
    return graph.reshape(graph.concat(stacked, 2), w_shape)


def _read(c, op: ConvOp, x, tap: tuple[int, int], size) -> Operand:
    """The pixels of a padded x that one tap reads."""
    start = [t * d for t, d in zip(tap, op.dilation, strict=True)]
    end = [a + s * (n - 1) + 1 for a, s, n in zip(start, op.stride, size, strict=True)]
    ints = c.graph.ints
    return c.graph.op(
        "Slice", x, ints(*start), ints(*end), ints(2, 3), ints(*op.stride),
        shape=(*x.shape[:2], *size), dtype=x.dtype,
    )  # fmt: skip


def _first(graph: Graph, x: Operand, size) -> Operand:
    """The first rows and columns of a map."""
    if tuple(x.shape[2:]) == tuple(size):
        return x
    ints = graph.ints
    return graph.op(
        "Slice", x, ints(0, 0), ints(*size), ints(2, 3), shape=(*x.shape[:2], *size), dtype=x.dtype
    )


OPERATORS = {"convolution": convolution, "convolution_backward": backward}

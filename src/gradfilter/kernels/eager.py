"""Every kernel in plain PyTorch: what the C and Triton kernels must compute.

Maps are [N, C, H, W]. A patch grid starts at the origin with patches of side `(rh, rw)`; patches
at the far edges average over the pixels they really have.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.layers import ConvOp
from gradfilter.patches import pixel_sum

Pair = tuple[int, int]
Stats = tuple[Tensor, Tensor | None, Tensor | None]
IDEMPOTENT = ("relu", "relu6")  # f(f(z)) = f(z), so that f(z) tells f'(z)
Act = str | tuple[str, float]


class Activation(NamedTuple):
    """A pointwise function, its derivative as autograd defines it, and its default parameter."""

    f: Callable[[Tensor, float], Tensor]
    slope: Callable[[Tensor, float], Tensor]
    parameter: float = 0.0


def _inside(z: Tensor, low: float, high: float) -> Tensor:
    return ((z > low) & (z < high)).to(z.dtype)


def _hardswish_slope(z: Tensor, _: float) -> Tensor:
    return torch.where(z <= -3, 0.0, torch.where(z < 3, z / 3 + 0.5, 1.0)).to(z.dtype)


def _silu_slope(z: Tensor, _: float) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _gelu_slope(z: Tensor, _: float) -> Tensor:
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density


def _gelu_tanh_slope(z: Tensor, _: float) -> Tensor:
    k = math.sqrt(2 / math.pi)
    t = torch.tanh(k * (z + 0.044715 * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * 0.044715 * z * z)


def _mish_slope(z: Tensor, _: float) -> Tensor:
    t = torch.tanh(F.softplus(z))
    return t + z * torch.sigmoid(z) * (1 - t * t)


SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32))  # autograd's, in every precision

ACTIVATIONS: dict[str, Activation] = {
    "none": Activation(lambda z, _: z, lambda z, _: torch.ones_like(z)),
    "relu": Activation(lambda z, _: F.relu(z), lambda z, _: (z > 0).to(z.dtype)),
    "relu6": Activation(lambda z, _: F.relu6(z), lambda z, _: _inside(z, 0, 6)),
    "hardswish": Activation(lambda z, _: F.hardswish(z), _hardswish_slope),
    "hardsigmoid": Activation(
        lambda z, _: F.hardsigmoid(z), lambda z, _: _inside(z, -3, 3) * SIXTH
    ),
    "silu": Activation(lambda z, _: F.silu(z), _silu_slope),
    "sigmoid": Activation(
        lambda z, _: torch.sigmoid(z), lambda z, _: torch.sigmoid(z) * (1 - torch.sigmoid(z))
    ),
    "gelu": Activation(lambda z, _: F.gelu(z), _gelu_slope),
    "gelu_tanh": Activation(lambda z, _: F.gelu(z, approximate="tanh"), _gelu_tanh_slope),
    "tanh": Activation(lambda z, _: torch.tanh(z), lambda z, _: 1 - torch.tanh(z) ** 2),
    "leaky_relu": Activation(
        lambda z, p: F.leaky_relu(z, p),
        lambda z, p: torch.full_like(z, p).masked_fill_(z > 0, 1.0),
        0.01,
    ),
    "elu": Activation(
        lambda z, p: F.elu(z, p), lambda z, p: torch.where(z > 0, 1.0, p * torch.exp(z)), 1.0
    ),
    "mish": Activation(lambda z, _: F.mish(z), _mish_slope),
}


def activation(act: Act) -> tuple[str, float]:
    """Name and parameter of an activation given as a name or as (name, parameter)."""
    if not isinstance(act, str):
        return act
    if act not in ACTIVATIONS:
        raise ValueError(f"unknown activation {act!r}; known: {', '.join(ACTIVATIONS)}")
    return act, ACTIVATIONS[act].parameter


def patch_mean(x: Tensor, side: Pair) -> Tensor:
    """Mean of x over each patch: [N, C, H, W] -> [N, C, ceil(H / rh), ceil(W / rw)]."""
    side = min(side[0], x.shape[2]), min(side[1], x.shape[3])
    mean = F.avg_pool2d(x, side, side, ceil_mode=True, count_include_pad=False)
    return mean.contiguous(memory_format=torch.channels_last)


def _affine(y: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """y * scale + shift, both per channel."""
    if scale is not None:
        y = y * scale[:, None, None]
    return y if shift is None else y + shift[:, None, None]


def epilogue(
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    side: Pair,
    residual: Tensor | None = None,
    stats: bool = True,
) -> Stats:
    """a = f(y * scale + shift + residual), its patch mean, and the patch mean of f'.

    y is consumed: `a` may live in y's memory. The slope of "none" is None (it is 1 everywhere),
    and without `stats` both means are None.
    """
    name, parameter = activation(act)
    f, slope, _ = ACTIVATIONS[name]
    z = _affine(y, scale, shift)
    if residual is not None:
        z = z + residual
    a = f(z, parameter).to(y.dtype)  # scale and shift may be wider than y
    if not stats:
        return a, None, None
    slopes = None if name == "none" else patch_mean(slope(z, parameter), side).to(y.dtype)
    return a, patch_mean(a, side), slopes


def convolve(x: Tensor, w: Tensor, op: ConvOp) -> Tensor:
    """The convolution alone; a 1x1 layer is one matrix product of channels-last rows."""
    if op.pointwise and op.stride == (1, 1) and op.groups == 1:
        n, c, h, width = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(-1, c)
        y = rows @ w.flatten(1).T
        return y.view(n, h, width, -1).permute(0, 3, 1, 2)
    y = op.forward(x, w, None)
    return y.contiguous(memory_format=torch.channels_last)


def depthwise_conv(
    x: Tensor, w: Tensor, stride: Pair, padding: tuple[int, int, int, int], dilation: Pair
) -> Tensor:
    """Depthwise convolution with (top, bottom, left, right) zeros around x."""
    top, bottom, left, right = padding
    if top != bottom or left != right:
        x, top, left = F.pad(x, (left, right, top, bottom)), 0, 0
    return F.conv2d(x, w, None, stride, (top, left), dilation, groups=x.shape[1])


def conv3x3_backward(
    g: Tensor, x: Tensor | None, w: Tensor, need_gx: bool = True, need_gw: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients of a 3x3 convolution with stride and padding 1; x is not read without gw."""
    if x is None:
        x = g.new_empty(len(g), w.shape[1], *g.shape[2:])
    return torch.ops.aten.convolution_backward(
        g, x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (need_gx, need_gw, False)
    )[:2]


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices."""
    return a @ b


def depthwise(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    stride: Pair,
    padding: tuple[int, int, int, int],
    dilation: Pair,
    side: Pair,
    stats: bool = True,
) -> Stats:
    """Depthwise convolution of x [N, C, H, W] by w [C, 1, kh, kw], then `epilogue`.

    `padding` is (top, bottom, left, right), zeros; `side` is the patch of the output.
    """
    y = depthwise_conv(x, w, stride, padding, dilation)
    return epilogue(y, scale, shift, act, side, stats=stats)


def depthwise_grid_backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    taps_h: Tensor,
    taps_w: Tensor,
    need_gx: bool = True,
    need_gw: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients of a depthwise convolution whose maps are constant on each patch.

    g [N, C, P1, P2] and x [N, C, Q1, Q2] are patch means; taps_h [kh, P1, Q1] counts, for one tap
    and one axis, the pixels of output patch p that read input patch q. gx is summed over the
    pixels of each input patch, not averaged.
    """
    if not need_gx and not need_gw:
        return None, None
    spread = torch.einsum("ncij,aip->nacpj", g, taps_h.to(g.dtype))  # [N, kh, C, Q1, P2]
    spread = torch.einsum("nacpj,bjq->nabcpq", spread, taps_w.to(g.dtype))  # [N, kh, kw, C, Q1, Q2]
    gx = torch.einsum("nabcpq,cab->ncpq", spread, w[:, 0].to(g.dtype)) if need_gx else None
    gw = torch.einsum("nabcpq,ncpq->cab", spread, x)[:, None].to(w.dtype) if need_gw else None
    return gx, gw


def pool_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Outputs of a pool along one axis."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def pool_reach(
    size: int, kernel: int, stride: int, padding: int, dilation: int, side_in: int, side_out: int
) -> tuple[list[int], int]:
    """First input patch each output patch's windows touch on one axis, and how many at most."""
    out = pool_size(size, kernel, stride, padding, dilation)
    first, last = [], []
    for low in range(0, out, side_out):
        high = min(low + side_out, out) - 1
        start, end = low * stride - padding, high * stride - padding + dilation * (kernel - 1)
        first.append(max(start, 0) // side_in)
        last.append(min(end, size - 1) // side_in)
    return first, max(b - a for a, b in zip(first, last, strict=True)) + 1


def max_pool(
    y: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    act: Act,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    side_in: Pair,
    side_out: Pair,
    stats: bool = True,
) -> Stats:
    """Max-pool of f(y * scale + shift), its patch mean, and where its gradient goes.

    route [N, C, P1, P2, D1, D2] holds, for each output patch p and each input patch
    `first(p) + d` that its windows touch (`pool_reach`), the sum of f' at the maxima found there.
    """
    name, parameter = activation(act)
    f, slope, _ = ACTIVATIONS[name]
    z = _affine(y, scale, shift)
    a = f(z, parameter).to(y.dtype)
    out, index = F.max_pool2d(a, kernel, stride, padding, dilation, return_indices=True)
    if not stats:
        return out, None, None
    (n, c, _, width), (height_out, width_out) = z.shape, out.shape[2:]
    axes = zip(z.shape[2:], kernel, stride, padding, dilation, side_in, side_out, strict=True)
    (first_h, d1), (first_w, d2) = (pool_reach(*axis) for axis in axes)
    p1 = torch.arange(height_out, device=y.device)[:, None] // side_out[0]  # [OH, 1]
    p2 = torch.arange(width_out, device=y.device)[None] // side_out[1]  # [1, OW]
    offset1 = index // width // side_in[0] - index.new_tensor(first_h)[p1]  # [N, C, OH, OW]
    offset2 = index % width // side_in[1] - index.new_tensor(first_w)[p2]
    cell = ((p1 * len(first_w) + p2) * d1 + offset1) * d2 + offset2
    at_max = slope(z, parameter).flatten(2).gather(2, index.flatten(2))
    sums = torch.promote_types(y.dtype, torch.float32)
    route = y.new_zeros((n, c, len(first_h) * len(first_w) * d1 * d2), dtype=sums)
    route.scatter_add_(2, cell.flatten(2), at_max.to(sums))
    return out, patch_mean(out, side_out), route.view(n, c, len(first_h), len(first_w), d1, d2)


@functools.lru_cache(maxsize=256)
def _pool_cells(first_h, first_w, d1: int, d2: int, q_shape: Pair, device) -> Tensor:
    """The input patch of each (p1, p2, d1, d2); made once, so that a CUDA graph can be captured."""
    # An edge patch reaches fewer than D patches; its route is zero beyond them.
    first_h, first_w = (torch.tensor(first, device="cpu") for first in (first_h, first_w))
    d1, d2 = (torch.arange(d, device="cpu") for d in (d1, d2))
    q1 = (first_h[:, None] + d1).clamp_(max=q_shape[0] - 1)  # [P1, D1]
    q2 = (first_w[:, None] + d2).clamp_(max=q_shape[1] - 1)  # [P2, D2]
    return (q1[:, None, :, None] * q_shape[1] + q2[None, :, None, :]).flatten().to(device)


def max_pool_grid_backward(
    g: Tensor, route: Tensor, first_h: list[int], first_w: list[int], q_shape: Pair
) -> Tensor:
    """Gradient at a max-pool's input, summed over each input patch: route * g, scattered.

    g [N, C, P1, P2], route and first_h, first_w as `max_pool` and `pool_reach` give them.
    """
    n, c, _, _, d1, d2 = route.shape
    cell = _pool_cells(tuple(first_h), tuple(first_w), d1, d2, tuple(q_shape), g.device)
    gx = route.new_zeros(n, c, q_shape[0] * q_shape[1])
    gx.index_add_(2, cell, (route * g[..., None, None]).flatten(2))
    gx = gx.view(n, c, *q_shape).to(g.dtype)
    return gx.contiguous(memory_format=torch.channels_last)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of a long sum: float32 at least, as parameters are."""
    return torch.promote_types(dtype, torch.float32)


def slope_backward(
    g: Tensor,
    slope: Tensor | None,
    scale: Tensor | None,
    area: Tensor | float,
    sums: Tensor | None = None,
    need_z: bool = True,
    act: str = "none",
) -> tuple[Tensor | None, Tensor]:
    """z = g * slope and z * scale, of maps constant on patches; z summed over all pixels into sums.

    g and slope are [N, C, P, Q], scale is per channel, area is the pixels of each patch [P, Q] or
    one number. z is None unless needed or the same as z * scale. `sums` [C] is overwritten. With
    an `act` of IDEMPOTENT, `slope` is the map f(y) instead, whose f' is that of y.
    """
    if act != "none":
        slope = ACTIVATIONS[act].slope(slope, 0.0).to(g.dtype)
    z = g if slope is None else g * slope
    if sums is not None:
        sums.copy_(pixel_sum(z.to(wide(z.dtype)), area))
    scaled = z if scale is None else (z * scale[:, None, None]).to(z.dtype)
    return z if need_z or scale is None else None, scaled


def spread(g: Tensor, taps_h: Tensor, taps_w: Tensor) -> Tensor:
    """g [N, O, P1, P2] as every tap of a convolution sees it: [N * Q1 * Q2, O * kh * kw].

    The taps are those of `depthwise_grid_backward`. Both gradients of a dense convolution are
    then one matrix product each, with the weights in their channels-last order.
    """
    tall = torch.einsum("noij,aip->noapj", g, taps_h.to(g.dtype))  # [N, O, kh, Q1, P2]
    seen = torch.einsum("noapj,bjq->npqoab", tall, taps_w.to(g.dtype))
    return seen.reshape(seen.shape[0] * seen.shape[1] * seen.shape[2], -1)


def row_dots(a: Tensor, b: Tensor, out: Tensor) -> None:
    """<a[o], b[o]> of two weights [O, C, kh, kw], whatever their layouts, into out [O]."""
    if not (a.is_contiguous() and b.is_contiguous()):
        a, b = (t.permute(0, 2, 3, 1) for t in (a, b))
    a, b = (t.flatten(1).to(wide(t.dtype)) for t in (a, b))
    out.copy_(torch.linalg.vecdot(a, b))

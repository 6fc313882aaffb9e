"""Convolution gradients on the patch grid: small maps in, small maps out, no full resolution.

`Grid` gives one method's grids; `GridConv` is one convolution between two of them, for one size
of its input. Both gradients take the patch means of g and x and give the patch means of gx.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gradfilter import kernels
from gradfilter.layers import ConvOp
from gradfilter.methods import GalerkinFilter, GradientFilter, Method
from gradfilter.patches import divide_up, overlap, patch_area, tap_counts

Pair = tuple[int, int]
SMALL = 16  # up to this side of a grid, g as every tap sees it is little to write


def takes(method: Method) -> bool:
    """Whether a region can run on this method's grid."""
    if isinstance(method, GradientFilter):
        return method.alignment == "origin"
    return isinstance(method, GalerkinFilter)


def side(method: Method, size: Pair) -> Pair:
    """Patch side of a map of this size."""
    if isinstance(method, GalerkinFilter):
        return method.side(size)
    return (method.patch, method.patch)


@lru_cache(maxsize=4096)
def areas(method: Method, size: Pair, dtype: torch.dtype, device: torch.device) -> Tensor | float:
    """Pixels of each patch of a map [P, Q]; one number where all patches are whole."""
    r = side(method, size)
    if all(s % k == 0 for s, k in zip(size, r, strict=True)):
        return float(r[0] * r[1])
    count = tuple(divide_up(s, k) for s, k in zip(size, r, strict=True))
    return patch_area(torch.empty(0, dtype=dtype, device=device), size, count, r)


@lru_cache(maxsize=4096)
def grid_conv(
    method: Method, op: ConvOp, x_size: Pair, dtype: torch.dtype, device: torch.device
) -> GridConv:
    """The grid form of a convolution for one input size; made once."""
    kind = _Filtered if isinstance(method, GradientFilter) else Galerkin
    return kind(method, op, x_size, dtype, device)


def _rows(x: Tensor) -> Tensor:
    """A channels-last map as a matrix. [N, C, H, W] -> [N * H * W, C]"""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


class GridConv:
    """Both gradients of one convolution on the grid."""

    # of gx = factor * g w and gw = factor * g^T x, where two matrix products are all there is to it
    factors: tuple[float, float] | None = None

    def backward(
        self, g: Tensor, x: Tensor | None, w: Tensor, need_gx: bool, need_gw: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """g [N, O, P1, P2], x [N, C, Q1, Q2] -> gx [N, C, Q1, Q2], gw as w."""
        raise NotImplementedError

    def dots(self, gw: Tensor, w: Tensor, out: Tensor) -> None:
        """<gw[o], w[o]> for every output channel, into `out`."""
        kernels.row_dots(gw, w, out)


class Galerkin(GridConv):
    """gx = P W^T U P g: the counts N_a[p, q], and the cheapest way to apply them."""

    def __init__(self, method: GalerkinFilter, op: ConvOp, x_size: Pair, dtype, device):
        self.op = op
        y_size = op.output_size(x_size)
        sides = (method.side(y_size), method.side(x_size))
        like = torch.empty(0, dtype=dtype, device=device)
        self.taps = [
            tap_counts(
                like,
                (y_size[i], sides[0][i]),
                (x_size[i], sides[1][i]),
                op.kernel[i],
                op.stride[i],
                op.dilation[i],
                op.padding[2 * i],
            )
            for i in (0, 1)
        ]
        self.area = areas(method, x_size, dtype, device)
        self.diagonal = _diagonal(self.taps)
        self.regular = None if self.diagonal is not None else _regular(self.taps, sides, op)
        if op.groups == 1 and isinstance(self.diagonal, float) and isinstance(self.area, float):
            self.factors = self.diagonal / self.area, self.diagonal

    def backward(self, g, x, w, need_gx, need_gw):
        if not (need_gx or need_gw):
            return None, None
        op = self.op
        if op.groups > 1 and w.shape[0] == op.groups and w.shape[1] == 1:
            if x is None:  # of which the kernel then reads the shape alone
                x = g.new_empty(*g.shape[:2], *(n.shape[2] for n in self.taps))
            gx, gw = kernels.depthwise_grid_backward(g, x, w, *self.taps, need_gx, need_gw)
        elif self.diagonal is not None and op.groups == 1:
            return self._pointwise(g, x, w, need_gx, need_gw)
        elif self.regular is not None and self.regular.quick(g, w):
            gx, gw = self.regular.backward(g, x, w, need_gx, need_gw)
        elif op.groups == 1 and max(g.shape[-2:]) <= SMALL and not (g.is_cuda and self.regular):
            gx, gw = self._by_product(g, x, w, need_gx, need_gw)
        elif self.regular is not None:
            gx, gw = self.regular.backward(g, x, w, need_gx, need_gw)
        elif op.groups == 1 and not need_gx and _less_by_input(g, x):
            gx, gw = self._by_product(g, x, w, need_gx, need_gw)
        else:
            gx, gw = self._spread(g, x, w, need_gx, need_gw)
        whole = isinstance(self.area, float) and self.area == 1
        return gx if gx is None or whole else gx / self.area, gw

    def _pointwise(self, g, x, w, need_gx, need_gw):
        """A 1x1 layer whose patches match one to one: two matrix products."""
        n, o, p, q = g.shape
        rows = g.permute(0, 2, 3, 1).reshape(-1, o)  # [N*P*Q, O]
        gx = gw = None
        if need_gx:
            flat = kernels.product(rows, w.flatten(1))
            gx = flat.view(n, p, q, -1).permute(0, 3, 1, 2)
            ratio = self.diagonal / self.area
            gx = gx if isinstance(ratio, float) and ratio == 1 else gx * ratio
        if need_gw:
            columns = x.permute(0, 2, 3, 1).reshape(len(rows), -1)  # [N*P*Q, C]
            if isinstance(self.diagonal, float):
                gw = kernels.product(rows.T, columns)
                gw = gw if self.diagonal == 1 else gw.mul_(self.diagonal)
            else:
                scaled = (g * self.diagonal).permute(0, 2, 3, 1).reshape(-1, o)
                gw = kernels.product(scaled.T, columns)
            gw = gw.view_as(w)
        return gx, gw

    def _by_product(self, g, x, w, need_gx, need_gw):
        """One matrix product per gradient, in the layout of channels-last weights."""
        n, o = g.shape[:2]
        (kh, _, q1), (kw, _, q2) = (t.shape for t in self.taps)
        gx = gw = None
        if not need_gx:  # x as every tap sees it is smaller for a stem of 3 channels
            seen = torch.einsum("ncqs,apq->ncaps", x, self.taps[0])
            seen = torch.einsum("ncaps,brs->nprabc", seen, self.taps[1]).reshape(-1, w[0].numel())
            gw = kernels.product(_rows(g).T, seen).view(o, kh, kw, -1).permute(0, 3, 1, 2)
            return gx, gw
        seen = kernels.spread(g, *self.taps)  # [N * Q1 * Q2, O * kh * kw]
        flat = w.permute(0, 2, 3, 1).reshape(o * kh * kw, -1)
        gx = kernels.product(seen, flat).view(n, q1, q2, -1).permute(0, 3, 1, 2)
        if need_gw:
            gw = kernels.product(seen.T, _rows(x)).view(o, kh, kw, -1).permute(0, 3, 1, 2)
        return gx, gw

    def _spread(self, g, x, w, need_gx, need_gw):
        """Any geometry: g as each tap sees it, then one product each."""
        groups = self.op.groups
        gg = g.reshape(g.shape[0], groups, -1, *g.shape[-2:])
        spread = torch.einsum("ngopr,apq,brs->ngoabqs", gg, *self.taps)
        gx = gw = None
        if need_gx:
            taps = w.reshape(groups, -1, *w.shape[1:])
            gx = torch.einsum("ngoabqr,gocab->ngcqr", spread, taps).flatten(1, 2)
        if need_gw:
            xx = x.reshape(x.shape[0], groups, -1, *x.shape[-2:])
            gw = torch.einsum("ngoabqr,ngcqr->gocab", spread, xx).flatten(0, 1)
        return gx, gw


def _less_by_input(g: Tensor, x: Tensor) -> bool:
    """Whether x as every tap sees it has fewer numbers than g has, as in a stem of stride 2."""
    return x.shape[1] * g[0, 0].numel() < g.shape[1] * x[0, 0].numel()


def _diagonal(taps: list[Tensor]) -> Tensor | float | None:
    """For a single tap that joins patch p to patch p alone: its counts [P, Q], else None."""
    axes = []
    for n in taps:
        if n.shape[0] != 1 or n.shape[1] != n.shape[2]:
            return None
        if not torch.equal(n[0], torch.diag(n[0].diagonal())):
            return None
        axes.append(n[0].diagonal())
    counts = axes[0][:, None] * axes[1]
    return float(counts[0, 0]) if bool((counts == counts[0, 0]).all()) else counts


class _Regular:
    """Where N_a[p, q] = m[a, q - rho p] everywhere, the grid has an ordinary small convolution.

    Its taps are fixed mixtures of W's; its gradients are the exact ones of `layers.ConvOp`.
    """

    def __init__(self, mix: list[Tensor], op: ConvOp, kernel: Pair):
        self.op, self.kernel = op, kernel  # of the small convolution; of the layer's
        self.mix = torch.kron(*mix)  # [taps of the layer, taps of the small convolution]
        eye = torch.eye(len(self.mix), dtype=self.mix.dtype, device=self.mix.device)
        self.plain = kernel == op.kernel and torch.equal(self.mix, eye)
        self.common = op == ConvOp((3, 3), (1, 1), (1, 1, 1, 1))

    def quick(self, g: Tensor, w: Tensor) -> bool:
        """Whether there is a kernel for just this."""
        return self.common and kernels.conv3x3_pays(g, w.shape[1])

    def backward(self, g, x, w, need_gx, need_gw):
        mixed = w
        if need_gx and not self.plain:
            mixed = _mixed(w, self.mix.T, self.op.kernel)
        if self.op.symmetric:
            gx, gw = self._both(g, x, mixed, need_gx, need_gw)
        else:
            shape = self._input_shape(g, w)
            gx = self.op.grad_input(g, mixed, shape) if need_gx else None
            gw = self.op.grad_weight(g, x) if need_gw else None
        if need_gw and not self.plain:
            gw = _mixed(gw, self.mix, self.kernel)
        return gx, gw

    def _both(self, g, x, w, need_gx, need_gw):
        """Both gradients by one call of PyTorch's own."""
        op = self.op
        if self.quick(g, w):
            like = w if need_gx else w.new_empty(*w.shape[:2], 3, 3)
            return kernels.conv3x3_backward(g, x, like, need_gx, need_gw)
        if x is None:  # only its shape is read
            x = g.new_empty(self._input_shape(g, w)).contiguous(memory_format=torch.channels_last)
        w_shape = w if w.shape[2:] == op.kernel else w.new_empty(*w.shape[:2], *op.kernel)
        padding = (op.padding[0], op.padding[2])
        gx, gw, _ = torch.ops.aten.convolution_backward(
            g, x, w_shape, None, op.stride, padding, op.dilation, False, (0, 0), op.groups,
            (need_gx, need_gw, False),
        )  # fmt: skip
        return gx, gw

    def _input_shape(self, g: Tensor, w: Tensor) -> tuple[int, ...]:
        op = self.op
        size = (
            (count - 1) * s + k - op.padding[2 * i] - op.padding[2 * i + 1]
            for i, (count, s, k) in enumerate(zip(g.shape[2:], op.stride, op.kernel, strict=True))
        )
        return (g.shape[0], w.shape[1] * op.groups, *size)


def _mixed(w: Tensor, mix: Tensor, kernel: Pair) -> Tensor:
    """Taps of w, mixed: [O, C, *k] by [taps, taps of w] -> [O, C, *kernel], channels-last."""
    taps = w.permute(0, 2, 3, 1).flatten(1, 2)  # [O, taps of w, C]
    mixed = mix.to(w.dtype) @ taps
    return mixed.view(len(w), *kernel, -1).permute(0, 3, 1, 2)


def _regular(taps: list[Tensor], sides: tuple[Pair, Pair], op: ConvOp) -> _Regular | None:
    axes = [
        _regular_axis(n, y_side * s, x_side)
        for n, y_side, x_side, s in zip(taps, *sides, op.stride, strict=True)
    ]
    if None in axes:
        return None
    (m1, rho1, pad1), (m2, rho2, pad2) = axes
    small = ConvOp((m1.shape[1], m2.shape[1]), (rho1, rho2), (*pad1, *pad2), (1, 1), op.groups)
    return _Regular([m1, m2], small, op.kernel)


def _regular_axis(n: Tensor, step: int, x_side: int):
    """(m [taps, offsets], stride, (pad before, pad after)) of one axis, or None."""
    if step % x_side:
        return None
    rho = step // x_side
    _, count, size = n.shape
    _, p, q = n.nonzero(as_tuple=True)
    if not len(p):
        return None
    offset = q - rho * p
    low, high = int(offset.min()), int(offset.max())
    after = rho * (count - 1) + high + 1 - size
    if low > 0 or after < 0:
        return None
    m = n.new_zeros(len(n), high - low + 1)
    rebuilt = torch.zeros_like(n)
    for d in range(low, high + 1):
        inside = [i for i in range(count) if 0 <= rho * i + d < size]
        cells = n[:, inside, [rho * i + d for i in inside]]  # [taps, len(inside)]
        m[:, d - low] = cells[:, 0]
        rebuilt[:, inside, [rho * i + d for i in inside]] = cells[:, :1].expand_as(cells)
    return (m, rho, (-low, after)) if torch.equal(rebuilt, n) else None


class _Filtered(GridConv):
    """GradientFilter: blocks of patch*stride at x, the kernel summed over its taps."""

    def __init__(self, method: GradientFilter, op: ConvOp, x_size: Pair, dtype, device):
        self.op = op
        y_size = op.output_size(x_size)
        self.count = tuple(divide_up(s, method.patch) for s in y_size)
        self.cells = tuple(divide_up(s, method.patch) for s in x_size)
        self.whole = op.stride == (1, 1) and self.count == self.cells
        self.area = areas(method, x_size, dtype, device)
        if op.pointwise and op.groups == 1 and self.whole and isinstance(self.area, float):
            self.factors = 1.0, self.area
        if not self.whole and isinstance(self.area, float):
            rows, columns = (
                overlap(device, s, n, method.patch).to(dtype)
                for s, n in zip(x_size, self.cells, strict=True)
            )
            self.area = rows[:, None] * columns

    def backward(self, g, x, w, need_gx, need_gw):
        op = self.op
        gx = gw = None
        if op.groups > 1 and w.shape[0] == op.groups and w.shape[1] == 1:
            gx, gw = self._depthwise(g, x, w, need_gx, need_gw)
        elif op.groups == 1:
            gx, gw = self._dense(g, x, w, need_gx, need_gw)
        else:
            gx, gw = self._grouped(g, x, w, need_gx, need_gw)
        if need_gx:
            gx = self._to_cells(gx)
        if need_gw and op.kernel != (1, 1):  # every tap has the same
            flat = gw.flatten(1)[:, None].expand(-1, op.kernel[0] * op.kernel[1], -1)
            gw = flat.reshape(len(gw), *op.kernel, -1).permute(0, 3, 1, 2)
        return gx, gw

    def _depthwise(self, g, x, w, need_gx, need_gw):
        """gx is g times the sum of the taps, gw the sum of g x over all pixels."""
        gx = gw = None
        if need_gx:
            _, gx = kernels.slope_backward(g, None, w.sum((1, 2, 3)), 1.0, None, False)
        if need_gw and self.whole:
            gw = g.new_empty(g.shape[1], dtype=kernels.wide(g.dtype))
            kernels.slope_backward(g, x, None, self.area, gw, False)
            gw = gw.to(g.dtype)
        elif need_gw:
            gw = (g * self._to_blocks(x * self.area)).sum((0, 2, 3))
        return gx, None if gw is None else gw[:, None, None, None]

    def _dense(self, g, x, w, need_gx, need_gw):
        """One matrix product each."""
        n, _, p, q = g.shape
        rows, gx, gw = _rows(g), None, None
        if need_gx:
            gx = kernels.product(rows, _tap_sum(w)).view(n, p, q, -1).permute(0, 3, 1, 2)
        if need_gw:
            even = self.whole and isinstance(self.area, float)
            blocks = _rows(x if even else self._to_blocks(x * self.area))
            gw = kernels.product(rows.T, blocks)
            gw = (gw.mul_(self.area) if even else gw)[:, :, None, None]
        return gx, gw

    def _grouped(self, g, x, w, need_gx, need_gw):
        groups, gx, gw = self.op.groups, None, None
        gg = g.reshape(g.shape[0], groups, -1, *g.shape[-2:])
        if need_gx:
            taps = _tap_sum(w).view(groups, -1, w.shape[1])
            gx = torch.einsum("ngopq,goc->ngcpq", gg, taps).flatten(1, 2)
        if need_gw:
            blocks = self._to_blocks(x * self.area)
            xx = blocks.reshape(x.shape[0], groups, -1, *blocks.shape[-2:])
            gw = torch.einsum("ngopq,ngcpq->goc", gg, xx).flatten(0, 1)[:, :, None, None]
        return gx, gw

    def dots(self, gw, w, out):
        """As every tap of gw is the same, with the sum of w's."""
        kernels.row_dots(gw[:, :, :1, :1].contiguous(), _tap_sum(w)[:, :, None, None], out)

    def _to_cells(self, blocks: Tensor) -> Tensor:
        """Blocks of x -> the patches of x's own grid, which are a stride finer."""
        if self.whole:
            return blocks
        s1, s2 = self.op.stride
        fine = blocks.repeat_interleave(s1, -2).repeat_interleave(s2, -1)
        pad = (0, self.cells[1] - fine.shape[-1], 0, self.cells[0] - fine.shape[-2])
        return torch.nn.functional.pad(fine, pad)

    def _to_blocks(self, cells: Tensor) -> Tensor:
        """Sums over the patches of x's own grid -> sums over blocks."""
        if self.whole:
            return cells
        s1, s2 = self.op.stride
        pad = (0, self.count[1] * s2 - cells.shape[-1], 0, self.count[0] * s1 - cells.shape[-2])
        cells = torch.nn.functional.pad(cells, pad)
        return torch.nn.functional.avg_pool2d(cells, (s1, s2), divisor_override=1)


def _tap_sum(w: Tensor) -> Tensor:
    """[O, C, kh, kw] -> [O, C]"""
    if w.shape[2] * w.shape[3] == 1:
        return w.flatten(1)
    return w.permute(0, 2, 3, 1).flatten(1, 2).sum(1)

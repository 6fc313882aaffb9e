"""The convolution step: with the batch norm, sum, activation and max-pool that follow it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter import autograd, kernels
from gradfilter.geometry import Geometry
from gradfilter.kernels.eager import IDEMPOTENT
from gradfilter.layers import ConvOp
from gradfilter.patches import pixel_sum
from gradfilter.region import grid
from gradfilter.region.step import (
    NONE,
    Act,
    MaxPool,
    Pair,
    Shape,
    Step,
    fold,
    own_parameters,
    plain_activation,
)


@dataclass
class Placed:
    """A convolution for one size of its input: what its steps would look up again and again."""

    op: ConvOp
    size: Pair  # of its output
    side: Pair
    area: Tensor | float
    grid: grid.GridConv
    pointwise: bool  # a matrix product, with no max-pool behind it
    factors: tuple[float, float] | None  # see GridConv; where all patches are whole
    pooled: Pair | None  # patch side behind a max-pool
    reach: list[list[int]] | None


@dataclass
class Conv(Step):
    """Convolution, then batch norm, plus another value, then an activation, then a max-pool.

    A frozen batch norm is folded: its gradient is that of w*gamma/sigma, and nothing is kept.
    """

    module: nn.Conv2d = None
    shape: Geometry = None
    norm: nn.Module | None = None
    act: Act = NONE
    residual: int | None = None
    pool: MaxPool | None = None

    def parameters(self):
        yield from own_parameters(self.module, self.norm)

    def means(self, trained):
        if trained(self.module, "weight") or trained(self.norm, "weight"):
            yield self.inputs[0]

    def shape_of(self, x: Shape, *residual: Shape) -> Shape | None:
        out, inner, *kernel = self.module.weight.shape
        op = self.shape(torch.empty(0, *x[1:]))[1]
        size = op.output_size(x[2:])
        y = (x[0], out, *size)
        fits = x[1] == inner * op.groups and tuple(kernel) == op.kernel and min(size) > 0
        bias, norm = self.module.bias, self.norm
        known = [] if bias is None else [len(bias)]
        known += [] if norm is None else [norm.num_features]
        if not fits or any(r != y for r in residual) or any(k != out for k in known):
            return None
        if self.pool is None:
            return y
        size = self.pool.size(size)
        return (*y[:2], *size) if min(size) > 0 else None

    def plain(self, c, x, *residual):
        x, op = self.shape(x)
        w, b = self.module.weight, self.module.bias
        if self.norm is not None and not c.batch_norm(self.norm):
            scale, shift = fold(self.norm)
            # a norm may be wider than the layer: half-precision layers with float32 norms
            b = (shift if b is None else b * scale + shift).to(w.dtype)
            w = (w * scale[:, None, None, None]).to(w.dtype)
        z, _ = autograd.apply(op, c.method, x, w, b)
        if self.norm is not None and c.batch_norm(self.norm):
            z = batch_norm(self.norm, z)
        for r in residual:
            z = z + r
        a = plain_activation(c.project(z), self.act)
        if self.pool is None:
            return a
        p = self.pool
        return F.max_pool2d(a, p.kernel, p.stride, p.padding, p.dilation)

    def place(self, method, x: Tensor) -> Placed:
        """The convolution for inputs of the size, type and device of x."""
        x_size = tuple(x.shape[-2:])
        op = self.shape(x)[1]
        size = op.output_size(x_size)
        side = grid.side(method, size)
        area = grid.areas(method, size, x.dtype, x.device)
        conv = grid.grid_conv(method, op, x_size, x.dtype, x.device)
        pooled = reach = None
        if self.pool is not None:
            pooled = grid.side(method, self.pool.size(size))
            reach = self.pool.reach(size, side, pooled)
        pointwise = op.pointwise and op.stride == (1, 1) and op.groups == 1 and self.pool is None
        factors = conv.factors if isinstance(area, float) else None
        return Placed(op, size, side, area, conv, pointwise, factors, pooled, reach)

    def forward(self, c):
        x = c.dense[self.inputs[0]]
        place = c.place(self, x)
        op, side = place.op, place.side
        w = c.weight(self.module, x)
        keep = self.out in c.needs
        batch = self.norm is not None and c.batch_norm(self.norm)
        scale, shift = (None, None) if batch else c.affine(self, self.module)
        last = self.residual is None and self.pool is None and not batch
        if op.groups > 1 and op.groups == w.shape[0] == x.shape[1]:
            act = self.act if last else NONE
            affine = (scale, shift) if last else (None, None)
            stats = keep and last
            result = kernels.depthwise(
                x, w, *affine, act, op.stride, op.padding, op.dilation, side, stats
            )
            if last:
                return self._finish(c, *result)
            y = result[0]
        elif place.pointwise and not batch and (backend := kernels.joined(x)):
            residual = None if self.residual is None else c.dense[self.residual]
            result = backend.pointwise(x, w, scale, shift, self.act, side, residual, keep)
            return self._finish(c, *result)
        else:
            y = kernels.convolve(x, w, op)
        if batch:
            scale, shift = self._batch_statistics(c, y, side, keep)
        if self.pool is not None:
            return self._pooled(c, y, scale, shift, place, keep)
        residual = None if self.residual is None else c.dense[self.residual]
        self._finish(c, *kernels.epilogue(y, scale, shift, self.act, side, residual, keep))

    def _finish(self, c, a, mean, slope):
        c.write(self.out, a, mean)
        if slope is not None and not self._output_tells(c):
            c.keep(self, "slope", slope)

    def _output_tells(self, c) -> bool:
        """Whether the output is kept pixel by pixel, and tells f'."""
        known = self.pool is None and self.act[0] in IDEMPOTENT and self.out in c.wanted
        return known and c.places[self.out].side == (1, 1)

    def _pooled(self, c, y, scale, shift, place, keep):
        p, sides = self.pool, (place.side, place.pooled)
        if self.residual is not None:
            residual = c.dense[self.residual]
            y, _, _ = kernels.epilogue(y, scale, shift, NONE, place.side, residual, False)
            scale = shift = None
        out, mean, route = kernels.max_pool(
            y, scale, shift, self.act, p.kernel, p.stride, p.padding, p.dilation, *sides, keep
        )
        c.write(self.out, out, mean)
        if keep:
            c.keep(self, "route", route)

    def _batch_statistics(self, c, y, side, keep):
        """Training batch norm: scale and shift of this batch; keeps the means of x-hat."""
        b = self.module.bias
        if b is not None:
            y += c.parameter(self.module, "bias")[:, None, None]
        mean, rstd = update_statistics(self.norm, y)
        gamma, beta = c.optional(self.norm, "weight"), c.optional(self.norm, "bias")
        scale = rstd if gamma is None else rstd * gamma
        shift = -mean * scale if beta is None else beta - mean * scale
        if keep:
            normal = (kernels.patch_mean(y, side) - mean[:, None, None]) * rstd[:, None, None]
            c.keep(self, "normal", normal.to(y.dtype))
            c.keep(self, "rstd", rstd)
        return scale, shift

    def backward(self, c, g):
        place = c.places[self.out]
        if self.pool is not None:
            g = self._unpool(c, g, place)
        batch = self.norm is not None and c.batch_norm(self.norm)
        fold = None if self.norm is None or batch else c.folded.of(self)
        add, wants = self.residual in c.needs, c.wiring.of[self.out]
        sums = None
        if wants.sums and not batch:
            sums = fold.sums if fold else g.new_empty(g.shape[1], dtype=kernels.wide(g.dtype))
        slope, act = c.kept(self, "slope"), "none"
        if self._output_tells(c):
            slope, act = c.mean(self.out), self.act[0]
        scale = fold.scale if fold else None
        if place.factors and not batch and (backend := kernels.joined(g)):
            x, w = c.mean(self.inputs[0]) if wants.gw else None, c.weight(self.module, g)
            z, gx, gw = backend.pointwise_grid_backward(
                g, slope, scale, place.area, x, w, place.factors, sums,
                fold.dots if wants.gamma else None, add, wants.gx, wants.gw, act,
            )  # fmt: skip
        else:
            z, g = kernels.slope_backward(g, slope, scale, place.area, sums, add, act)
            if batch:
                g = self._batch_norm_backward(c, g, place)
                if wants.bias:
                    sums = pixel_sum(g, place.area)
            gx, gw = self._convolution_backward(c, g, place, fold)
        if add:
            c.add(self.residual, z)
        if wants.gx:
            c.add(self.inputs[0], gx)
        if wants.gw:
            c.parameter_gradient(self.module, "weight", gw)
        if fold:
            c.folded.reached.add(self.out)
        if wants.bias:
            c.parameter_gradient(self.module, "bias", sums * fold.scale if fold else sums)

    def _unpool(self, c, g, place):
        route = c.kept(self, "route")
        count = tuple(-(-s // r) for s, r in zip(place.size, place.side, strict=True))
        return kernels.max_pool_grid_backward(g, route, *place.reach, count) / place.area

    def _batch_norm_backward(self, c, g, place):
        """In float32 at least, as the norm's parameters may be beside narrower maps."""
        dtype, g = g.dtype, g.to(kernels.wide(g.dtype))
        normal, rstd = c.kept(self, "normal"), c.kept(self, "rstd")
        gamma = c.optional(self.norm, "weight")
        g_beta, g_gamma = pixel_sum(g, place.area), pixel_sum(g * normal, place.area)
        c.parameter_gradient(self.norm, "weight", g_gamma)
        c.parameter_gradient(self.norm, "bias", g_beta)
        pixels = g.shape[0] * place.size[0] * place.size[1]
        centred = g - (g_beta[:, None, None] + normal * g_gamma[:, None, None]) / pixels
        return (centred * (rstd if gamma is None else rstd * gamma)[:, None, None]).to(dtype)

    def _convolution_backward(self, c, g, place, fold):
        """Both gradients on the grid, and what gamma's is made of."""
        w, wants = c.weight(self.module, g), c.wiring.of[self.out]
        mean = c.mean(self.inputs[0]) if wants.gw else None
        gx, gw = place.grid.backward(g, mean, w, wants.gx, wants.gw)
        if fold and wants.gamma:
            place.grid.dots(gw, w, fold.dots)
        return gx, gw


def batch_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Batch norm in training mode, as nn.BatchNorm2d does it, activation left out."""
    return nn.modules.batchnorm._BatchNorm.forward(norm, x)


def update_statistics(norm: nn.Module, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1/sigma of a batch; running statistics move as nn.BatchNorm2d moves them.

    Both in float32 at least, as there: the variance of a float16 map may be too large for it.
    """
    if y.numel() == y.shape[1]:  # as PyTorch has it
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(y.shape)}"
        )
    var, mean = torch.var_mean(y.to(kernels.wide(y.dtype)), (0, 2, 3), correction=0)
    if norm.training and norm.track_running_stats and norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
        factor = norm.momentum
        if factor is None:
            factor = 1.0 / float(norm.num_batches_tracked)
        count = y.numel() // y.shape[1]
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
        unbiased = var * (count / (count - 1))
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), factor)
    return mean, torch.rsqrt(var + norm.eps)

"""The other steps: what stands between the convolutions of a region."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter import kernels
from gradfilter.patches import pixel_sum
from gradfilter.region import grid
from gradfilter.region.step import (
    NONE,
    Act,
    MaxPool,
    Shape,
    Step,
    fold,
    own_parameters,
    plain_activation,
)


@dataclass
class Pointwise(Step):
    """An activation, or a frozen batch norm and an activation, that follows no convolution."""

    norm: nn.Module | None = None
    act: Act = NONE

    def parameters(self):
        yield from own_parameters(self.norm)

    def means(self, trained):
        if trained(self.norm, "weight"):
            yield self.inputs[0]

    def shape_of(self, x):
        return x if self.norm is None or self.norm.num_features == x[1] else None

    def plain(self, c, x):
        if self.norm is not None:
            scale, shift = fold(self.norm)
            # the norm may be wider than the map
            x = c.project((x * scale[:, None, None] + shift[:, None, None]).to(x.dtype))
        return plain_activation(x, self.act)

    def forward(self, c):
        x = c.dense[self.inputs[0]]
        size = tuple(x.shape[-2:])
        c.note(self, "size", size)
        affine = (None, None) if self.norm is None else c.affine(self, None)
        side = grid.side(c.method, size)
        y = c.consume(self, self.inputs[0])
        a, mean, slope = kernels.epilogue(y, *affine, self.act, side, None, self.out in c.needs)
        c.write(self.out, a, mean)
        if slope is not None:
            c.keep(self, "slope", slope)

    def backward(self, c, g):
        slope = c.kept(self, "slope")
        if slope is not None:
            g = g * slope
        c.add(self.inputs[0], g if self.norm is None else self._norm_backward(c, g))

    def _norm_backward(self, c, g):
        """In float32 at least, as the norm's parameters may be beside narrower maps."""
        dtype, g = g.dtype, g.to(kernels.wide(g.dtype))
        area = grid.areas(c.method, c.noted(self, "size"), g.dtype, g.device)
        fold = c.folded.of(self)
        g_shift = pixel_sum(g, area)
        c.parameter_gradient(self.norm, "bias", g_shift)
        if c.trained(self.norm, "weight"):
            product = pixel_sum(g * c.mean(self.inputs[0]), area)
            centred = product - g_shift * self.norm.running_mean
            c.parameter_gradient(self.norm, "weight", centred * fold.rstd)
        return (g * fold.scale[:, None, None]).to(dtype)


@dataclass
class Pool(Step):
    """A max-pool of a map, or the mean over all its pixels ([N, C, 1, 1])."""

    pool: MaxPool | None = None

    def shape_of(self, x):
        size = (1, 1) if self.pool is None else self.pool.size(x[2:])
        return (*x[:2], *size) if min(size) > 0 else None

    def plain(self, c, x):
        if self.pool is None:
            return x.mean((2, 3), keepdim=True)
        p = self.pool
        return F.max_pool2d(x, p.kernel, p.stride, p.padding, p.dilation)

    def forward(self, c):
        x = c.dense[self.inputs[0]]
        size = tuple(x.shape[-2:])
        c.note(self, "size", size)
        keep = self.out in c.needs
        if self.pool is None:
            return c.write(self.out, x.mean((2, 3), keepdim=True), None)
        p = self.pool
        sides = grid.side(c.method, size), grid.side(c.method, p.size(size))
        out, mean, route = kernels.max_pool(
            x, None, None, NONE, p.kernel, p.stride, p.padding, p.dilation, *sides, keep
        )
        c.write(self.out, out, mean)
        if keep:
            c.keep(self, "route", route)

    def backward(self, c, g):
        size = c.noted(self, "size")
        side = grid.side(c.method, size)
        count = tuple(-(-s // r) for s, r in zip(size, side, strict=True))
        if self.pool is None:
            g = (g / (size[0] * size[1])).expand(*g.shape[:2], *count)
            return c.add(self.inputs[0], g.contiguous(memory_format=torch.channels_last))
        first = self.pool.reach(size, side, grid.side(c.method, self.pool.size(size)))
        g = kernels.max_pool_grid_backward(g, c.kept(self, "route"), *first, count)
        c.add(self.inputs[0], g / grid.areas(c.method, size, g.dtype, g.device))


@dataclass
class Add(Step):
    """The sum of two maps."""

    def shape_of(self, a, b):
        return a if a == b else None

    def plain(self, c, a, b):
        return a + b

    def forward(self, c):
        a, b = (c.dense[v] for v in self.inputs)
        c.write(self.out, a + b, None)

    def backward(self, c, g):
        for v in self.inputs:
            c.add(v, g)


@dataclass
class Gate(Step):
    """A map times one factor per channel [N, C, 1, 1] (squeeze-excite), or [1, C, 1, 1]."""

    def means(self, trained):
        yield self.inputs[0]

    def shape_of(self, x, s):
        return x if s in ((*x[:2], 1, 1), (1, x[1], 1, 1)) else None

    def plain(self, c, x, s):
        return x * s

    def forward(self, c):
        x, s = (c.dense[v] for v in self.inputs)
        c.note(self, "size", tuple(x.shape[-2:]))
        mean = c.current_mean(self.inputs[0])
        c.write(self.out, x * s, None if mean is None else mean * s)
        if self.out in c.needs:
            c.keep(self, "gate", s)

    def backward(self, c, g):
        x, s = self.inputs
        size = c.noted(self, "size")
        if s in c.needs:
            area = grid.areas(c.method, size, g.dtype, g.device)
            pixels = (2, 3) if len(c.kept(self, "gate")) == len(g) else (0, 2, 3)
            c.add(s, (g * c.mean(x) * area).sum(pixels, keepdim=True))
        c.add(x, g * c.kept(self, "gate"))


@dataclass
class DropPath(Step):
    """Stochastic depth: one random factor per sample, drawn by the module itself."""

    module: nn.Module = None

    def plain(self, c, x):
        return self.module(x)

    def forward(self, c):
        x = c.dense[self.inputs[0]]
        mean = c.current_mean(self.inputs[0])
        if not self.module.training:
            return c.write(self.out, x, mean)
        factor = self.module(x.new_ones(len(x), 1, 1, 1))
        c.keep(self, "factor", factor)
        c.write(self.out, x * factor, None if mean is None else mean * factor)

    def backward(self, c, g):
        factor = c.kept(self, "factor")
        c.add(self.inputs[0], g if factor is None else g * factor)


@dataclass
class Concat(Step):
    """Maps side by side along the channels."""

    def shape_of(self, *xs):
        n, _, *size = xs[0]
        alike = all(x == (n, x[1], *size) for x in xs)
        return (n, sum(x[1] for x in xs), *size) if alike else None

    def plain(self, c, *xs):
        return torch.cat(xs, 1)

    def forward(self, c):
        xs = [c.dense[v] for v in self.inputs]
        c.note(self, "channels", [x.shape[1] for x in xs])
        c.write(self.out, torch.cat(xs, 1), None)

    def backward(self, c, g):
        for v, part in zip(self.inputs, g.split(c.noted(self, "channels"), 1), strict=True):
            c.add(v, part)


@dataclass
class Chunk(Step):
    """The index-th of `chunks` equal parts of the channels."""

    index: int = 0
    chunks: int = 1

    def shape_of(self, x: Shape):
        parts = torch.empty(0, x[1]).chunk(self.chunks, 1)
        return (x[0], parts[self.index].shape[1], *x[2:]) if self.index < len(parts) else None

    def plain(self, c, x):
        return x.chunk(self.chunks, 1)[self.index]

    def forward(self, c):
        x = c.dense[self.inputs[0]]
        c.note(self, "channels", x.shape[1])
        part = x.chunk(self.chunks, 1)[self.index]
        c.write(self.out, part.contiguous(memory_format=torch.channels_last), None)

    def backward(self, c, g):
        full = g.new_zeros(g.shape[0], c.noted(self, "channels"), *g.shape[2:])
        full.chunk(self.chunks, 1)[self.index].copy_(g)
        c.add(self.inputs[0], full)


@dataclass
class Shuffle(Step):
    """ShuffleNet's interleaving of channel groups."""

    groups: int = 1

    def shape_of(self, x):
        return x if x[1] % self.groups == 0 else None

    def plain(self, c, x):
        return shuffle(x, self.groups)

    def forward(self, c):
        c.write(self.out, shuffle(c.dense[self.inputs[0]], self.groups), None)

    def backward(self, c, g):
        c.add(self.inputs[0], shuffle(g, g.shape[1] // self.groups))


def shuffle(x: Tensor, groups: int) -> Tensor:
    y = x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    return y.contiguous(memory_format=torch.channels_last)

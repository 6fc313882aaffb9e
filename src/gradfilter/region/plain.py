"""A region at the layer level: what the engine must equal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradfilter import kernels
from gradfilter.patches import upsample
from gradfilter.region import grid
from gradfilter.region.lower import Region


class _Project(torch.autograd.Function):
    """The identity, whose gradient is replaced by its patch means."""

    @staticmethod
    def forward(ctx, x, side):
        ctx.side = side
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        size = tuple(g.shape[-2:])
        return upsample(kernels.eager.patch_mean(g, ctx.side), size, ctx.side), None


class Plain:
    """Dense maps under autograd, the gradient projected on the grid at every value."""

    def __init__(self, region: Region):
        self.region, self.method = region, region.method

    def batch_norm(self, norm: nn.Module) -> bool:
        return norm.training or norm.running_mean is None

    def project(self, x: Tensor) -> Tensor:
        if self.method is None:  # a region without a convolution has no grid
            return x
        return _Project.apply(x, grid.side(self.method, tuple(x.shape[-2:])))

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        values = {
            v: self.project(x) for v, x in zip(self.region.inputs, inputs, strict=True)
        }
        for step in self.region.steps:
            out = step.plain(self, *(values[v] for v in step.inputs))
            values[step.out] = self.project(out)
        # copies, for what follows may write in place, and a projection is a view
        return [values[v].clone() for v in self.region.outputs]


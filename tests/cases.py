"""The layer geometries and method settings that every suite runs over, listed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import gradfilter as gf
from gradfilter.layers import ConvOp


@dataclass(frozen=True)
class Case:
    """A convolution and the shape of its input."""

    op: ConvOp
    channels: int
    out: int
    size: tuple[int, int]
    batch: int = 2

    def tensors(self, seed: int = 0, dtype=torch.float64):
        """x, w, b, g"""
        noise = torch.Generator().manual_seed(seed)
        w_shape = (self.out, self.channels // self.op.groups, *self.op.kernel)
        x_shape = (self.batch, self.channels, *self.size)
        y_shape = self.op.output_shape(x_shape, self.out)
        shapes = (x_shape, w_shape, (self.out,), y_shape)
        return tuple(torch.randn(s, generator=noise, dtype=dtype) for s in shapes)


def _conv(k, stride=1, pad=0, dilation=1, groups=1):
    pair = lambda v: v if isinstance(v, tuple) else (v, v)  # noqa: E731
    pads = pad if isinstance(pad, tuple) else (pad,) * 4
    return ConvOp(pair(k), pair(stride), pads, pair(dilation), groups)


CONVS = {
    "3x3": Case(_conv(3, pad=1), 4, 6, (8, 8)),
    "3x3-odd": Case(_conv(3, pad=1), 4, 6, (9, 7)),
    "3x3-valid": Case(_conv(3), 4, 6, (9, 8)),
    "3x3-wide-pad": Case(_conv(3, pad=3), 2, 3, (6, 5)),
    "3x3-stride2": Case(_conv(3, stride=2, pad=1), 4, 6, (8, 8)),
    "3x3-stride2-odd": Case(_conv(3, stride=2, pad=1), 4, 6, (11, 9)),
    "3x3-stride2-same": Case(_conv(3, stride=2, pad=(0, 1, 0, 1)), 4, 6, (8, 10)),
    "5x5-stride3": Case(_conv(5, stride=3, pad=2), 3, 4, (13, 11)),
    "dilated": Case(_conv(3, pad=2, dilation=2), 4, 6, (9, 10)),
    "dilated4": Case(_conv(3, pad=4, dilation=4), 2, 4, (12, 12)),
    "groups": Case(_conv(3, pad=1, groups=2), 4, 6, (7, 7)),
    "depthwise": Case(_conv(3, pad=1, groups=6), 6, 6, (7, 9)),
    "depthwise-stride2": Case(_conv(5, stride=2, pad=2, groups=4), 4, 4, (14, 14)),
    "depthwise-multiplier": Case(_conv(3, pad=1, groups=3), 3, 6, (6, 6)),
    "1x1": Case(_conv(1), 5, 7, (7, 7)),
    "1x1-stride2": Case(_conv(1, stride=2), 5, 7, (8, 7)),
    "1x1-groups": Case(_conv(1, groups=2), 4, 6, (5, 5)),
    "2x2": Case(_conv(2), 3, 4, (7, 6)),
    "4x4-even-asymmetric": Case(_conv(4, pad=(1, 2, 1, 2)), 3, 4, (8, 8)),
    "4x4-patchify": Case(_conv(4, stride=4), 3, 5, (16, 12)),
    "1x7": Case(_conv((1, 7), pad=(0, 0, 3, 3)), 3, 4, (6, 9)),
    "mixed-strides": Case(_conv((3, 5), stride=(1, 2), pad=(1, 1, 2, 2)), 3, 4, (8, 9)),
    "tiny": Case(_conv(3, pad=1), 3, 4, (1, 1)),
    "below-the-patch": Case(_conv(3, pad=1), 3, 4, (2, 3)),
    "batch1": Case(_conv(3, pad=1), 4, 6, (8, 8), batch=1),
    "one-channel": Case(_conv(3, pad=1), 1, 1, (6, 6)),
}

LINEARS = {
    "2d": (5, 6),
    "3d": (3, 7, 6),
    "tokens": (2, 17, 6),
    "square": (2, 16, 6),
    "4d": (2, 5, 4, 6),
    "5d": (2, 3, 5, 4, 6),
}

# every method appears here; a new one is tested by being listed
METHODS = [
    gf.Exact(),
    gf.GradientFilter(patch=2),
    gf.GradientFilter(patch=4),
    gf.GradientFilter(patch=2, alignment="centred"),
    gf.GalerkinFilter(grid=7),
    gf.GalerkinFilter(grid=3),
    gf.GalerkinFilter(patch=2),
    gf.GalerkinFilter(patch=3),
    gf.Svd(energy=0.8),
    gf.Hosvd(energy=0.8),
    gf.SubspaceIteration(energy=0.8),
    gf.SubspaceIteration(rank=2),
    gf.WalshHadamard(patch=2, bases=3),
    gf.WalshHadamard(patch=4, bases=3),
    gf.Int8(),
    gf.Int8(gf.GalerkinFilter(grid=3)),
    gf.Int8(gf.SubspaceIteration(rank=2)),
]

# settings under which a method is exact backpropagation
EXACT = [
    gf.Exact(),
    gf.GalerkinFilter(patch=1),
    gf.GalerkinFilter(grid=64),
    gf.Svd(energy=1),
    gf.Hosvd(energy=1),
    gf.SubspaceIteration(energy=1),
    gf.SubspaceIteration(rank=64),
    gf.WalshHadamard(patch=2, bases=4),
    gf.WalshHadamard(patch=4, bases=16),
]


def conv_module(case: Case, dtype=torch.float64) -> nn.Module:
    """The case as an nn.Conv2d, behind nn.ZeroPad2d where its padding is not symmetric."""
    top, bottom, left, right = case.op.padding
    symmetric = case.op.symmetric
    conv = nn.Conv2d(
        case.channels,
        case.out,
        case.op.kernel,
        case.op.stride,
        (top, left) if symmetric else 0,
        case.op.dilation,
        case.op.groups,
        dtype=dtype,
    )
    return conv if symmetric else nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), conv)


def small_cnn(dtype=torch.float32) -> nn.Sequential:
    """A network with every kind of layer the methods take; input [N, 3, 12, 12]."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU6(),
        nn.Conv2d(8, 12, 1),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 10),
        nn.ReLU(),
        nn.Linear(10, 5),
    ).to(dtype)


class Fork(nn.Module):
    """Two layers that read the same map; input [N, 3, H, W]."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.a(x) + self.b(x)

"""The geometry of a layer: its forward map and its two exact gradients.

An op holds no tensors, so one small frozen object describes a layer to every method.
Names: x input, w weight, b bias, y output, g gradient at y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad as exact


@dataclass(frozen=True)
class ConvOp:
    """A 2-d convolution; `padding` is (top, bottom, left, right) zeros."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    kind = "conv"

    @property
    def symmetric(self) -> bool:
        top, bottom, left, right = self.padding
        return top == bottom and left == right

    @property
    def pointwise(self) -> bool:
        """True for a 1x1 layer: every output pixel reads the one input pixel below it."""
        return self.kernel == (1, 1) and self.padding == (0, 0, 0, 0)

    def output_size(self, x_size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of y."""
        pads = (self.padding[0] + self.padding[1], self.padding[2] + self.padding[3])
        return tuple(
            (size + pad - d * (k - 1) - 1) // s + 1
            for size, pad, k, s, d in zip(
                x_size, pads, self.kernel, self.stride, self.dilation, strict=True
            )
        )

    def output_shape(self, x_shape: tuple[int, ...], out: int) -> tuple[int, ...]:
        return (x_shape[0], out, *self.output_size(x_shape[-2:]))

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        x, pad = self._padded(x)
        return F.conv2d(x, w, b, self.stride, pad, self.dilation, self.groups)

    def grad_input(self, g: Tensor, w: Tensor, x_shape: tuple[int, ...]) -> Tensor:
        pad = (self.padding[0], self.padding[2])
        if self.symmetric:
            return exact.conv2d_input(
                x_shape, w, g, self.stride, pad, self.dilation, self.groups
            )
        n, c, h, width = x_shape
        top, bottom, left, right = self.padding
        padded = (n, c, h + top + bottom, width + left + right)
        gx = exact.conv2d_input(padded, w, g, self.stride, 0, self.dilation, self.groups)
        return gx[..., top : top + h, left : left + width]

    def grad_weight(self, g: Tensor, x: Tensor) -> Tensor:
        shape = (g.shape[1], x.shape[1] // self.groups, *self.kernel)
        x, pad = self._padded(x)
        return exact.conv2d_weight(x, shape, g, self.stride, pad, self.dilation, self.groups)

    def grad_bias(self, g: Tensor) -> Tensor:
        return g.sum((0, 2, 3))

    def macs(self, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> int:
        """Multiply-adds of one forward pass; each exact gradient costs the same."""
        y = self.output_shape(x_shape, w_shape[0])
        return math.prod(y) * math.prod(w_shape[1:])

    def _padded(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        top, bottom, left, right = self.padding
        if self.symmetric:
            return x, (top, left)
        return F.pad(x, (left, right, top, bottom)), (0, 0)


@dataclass(frozen=True)
class LinearOp:
    """A Linear layer over the last dimension of x, whatever stands before it."""

    kind = "linear"

    def output_shape(self, x_shape: tuple[int, ...], out: int) -> tuple[int, ...]:
        return (*x_shape[:-1], out)

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b)

    def grad_input(self, g: Tensor, w: Tensor, x_shape: tuple[int, ...]) -> Tensor:
        return g @ w

    def grad_weight(self, g: Tensor, x: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, x.shape[-1])

    def grad_bias(self, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).sum(0)

    def macs(self, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> int:
        return math.prod(x_shape[:-1]) * math.prod(w_shape)


Op = ConvOp | LinearOp

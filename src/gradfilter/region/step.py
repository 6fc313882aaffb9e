"""The steps of a program, each with three bodies of one meaning.

`plain` is the meaning: ordinary dense PyTorch under autograd, the layer level. `forward` computes
the same map and keeps patch statistics; `backward` carries the gradient on the patch grid.
Values are numbered; a step reads some and writes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradfilter.kernels.eager import ACTIVATIONS, pool_reach

Act = tuple[str, float]
NONE: Act = ("none", 0.0)
Pair = tuple[int, int]
Shape = tuple[int, ...]  # [N, C, H, W]
Parameter = tuple[nn.Module, str]


@dataclass
class Step:
    """Reads `inputs`, writes `out`."""

    out: int
    inputs: tuple[int, ...]

    def parameters(self) -> Iterator[Parameter]:
        """The parameters a step reads."""
        yield from ()

    def means(self, trained) -> Iterator[int]:
        """The inputs whose patch means the backward pass needs."""
        yield from ()

    def shape_of(self, x: Shape, *others: Shape) -> Shape | None:
        """The shape of what it writes; None where it cannot read maps of these shapes."""
        return x

    def plain(self, c, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, c) -> None:
        raise NotImplementedError

    def backward(self, c, g: Tensor) -> None:
        raise NotImplementedError


def own_parameters(*modules: nn.Module | None) -> Iterator[Parameter]:
    for module in modules:
        for name in ("weight", "bias"):
            if module is not None and getattr(module, name, None) is not None:
                yield module, name


@dataclass
class MaxPool:
    """Geometry of a max-pool."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def size(self, size: tuple[int, int]) -> tuple[int, int]:
        return tuple(
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, k, t, p, d in zip(
                size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    def reach(self, size, side_in, side_out):
        """`pool_reach` of both axes: the first input patches."""
        axes = zip(
            size, self.kernel, self.stride, self.padding, self.dilation, side_in, side_out,
            strict=True,
        )
        return [pool_reach(*axis)[0] for axis in axes]


def fold(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift of a batch norm in evaluation mode."""
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


def plain_activation(z: Tensor, act: Act) -> Tensor:
    name, parameter = act
    return z if name == "none" else ACTIVATIONS[name].f(z, parameter)

"""The frozen batch norms of a region, folded: all their channels in one vector, step after step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradfilter.region.step import Step

TINY = 1e-20  # stands for a gamma nearer to 0
Part = tuple[Step, nn.Module | None, nn.Module]  # a step, its convolution, its batch norm


class Folded:
    """gamma / sigma, 1 / sigma and the shift of every step with a frozen batch norm.

    A scale is never 0, so that it can be divided out again.
    """

    def __init__(self, parts: list[Part], begin: dict[int, int], read):
        """`read(module, name)` gives a parameter, or None where the module has none."""
        norms = [norm for _, _, norm in parts]
        variance = torch.cat([n.running_var for n in norms])
        gamma = torch.cat([_or_full(read, n, "weight", 1.0) for n in norms])
        beta = torch.cat([_or_full(read, n, "bias", 0.0) for n in norms])
        self.rstd = torch.rsqrt(variance + _epsilons(norms, variance))
        self.scale = torch.where(gamma.abs() < TINY, TINY, gamma).mul_(self.rstd)
        self.centre = torch.cat([_centre(read, conv, norm) for _, conv, norm in parts])
        self.shift = torch.addcmul(beta, self.centre, self.scale, value=-1)
        self.begin = begin  # see `begins`

    def affine(self, step: Step) -> tuple[Tensor, Tensor]:
        """Scale and shift of a step."""
        own = _own(step, self.begin)
        return self.scale[own], self.shift[own]

    def kept(self, first: int) -> list[Tensor]:
        """What the backward pass needs, of the channels from `first` on."""
        vectors = [self.scale, self.rstd, self.centre]
        return [v[first:].clone() for v in vectors] if first else vectors


class Fold(NamedTuple):
    """One step's part of the vectors."""

    scale: Tensor
    rstd: Tensor
    sums: Tensor  # of g over all pixels
    dots: Tensor  # of w with its gradient


class FoldedGradients:
    """Where the steps put what gamma, beta and the convolutions' biases get, all in two vectors."""

    def __init__(self, parts: list[Part], kept: list[Tensor]):
        self.parts, self.begin = parts, begins(parts)
        self.scale, self.rstd, self.centre = kept
        self.sums, self.dots = torch.empty_like(self.scale), torch.empty_like(self.scale)
        self.reached: set[int] = set()  # the steps whose convolution has put its sums and dots

    def of(self, step: Step) -> Fold:
        own = _own(step, self.begin)
        return Fold(*(v[own] for v in (self.scale, self.rstd, self.sums, self.dots)))

    def hand_out(self, c) -> None:
        """The gradients of the batch norms behind convolutions.

        A folded weight is w * scale: its gradient times w, over the scale, is that of the scale.
        """
        if not self.reached:
            return
        gamma = (self.dots / self.scale).addcmul_(self.sums, self.centre, value=-1)
        gamma.mul_(self.rstd)
        sizes = [norm.num_features for _, _, norm in self.parts]
        of_gamma, of_beta = gamma.split(sizes), self.sums.split(sizes)
        for (step, _, norm), g_gamma, g_beta in zip(self.parts, of_gamma, of_beta, strict=True):
            if step.out in self.reached:
                c.gradient(norm, "weight", g_gamma)
                c.gradient(norm, "bias", g_beta)


def begins(parts: list[Part]) -> dict[int, int]:
    """Where the channels of each step begin in the vectors."""
    found, at = {}, 0
    for step, _, norm in parts:
        found[step.out] = at
        at += norm.num_features
    return found


def _own(step: Step, begin: dict[int, int]) -> slice:
    at = begin[step.out]
    return slice(at, at + step.norm.num_features)


def _or_full(read, norm: nn.Module, name: str, value: float) -> Tensor:
    p = read(norm, name)
    return torch.full_like(norm.running_var, value) if p is None else p


def _centre(read, conv: nn.Module | None, norm: nn.Module) -> Tensor:
    """The mean the batch norm subtracts, less the bias of the convolution before it."""
    bias = None if conv is None else read(conv, "bias")
    return norm.running_mean if bias is None else norm.running_mean - bias


def _epsilons(norms: list[nn.Module], like: Tensor) -> Tensor | float:
    """The epsilon of every channel of these batch norms; one number where they agree."""
    first = norms[0].eps
    if all(n.eps == first for n in norms):
        return first
    return torch.cat([like.new_full((n.num_features,), n.eps) for n in norms])

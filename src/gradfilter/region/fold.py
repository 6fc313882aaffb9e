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

    def __init__(self, parts: list[Part], read):
        """`read(module, name)` gives a parameter, or None where the module has none."""
        norms = [norm for _, _, norm in parts]
        variance = torch.cat([n.running_var for n in norms])
        gamma = torch.cat([_or_full(read, n, "weight", 1.0) for n in norms])
        beta = torch.cat([_or_full(read, n, "bias", 0.0) for n in norms])
        self.rstd = torch.rsqrt(variance + _epsilons(norms, variance))
        self.scale = torch.where(gamma.abs() < TINY, TINY, gamma).mul_(self.rstd)
        self.centre = torch.cat([_centre(read, conv, norm) for _, conv, norm in parts])
        shift = torch.addcmul(beta, self.centre, self.scale, value=-1)
        sizes = [n.num_features for n in norms]
        pairs = zip(self.scale.split(sizes), shift.split(sizes), strict=True)
        self.affine = {step.out: pair for (step, _, _), pair in zip(parts, pairs, strict=True)}

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
        self.parts = parts
        self.scale, self.rstd, self.centre = kept
        self.sums, self.dots = torch.empty_like(self.scale), torch.empty_like(self.scale)
        sizes = [norm.num_features for _, _, norm in parts]
        vectors = (self.scale, self.rstd, self.sums, self.dots)
        split = zip(*(v.split(sizes) for v in vectors), strict=True)
        self.of = {step.out: Fold(*own) for (step, _, _), own in zip(parts, split, strict=True)}
        self.reached: set[int] = set()  # the steps whose convolution has put its sums and dots

    def hand_out(self, c) -> None:
        """The gradients of the batch norms behind convolutions.

        A folded weight is w * scale: its gradient times w, over the scale, is that of the scale.
        """
        if not self.reached:
            return
        gamma = (self.dots / self.scale).addcmul_(self.sums, self.centre, value=-1)
        gamma.mul_(self.rstd)
        sizes = [norm.num_features for _, _, norm in self.parts]
        for (step, _, norm), g_gamma in zip(self.parts, gamma.split(sizes), strict=True):
            if step.out in self.reached:
                c.gradient(norm, "weight", g_gamma)
                c.gradient(norm, "bias", self.of[step.out].sums)


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

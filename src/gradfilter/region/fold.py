"""The frozen batch norms of a region, folded: all their channels in one vector, step after step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradfilter.region.step import Step

TINY = 1e-20  # stands for a gamma nearer to 0
Part = tuple[Step, nn.Module | None, nn.Module]  # a step, its convolution, its batch norm


class Folding:
    """The batch norms of a region that are folded, and where their parameters stand in its list."""

    def __init__(self, parts: list[Part], position: dict[tuple[int, str], int]):
        self.parts, self.norms = parts, [norm for _, _, norm in parts]
        self.sizes = [norm.num_features for norm in self.norms]
        self.begin: dict[int, int] = {}  # where the channels of each step begin in the vectors
        for i, (step, _, _) in enumerate(parts):
            self.begin[step.out] = sum(self.sizes[:i])
        self.gamma, self.beta = (
            [position.get((id(norm), name)) for norm in self.norms] for name in ("weight", "bias")
        )
        self.bias = [position.get((id(conv), "bias")) for _, conv, _ in parts]

    def own(self, step: Step) -> slice:
        """A step's part of the vectors."""
        at = self.begin[step.out]
        return slice(at, at + step.norm.num_features)

    def reached(self, needs: frozenset[int]) -> tuple[list[Part], int]:
        """The parts from the first that a gradient reaches on; channels before it."""
        for i, (step, _, _) in enumerate(self.parts):
            if step.out in needs:
                return self.parts[i:], self.begin[step.out]
        return [], 0


class Folded:
    """gamma / sigma, 1 / sigma and the shift of every step with a frozen batch norm.

    A scale is never 0, so that it can be divided out again.
    """

    def __init__(self, folding: Folding, tensors: list[Tensor]):
        buffers = [norm._buffers for norm in folding.norms]
        variances = [own["running_var"] for own in buffers]
        variance = torch.cat(variances)
        gamma = torch.cat(_or_full(folding.gamma, tensors, variances, 1.0))
        beta = torch.cat(_or_full(folding.beta, tensors, variances, 0.0))
        self.rstd = torch.rsqrt(variance + _epsilons(folding.norms, variance))
        self.scale = torch.where(gamma.abs() < TINY, TINY, gamma).mul_(self.rstd)
        # the mean a batch norm subtracts, less the bias of the convolution before it
        means = [own["running_mean"] for own in buffers]
        pairs = zip(means, folding.bias, strict=True)
        self.centre = torch.cat([m if i is None else m - tensors[i] for m, i in pairs])
        self.shift = torch.addcmul(beta, self.centre, self.scale, value=-1)
        self.folding, self.begin = folding, folding.begin

    def affine(self, step: Step) -> tuple[Tensor, Tensor]:
        """Scale and shift of a step."""
        own = self.folding.own(step)
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

    def __init__(self, folding: Folding, kept: list[Tensor]):
        self.folding, self.begin = folding, folding.begin
        self.scale, self.rstd, self.centre = kept
        self.sums, self.dots = torch.empty_like(self.scale), torch.empty_like(self.scale)
        self.reached: set[int] = set()  # the steps whose convolution has put its sums and dots

    def of(self, step: Step) -> Fold:
        own = self.folding.own(step)
        return Fold(*(v[own] for v in (self.scale, self.rstd, self.sums, self.dots)))

    def hand_out(self, c) -> None:
        """The gradients of the batch norms behind convolutions.

        A folded weight is w * scale: its gradient times w, over the scale, is that of the scale.
        """
        if not self.reached:
            return
        gamma = (self.dots / self.scale).addcmul_(self.sums, self.centre, value=-1)
        gamma.mul_(self.rstd)
        folding = self.folding
        of_gamma, of_beta = gamma.split(folding.sizes), self.sums.split(folding.sizes)
        for i, (step, _, _) in enumerate(folding.parts):
            if step.out in self.reached:
                c.gradient(folding.gamma[i], of_gamma[i])
                c.gradient(folding.beta[i], of_beta[i])


def _or_full(
    positions: list[int | None], tensors: list[Tensor], like: list[Tensor], value: float
) -> list[Tensor]:
    pairs = zip(positions, like, strict=True)
    return [torch.full_like(t, value) if i is None else tensors[i] for i, t in pairs]


def _epsilons(norms: list[nn.Module], like: Tensor) -> Tensor | float:
    """The epsilon of every channel of these batch norms; one number where they agree."""
    first = norms[0].eps
    if all(n.eps == first for n in norms):
        return first
    return torch.cat([like.new_full((n.num_features,), n.eps) for n in norms])

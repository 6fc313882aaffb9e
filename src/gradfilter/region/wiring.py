"""What a region's backward pass has to do, worked out once for each set of trained parameters."""

from __future__ import annotations

from typing import NamedTuple

from gradfilter.region.fold import Folding
from gradfilter.region.lower import Region
from gradfilter.region.step import Parameter


class Wants(NamedTuple):
    """What is wanted of one step that has parameters."""

    gx: bool
    gw: bool  # of the (folded) weight: the weight's own or gamma's
    sums: bool  # the sum of g over all pixels
    gamma: bool
    bias: bool  # of a convolution


class Wiring:
    """Which values a gradient has to reach, and what is wanted on the way."""

    def __init__(
        self,
        region: Region,
        parameters: list[Parameter],
        folding: Folding | None,
        position: dict[tuple[int, str], int],
        flags: tuple[bool, ...],
    ):
        trained = flags[len(region.inputs) :]
        own = zip(parameters, trained, strict=True)
        self.trained = {(id(m), n) for (m, n), flag in own if flag}
        self.positions = frozenset(i for i, flag in enumerate(trained) if flag)
        found = {v for v, f in zip(region.inputs, flags, strict=False) if f}
        for step in region.steps:
            trained = any((id(m), n) in self.trained for m, n in step.parameters())
            if trained or any(v in found for v in step.inputs):
                found.add(step.out)
        self.needs = frozenset(found)  # the values that a gradient has to reach
        reached = [s for s in region.steps if s.out in found]
        # the folded batch norms from the first that a gradient reaches on, and channels before it
        parts, self.before = folding.reached(self.needs) if folding else ([], 0)
        self.folding = Folding(parts, position) if parts else None
        self.wanted = {v for s in reached for v in s.means(self.trains)}  # whose means are kept
        self.of = {s.out: self._wants(s) for s in reached if hasattr(s, "norm")}

    def trains(self, module, name: str) -> bool:
        return (id(module), name) in self.trained

    def _wants(self, step) -> Wants:
        module, norm = getattr(step, "module", None), step.norm
        gamma = self.trains(norm, "weight")
        return Wants(
            gx=step.inputs[0] in self.needs,
            gw=gamma or self.trains(module, "weight"),
            sums=any((id(m), n) in self.trained for m, n in step.parameters()),
            gamma=gamma,
            bias=self.trains(module, "bias"),
        )

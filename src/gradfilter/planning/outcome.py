"""What came of a search for a plan: the plan itself, and what it takes when it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from gradfilter import kept, stopwatch, trial
from gradfilter.convert import convert
from gradfilter.methods import Exact
from gradfilter.order import call
from gradfilter.plan import Plan
from gradfilter.planning.choice import Attempt, Choice, Held, Reason
from gradfilter.planning.knapsack import Solution
from gradfilter.planning.prices import clock
from gradfilter.planning.search import Key, Limits, Search, trained_links
from gradfilter.planning.worth import Likeness, gradients, likenesses
from gradfilter.region.grid import takes
from gradfilter.trial import Target

TIMED = 6  # steps of a plan; the best counts


class Outcome:
    """Makes a plan of a solution, and measures it.

    `batch` is the example and target that were given, `sized` those of a step.
    """

    def __init__(
        self,
        search: Search,
        batch: tuple[object, Target],
        sized: tuple[object, Target],
        device: torch.device,
    ):
        self.search, self.batch, self.sized, self.device = search, batch, sized, device
        self.chain, self.worths = search.chain, search.worths
        self.timed = "time" in search.limits

    def plan(self, solution: Solution) -> Plan:
        """The solution as a plan.

        The frozen layers before the first have a method of the grid: the engine runs them faster.
        """
        chosen = {i: (m, trained) for i, m, trained in _keys(solution)}
        methods = [chosen[i][0] for i in sorted(chosen)]
        grid = next((m for m in (*methods, self.chain.grid) if takes(m)), Exact())
        entries, front = {}, list(self.chain.front)
        for i, link in enumerate(self.chain.links):
            usual = grid if grid in link.methods else Exact()
            method, trained = chosen.get(i, (usual, False))
            entry = self.chain.entries[link.name]
            entries[link.name] = replace(entry, method=method, trained=trained)
            if not trained:
                front += [n for n in link.modules if i not in chosen or self._owns(n)]
        return Plan(entries, front)

    def _owns(self, name: str) -> bool:
        """Whether a module has parameters of its own."""
        return bool(list(self.chain.model.get_submodule(name).parameters(recurse=False)))

    def planned(self, solution: Solution) -> nn.Module:
        """A copy with the plan on it, in training mode."""
        self.chain.train(set(range(len(self.chain.links))))  # the plan freezes what it does not
        copied = self.chain.copy()
        convert(copied, self.plan(solution), example=self.chain.one)
        return copied.train()

    def attempt(self, solution: Solution, factors: Limits) -> Attempt:
        """What the solution was expected to take, and what it takes."""
        search, keys = self.search, _keys(solution)
        trained = sum(self.chain.links[i].bytes for i, _, trains in keys if trains)
        held = sum(search.held(*taken) for taken in search.walk(solution))
        copies = search.copies
        predicted = Held(held - copies * trained, min(1, copies) * trained,
                         max(0, copies - 1) * trained)  # fmt: skip
        seconds = search.costs.base + sum(map(search.seconds, keys))
        model = self.planned(solution)
        return Attempt(
            factors,
            predicted,
            factors["time"] * seconds if self.timed else None,
            self.held(model),
            self.seconds(model) if self.timed else None,
        )

    def held(self, model: nn.Module) -> Held:
        """Bytes that a real step holds: kept, gradients, and an optimizer's state."""
        example, target = self.sized
        with torch.enable_grad():
            call(model, self.chain.one)  # an engine makes its program now
        found = kept.measure(model, example, {x.name: x.kind for x in self.chain.links}).total
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.enable_grad():
            trial.loss_of(call(model, example), target).backward()
        copies = self.search.copies
        own = _bytes(p.grad for p in parameters) if copies else 0
        momentum = 0.9 if copies == 2 else 0.0
        kind = torch.optim.Adam if copies > 2 else torch.optim.SGD
        optimizer = kind(parameters, lr=0.0, **({} if copies > 2 else {"momentum": momentum}))
        optimizer.step()
        state = _bytes(t for s in optimizer.state.values() for t in s.values())
        state += max(0, copies - 3) * own  # of an optimizer that holds more than Adam
        optimizer.zero_grad(set_to_none=True)
        return Held(found, own, state)

    def seconds(self, model: nn.Module) -> float:
        """The best of a few steps."""
        step = stopwatch.Step(model, *self.sized, self.device, True, clock(self.device))
        return min(stopwatch.in_turns({"step": step}, TIMED)["step"]["step"])

    def peaks(self, model: nn.Module) -> dict[str, float]:
        """The highest point of a step and of inference, over the weights; the least of a few."""
        plain = trial.exact_copy(self.chain.model).eval()
        steps = {
            name: stopwatch.Step(m, *self.sized, self.device, trains=m is model)
            for name, m in (("step", model), ("inference", plain))
        }
        found, _ = stopwatch.peaks(steps, self.device)
        return {name: min(sizes) for name, sizes in found.items()}

    def choice(self, solution: Solution, attempts: list[Attempt], notes: list[str]) -> Choice:
        """The plan with the reasons for it."""
        model, made = self.planned(solution), self.plan(solution)
        peaks = self.peaks(model)
        chosen = trained_links(solution)
        found = gradients(self.chain, model, *self.batch, chosen=chosen)
        real = likenesses(found, self.worths.exact)
        total = sum(self.worths.energy) or 1.0
        limits, base = self.search.limits, self.search.base
        first = base[next(iter(limits))]
        return Choice(
            made.entries,
            made.front,
            memory=limits.get("memory"),
            time=limits.get("time"),
            value=solution.value / total,
            measured_value=sum(self.worths.value(i, real[i]) for i in chosen) / total,
            reasons=self._reasons(solution, real, total),
            attempts=attempts,
            frontier=[(first + cost, value / total) for cost, value in solution.frontier],
            peaks=peaks,
            pictures=len(next(iter(trial.tensors(self.batch[0])), ())),
            notes=notes,
        )

    def _reasons(self, solution: Solution, real: list[Likeness], total: float) -> list[Reason]:
        search = self.search
        return [
            Reason(
                self.chain.links[i].name,
                repr(method),
                trained,
                self.worths.energy[i] / total,
                search.expected(i, method, state).cosine if trained else None,
                real[i].cosine if trained else None,
                search.held((i, method, trained), state),
                search.seconds((i, method, trained)) if self.timed else None,
            )
            for (i, method, trained), state in reversed(search.walk(solution))
        ]


def _keys(solution: Solution) -> list[Key]:
    """Link, method and whether it is trained, from the output layer on."""
    return [option.key for option in solution.options]


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    held = [t for t in tensors if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in held)

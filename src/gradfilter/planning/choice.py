"""A plan that was chosen within a budget, with the reasons for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gradfilter import tables
from gradfilter.plan import FROZEN, Plan
from gradfilter.planning.amounts import TOLD
from gradfilter.region.grid import takes

MIB = 2**20
EXAMPLE = "measured with the engine: give convert an example, without one a step takes more"


@dataclass(frozen=True)
class Reason:
    """Why a layer has its method.

    `energy` is its share of the energy of all layers' exact gradients; `fidelity` the cosine that
    was expected of its gradient, and `measured` the one it has; `memory` in bytes and `seconds`
    are what it was expected to take.
    """

    name: str
    method: str
    trained: bool
    energy: float
    fidelity: float | None
    measured: float | None
    memory: int
    seconds: float | None


@dataclass(frozen=True)
class Held:
    """Bytes that training holds beyond the weights, beside the working maps of a forward pass."""

    kept: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        return self.kept + self.gradients + self.state


@dataclass(frozen=True)
class Attempt:
    """One plan: what was predicted of it, and what was measured.

    `factors` are those by which earlier plans had missed their predictions; of time they are in
    the prediction.
    """

    factors: dict[str, float]
    predicted: Held
    predicted_seconds: float | None
    measured: Held
    measured_seconds: float | None

    def over(self, limits: dict[str, float]) -> dict[str, float]:
        """By how much the plan is over each budget that it breaks."""
        taken = {"memory": self.measured.total, "time": self.measured_seconds}
        return {k: taken[k] - limit for k, limit in limits.items() if taken[k] > limit}

    def missed(self, name: str) -> float:
        """What was measured over what was predicted; memory predictions carry no factor."""
        if name == "time":
            return self.measured_seconds / self.predicted_seconds
        return self.measured.total / self.predicted.total / self.factors[name]


@dataclass(repr=False)
class Choice(Plan):
    """The best plan within a budget: `convert` takes it, `save` writes it as any plan.

    `value` is the expected share of the learning of exact training of all layers, `measured_value`
    the share this plan has on the batch. `attempts` has every solution that was measured, the last
    is this plan. `over` is by how much that is over its budget, bytes of "memory" and seconds of
    "time"; empty where it keeps to it. `frontier` has the best value (share) for less of the first
    budget. `peaks` are bytes over the weights at the highest point of a step and of inference,
    working maps included.
    """

    memory: float | None = None
    time: float | None = None
    value: float = 0.0
    measured_value: float = 0.0
    reasons: list[Reason] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    frontier: list[tuple[float, float]] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    pictures: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def final(self) -> Attempt:
        return self.attempts[-1]

    @property
    def limits(self) -> dict[str, float]:
        """The budgets that were given."""
        both = {"memory": self.memory, "time": self.time}
        return {name: limit for name, limit in both.items() if limit is not None}

    @property
    def over(self) -> dict[str, float]:
        return self.final.over(self.limits)

    def over_told(self) -> str:
        """One line that says by how much the plan is over its budget."""
        parts = [
            f"{TOLD[name](more)} of {name} over the budget of {TOLD[name](self.limits[name])} "
            f"({more / self.limits[name]:.1%})"
            for name, more in self.over.items()
        ]
        count = len(self.attempts)
        return f"the plan is {' and '.join(parts)}, after {count} attempt{'s' * (count > 1)}"

    def to_dict(self) -> dict:
        names = ("memory", "time", "over", "value", "measured_value", "reasons", "attempts",
                 "frontier", "peaks", "pictures", "notes")  # fmt: skip
        layers = {name: str(entry) for name, entry in self.items()}
        return {"layers": layers} | {name: tables.plain(getattr(self, name)) for name in names}

    def table(self) -> str:
        """Why each layer has its method, and the budget against what was measured."""
        parts = [self._layers(), self._budget(), "\n".join(self._told())]
        return "\n\n".join(parts)

    __str__ = __repr__ = table

    def _layers(self) -> str:
        timed = self.final.predicted_seconds is not None
        head = ("layer", "method", "energy", "fidelity", "measured", "memory, KB")
        rows = [(*head, "time, ms") if timed else head]
        for r in self.reasons:
            cells = (
                r.name or "(the model itself)",
                r.method if r.trained else f"frozen ({r.method})",
                f"{r.energy:.1%}",
                *("-" if c is None else f"{c:.3f}" for c in (r.fidelity, r.measured)),
                f"{r.memory / 1024:.1f}",
            )
            rows.append((*cells, f"{1e3 * (r.seconds or 0):.2f}") if timed else cells)
        before = len(self) - len(self.reasons)
        told = f"\n{before} layers before them are frozen" if before else ""
        return tables.aligned(rows, left=2) + told

    def _budget(self) -> str:
        rows = [("", "budget", "predicted", "measured", "measured / budget")]
        a = self.final
        spans = [("memory, MB", self.memory, a.predicted.total, a.measured.total, MIB)]
        spans += [
            (f"  {what}, MB", None, getattr(a.predicted, what), getattr(a.measured, what), MIB)
            for what in ("kept", "gradients", "state")
        ]
        if a.measured_seconds is not None:
            spans.append(("time, ms", self.time, a.predicted_seconds, a.measured_seconds, 1e-3))
        for name, budget, predicted, measured, unit in spans:
            cells = ("-" if v is None else f"{v / unit:.2f}" for v in (budget, predicted, measured))
            rows.append((name, *cells, f"{measured / budget:.2f}" if budget else "-"))
        return tables.aligned(rows)

    def _told(self) -> list[str]:
        told = [
            f"expected learning: {self.value:.1%} of exact training of all layers "
            f"({self.measured_value:.1%} measured on these {self.pictures} pictures)"
        ]
        if len(self.attempts) > 1:
            told.append(
                f"{len(self.attempts)} plans were measured: predictions were corrected after each "
                "that did not keep to the budget"
            )
        if self.peaks:
            of = ", ".join(f"{name} {size / MIB:.1f} MB" for name, size in self.peaks.items())
            told.append(f"peak over the weights, working maps included: {of}")
        if any(takes(entry.method) for entry in self.values()):
            told.append(EXAMPLE)
        return told + self.notes + ([self.over_told()] if self.over else [])

    def plot(self, path: str | Path) -> None:
        """Memory of every layer by what is done with it, and what other budgets would give."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 4.6), dpi=150, layout="constrained")
        layers, budgets = figure.subplots(1, 2, width_ratios=(2, 1))
        self._plot_layers(layers)
        self._plot_frontier(budgets)
        for axes in (layers, budgets):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)

    def _plot_layers(self, axes) -> None:
        kinds = [r.method if r.trained else FROZEN for r in self.reasons]
        for kind in dict.fromkeys(kinds):
            places = [i for i, k in enumerate(kinds) if k == kind]
            sizes = [self.reasons[i].memory / MIB for i in places]
            axes.bar(places, sizes, label=kind, color="0.75" if kind == FROZEN else None)
        axes.set(xlabel="layer, from the first trained to the last", ylabel="memory, MB")
        axes.set_ylim(0, 1.3 * max(r.memory / MIB for r in self.reasons))  # room for the legend
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
        energy = axes.twinx()
        shares = [100 * r.energy for r in self.reasons]
        energy.plot(shares, "k.", markersize=4)
        energy.set_ylim(0, 1.3 * max(shares) or 1)
        energy.set_ylabel("share of gradient energy, % (dots)")
        energy.spines[["top"]].set_visible(False)

    def _plot_frontier(self, axes) -> None:
        unit, name = (MIB, "memory, MB") if self.memory else (1e-3, "time, ms")
        a = self.final
        here = a.predicted.total if self.memory else a.predicted_seconds
        axes.step([c / unit for c, _ in self.frontier], [100 * v for _, v in self.frontier],
                  where="post")  # fmt: skip
        axes.plot([here / unit], [100 * self.value], "o", label="this plan")
        axes.set(xlabel=name, ylabel="expected learning, % of exact training of all layers")
        axes.legend(frameon=False)

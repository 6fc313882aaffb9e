"""What a comparison found: scores over the seeds, costs, and what is cheapest within noise."""

from __future__ import annotations

import csv
import io
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from gradfilter import tables
from gradfilter.profiler import Spread
from gradfilter.recipes.contenders import Contender
from gradfilter.recipes.measuring import Measured
from gradfilter.recipes.recording import Row

DONE, FAILED, STARTED, WAITING = "done", "failed", "started", "waiting"
ONE_SEED = 0.01  # what counts as near where a single seed shows no noise
ERRORS = 2  # standard errors of a difference that pass for noise


@dataclass(frozen=True)
class Cost:
    """A way to count what a step costs."""

    key: str
    title: str
    unit: str
    scale: float  # of the unit, in what `Measured` counts in

    def of(self, measured: Measured) -> float | None:
        value = getattr(measured, self.key)
        value = value.median if isinstance(value, Spread) else value
        return None if value is None else value / self.scale


COSTS = (
    Cost("kept_bytes", "kept memory", "MiB", 2**20),
    Cost("seconds", "step time", "ms", 1e-3),
    Cost("backward_macs", "backward multiply-adds", "million", 1e6),
    Cost("peak_bytes", "peak memory", "MiB", 2**20),
)


@dataclass(frozen=True)
class Run:
    """One training run; a row is as in `report.Result`."""

    seed: int
    folder: str
    status: str
    rows: list[Row]
    seconds: float | None = None
    failure: str | None = None
    command: str = ""


@dataclass(frozen=True)
class Entry:
    """A contender with its costs and runs; scores are of runs to their end, by `metric`."""

    contender: Contender
    measured: Measured
    runs: list[Run]
    metric: str

    @property
    def scores(self) -> list[float]:
        return [r.rows[-1][f"test_{self.metric}"] for r in self.runs if r.status == DONE]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def whole(self) -> bool:
        """Whether all runs came to their end."""
        return all(r.status == DONE for r in self.runs)

    @property
    def label(self) -> str:
        return f"{self.contender.title}, {self.contender.depth}"

    def to_dict(self) -> dict:
        about = {key: getattr(self.contender, key) for key in ("title", "depth", "name", "exact")}
        about |= {"method": self.contender.method, "spelled": self.contender.spelled}
        about |= {"knobs": dict(self.contender.knobs), "last": self.contender.last}
        score = {key: getattr(self, key) for key in ("scores", "mean", "deviation", "whole")}
        costs = {cost.key: cost.of(self.measured) for cost in COSTS}
        return about | score | {"costs": costs, "runs": self.runs, "measured": self.measured}


@dataclass(frozen=True)
class Verdict:
    """The cheapest entry that is within noise of the best exact one, by one cost."""

    cost: Cost
    entry: Entry
    reference: Entry
    noise: float
    near: str  # what the claim is, see `Comparison.near`

    @property
    def difference(self) -> float:
        """Of the mean scores; below 0 where exact is better."""
        return self.entry.mean - self.reference.mean

    @property
    def saving(self) -> float | None:
        """How many times the reference costs as much."""
        ours, theirs = (self.cost.of(e.measured) for e in (self.entry, self.reference))
        return theirs / ours if ours else None

    def __str__(self) -> str:
        start, unit = f"least {self.cost.title} within {self.near}:", self.cost.unit
        ours, theirs = (self.cost.of(e.measured) for e in (self.entry, self.reference))
        if self.entry is self.reference:
            return f"{start} {self.entry.label} itself, nothing cheaper"
        return (
            f"{start} {self.entry.label}, {ours:.4g} {unit} against {theirs:.4g} {unit} of "
            f"{self.reference.label}"
            + (f" ({self.saving:.3g}x less)" if self.saving else "")
            + f"; {100 * self.difference:+.1f} points, where {100 * self.noise:.1f} pass for equal"
        )


@dataclass(frozen=True)
class Comparison:
    """All contenders on one model and one data set; see `comparing.compare`."""

    about: dict[str, object]  # model, data, pictures, settings that all runs share, date
    metric: str
    entries: list[Entry]
    inference: Spread
    environment: dict[str, object]
    command: str
    notes: list[str] = field(default_factory=list)

    @property
    def reference(self) -> Entry | None:
        """The exact contender with the best mean, of those whose runs are all done."""
        exact = [e for e in self.entries if e.contender.exact and e.whole]
        return max(exact, key=lambda e: e.mean, default=None)

    def noise(self, entry: Entry) -> float:
        """How far below the reference a mean may be and still pass for equal.

        Two standard errors of the difference of the means, and for a share of the test pictures
        no less than one of them; with one seed nothing shows the noise, and it is a point.
        """
        pair = (entry, self.reference)
        if any(e.deviation is None for e in pair):
            return ONE_SEED
        error = math.sqrt(sum(e.deviation**2 / len(e.scores) for e in pair))
        shares = self.about["task"] == "classification"
        return max(ERRORS * error, 1 / self.about["test_pictures"] if shares else 0.0)

    @property
    def near(self) -> str:
        """What a contender within noise is within: one seed shows no noise."""
        one = len(self.about["seeds"]) < 2
        return f"{100 * ONE_SEED:g} point of exact" if one else "noise of exact"

    def within_noise(self, entry: Entry) -> bool:
        reference = self.reference
        if reference is None or not entry.whole:
            return False
        return entry.mean >= reference.mean - self.noise(entry)

    def verdict(self, cost: Cost) -> Verdict | None:
        """The cheapest within noise of exact; None without an exact contender or that cost."""
        near = [e for e in self.entries if self.within_noise(e) and cost.of(e.measured) is not None]
        if not near:
            return None
        best = min(near, key=lambda e: cost.of(e.measured))
        return Verdict(cost, best, self.reference, self.noise(best), self.near)

    @property
    def verdicts(self) -> list[Verdict]:
        return [v for cost in COSTS if (v := self.verdict(cost))]

    def count(self, status: str) -> int:
        return sum(r.status == status for e in self.entries for r in e.runs)

    def to_dict(self) -> dict:
        """Everything, as dicts, lists and values that JSON has."""
        own = ("about", "metric", "near", "inference", "environment", "command", "notes")
        return tables.plain(
            {key: getattr(self, key) for key in own}
            | {
                "counts": {s: self.count(s) for s in (DONE, FAILED, STARTED, WAITING)},
                "costs": COSTS,
                "reference": self.reference and self.reference.contender.name,
                "verdicts": [_told(v) for v in self.verdicts],
                "entries": [
                    e.to_dict()
                    | {"within_noise": self.within_noise(e)}
                    | {"noise": self.noise(e) if self.reference and e.scores else None}
                    for e in self.entries
                ],
            }
        )

    def table(self) -> str:
        """One line a contender, and what is cheapest within noise of exact."""
        rows = [("method", "layers", f"{self.metric} %", "runs", *(_head(c) for c in COSTS), "")]
        for e in self.entries:
            costs = (_cell(c.of(e.measured)) for c in COSTS)
            near = f"within {self.near}" if self.within_noise(e) else ""
            c = e.contender
            rows.append((c.title, c.depth, _score(e), _runs(e), *costs, near))
        lines = [tables.aligned(rows, left=2)]
        lines += [str(v) for v in self.verdicts] or ["no exact run is done to compare with"]
        return "\n".join([*lines, *self._failures()])

    __str__ = table

    def _failures(self) -> list[str]:
        return [
            f"failed: {e.label}, seed {r.seed}: {r.failure}"
            for e in self.entries
            for r in e.runs
            if r.status == FAILED
        ]

    def csv(self) -> str:
        """One line a run."""
        text = io.StringIO()
        costs = [f"{c.title.replace(' ', '_')}_{c.unit}" for c in COSTS]
        head = ["method", "last", "seed", "status", self.metric, "best", "train_seconds", *costs]
        table = csv.writer(text, lineterminator="\n")
        table.writerow([*head, "failure"])
        for e in self.entries:
            spent = [_number(c.of(e.measured)) for c in COSTS]
            for r in e.runs:
                table.writerow([*self._line(e, r), *spent, r.failure or ""])
        return text.getvalue()

    def _line(self, e: Entry, r: Run) -> list:
        scores = [row[f"test_{self.metric}"] for row in r.rows if row["step"]]
        end = scores[-1] if r.status == DONE else None
        last = e.contender.depth if e.contender.plan else e.contender.last or "all"
        found = (_number(v) for v in (end, max(scores, default=None), r.seconds))
        return [e.contender.spelled, last, r.seed, r.status, *found]

    def plot(self, path: str | Path) -> None:
        """Scores against three costs, means with the deviation over seeds."""
        from gradfilter.recipes.picture import draw

        draw(self, path)


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, score): those that none beats by both, from cheap to dear."""
    best: list[tuple[float, float]] = []
    for cost, score in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or score > best[-1][1]:
            best.append((cost, score))
    return best


def _told(v: Verdict) -> dict:
    return {
        "cost": v.cost.key,
        "entry": v.entry.contender.name,
        "reference": v.reference.contender.name,
        "difference": v.difference,
        "noise": v.noise,
        "saving": v.saving,
        "text": str(v),
    }


def _head(cost: Cost) -> str:
    return f"{cost.title}, {cost.unit}"


def _cell(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.8g}"


def _score(e: Entry) -> str:
    if e.mean is None:
        return "-"
    spread = "" if e.deviation is None else f" ± {100 * e.deviation:.1f}"
    return f"{100 * e.mean:.1f}{spread}"


def _runs(e: Entry) -> str:
    return f"{len(e.scores)}/{len(e.runs)}"

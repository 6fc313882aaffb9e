"""What a run came to, and how it is told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import gradfilter as gf
from gradfilter.recipes.datasets import Data
from gradfilter.recipes.gain import Gain
from gradfilter.recipes.recording import Row
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Trainer

LEFT_OUT = (
    "every epoch leaves one picture out, each time another: alone in the last batch it would be "
    "too few for the statistics of batch norms"
)


@dataclass(frozen=True)
class Result:
    """What a run came to; a row has epoch, step, lr, train_loss, test_<metric>..., seconds."""

    out: Path
    headline: str  # the metric that counts
    rows: list[Row]  # one an evaluation; the first is from before training
    best: Row
    seconds: float  # of all steps together
    gain: Gain | None
    plan: gf.Plan

    @property
    def before(self) -> float:
        return self.rows[0][f"test_{self.headline}"]

    @property
    def after(self) -> float:
        return self.best[f"test_{self.headline}"]


def best_of(rows: list[Row], headline: str) -> Row:
    """The best row after some training: by the metric that counts, among equals by the loss."""

    def worth(row: Row) -> tuple[float, float]:
        values = row[f"test_{headline}"], -row["test_loss"]
        return tuple(-math.inf if math.isnan(v) else v for v in values)

    return max([row for row in rows if row["step"]] or rows, key=worth)


def greeting(settings: Settings, data: Data, trainer: Trainer) -> str:
    """What is about to be done."""
    s, plan = settings, trainer.plan
    kinds = sorted({repr(m) for m in plan.converted.values()})
    how = f"{len(plan.converted)} by {', '.join(kinds)}" if kinds else "all exactly"
    how = how if trained_layers(plan) else "only norms and what else has parameters"
    part = f" (part {s.part} of {s.parts}, {s.split})" if s.split else ""
    share = trainer.settings.backbone_lr
    slower = "" if share == 1 else f"; all but the output layer at {share:g} of the learning rate"
    alone = len(data.train) > trainer.batch * trainer.epoch_steps(len(data.train))
    return (
        f"{data.name}{part}: {len(data.train):,} pictures to train on, {len(data.test):,} to "
        f"test, {len(data.classes)} classes\n"
        + (f"{data.unread}\n" if data.unread else "")
        + f"{s.model}, weights: {trainer.network.weights}; {trainer.size} px, "
        f"{trainer.batch} a step, on {trainer.device}\n"
        f"{len(trained_layers(plan))} of {len(plan)} layers trained, {how}{slower}"
        + (f"\n{LEFT_OUT}" if alone else "")
    )


def told(row: Row, epochs: float) -> str:
    """An evaluation in a line."""
    when = f"epoch {row['epoch']:.4g}/{epochs:.4g}" if row["step"] else "before training"
    tests = [
        f"{name} {value:.4f}" if name == "loss" else f"{name} {value:.1%}"
        for key, value in row.items()
        if (name := key.removeprefix("test_")) != key and not name.startswith("iou ")
    ]
    loss = "" if math.isnan(row["train_loss"]) else f"loss {row['train_loss']:.4f}; "
    return f"{when}: {loss}test {', '.join(tests)}"


def trained_layers(plan: gf.Plan) -> list[str]:
    return [name for name, entry in plan.items() if entry.trained]


def nothing_gained(result: Result) -> str:
    """Why that may be, where the number that counts did not rise."""
    if result.before == 1:
        return "nothing gained: on these test pictures all was right before training"
    return f"nothing gained: {advice(result.plan)}"


def advice(plan: gf.Plan) -> str:
    """What to try after a run that gained nothing."""
    names = trained_layers(plan)
    if len(names) > 1:
        return "try a smaller --lr, or fewer layers with --last"
    told = f"of {len(plan)} layers only {names[0]} was" if names else "no layer was"
    return f"{told} trained; train more, with a larger --last or a plan for a larger budget"


def summary(result: Result) -> str:
    """What the run gained, at what cost, and where it is."""
    steps = int(result.rows[-1]["step"])
    lines = [
        f"{result.headline} {result.before:.1%} -> {result.after:.1%} "
        f"(epoch {result.best['epoch']:.4g}); {steps} steps in {result.seconds:.1f} s, "
        f"{1e3 * result.seconds / max(1, steps):.0f} ms each",
        *([] if result.after > result.before else [nothing_gained(result)]),
        *([str(result.gain)] if result.gain else []),
        f"run: {result.out}",
    ]
    return "\n".join(lines)

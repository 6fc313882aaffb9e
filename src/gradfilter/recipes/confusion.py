"""Which classes are taken for which: counting, and what follows from the counts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

Tally = dict[str, Tensor]  # sums, so that those of several processes can be added

NAMED = 60  # classes up to which a picture names them all


def tally(classes: int) -> Tally:
    """Nothing counted yet: who is taken for whom, the sum of losses, and how many they are."""
    return {
        "confusion": torch.zeros(classes, classes, dtype=torch.int64),
        "loss": torch.zeros((), dtype=torch.float64),
        "count": torch.zeros((), dtype=torch.int64),
    }


def count(truth: Tensor, found: Tensor, classes: int) -> Tensor:
    """Confusion matrix [truth, found] of two tensors of classes, all within range."""
    pairs = truth.flatten().long() * classes + found.flatten().long()
    return torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def accuracy(confusion: Tensor) -> float:
    """Share of the diagonal."""
    return float(confusion.diag().sum().double() / confusion.sum())  # nan where nothing was counted


def iou(confusion: Tensor) -> Tensor:
    """Intersection over union of every class [C]; nan where a class is neither there nor found."""
    both = confusion.diag().double()
    return both / (confusion.sum(0) + confusion.sum(1) - both)


def check(target: Tensor, classes: int, ignore: int | None) -> None:
    """Refuse labels that are no class."""
    wrong = (target < 0) | (target >= classes)
    if ignore is not None:
        wrong &= target != ignore
    if wrong.any():
        bad = ", ".join(map(str, target[wrong].unique()[:3].tolist()))
        beside = "" if ignore is None else f", or {ignore} to be ignored"
        raise ValueError(f"label {bad} is outside 0..{classes - 1}{beside}")


def picture(confusion: Tensor, classes: tuple[str, ...], path: Path) -> Path:
    """Draw a confusion matrix, each row as shares of its class."""
    from matplotlib.figure import Figure

    confusion = confusion.double().cpu()
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    side = min(max(4.0, 0.32 * len(classes)), 16) + 2
    figure = Figure(figsize=(side, 0.9 * side), dpi=120, layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(100 * shares.numpy(), cmap="Blues", vmin=0, vmax=100)
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(f"{accuracy(confusion):.1%} of {int(confusion.sum()):,} pictures right")
    if len(classes) <= NAMED:
        names = map(drawable, classes)
        short = [name if len(name) <= 24 else f"{name[:22]}.." for name in names]
        # a dollar in the name of a folder begins no formula
        look = {"fontsize": 9 if len(classes) <= 30 else 7, "parse_math": False}
        axes.set_xticks(range(len(classes)), short, rotation=90, **look)
        axes.set_yticks(range(len(classes)), short, **look)
    if len(classes) <= 20:
        _numbers(axes, shares)
    figure.colorbar(drawn, shrink=0.6, label="% of the true class")
    figure.savefig(path)
    return path


def drawable(name: str) -> str:
    """A class name with marks for what is no text: a folder's name may be any bytes."""
    return name.encode(errors="replace").decode()


def _numbers(axes, shares: Tensor) -> None:
    """The share in every cell that has one."""
    for row, values in enumerate(shares.tolist()):
        for column, share in enumerate(values):
            if share >= 0.005:
                colour = "white" if share > 0.5 else "black"
                text = f"{100 * share:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)

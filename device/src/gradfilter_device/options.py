"""How a run trains."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, fields

from gradfilter_device.exported import Unusable

REFERENCE_BATCH = 128  # images a step that a learning rate is given for
LARGEST = 2**31 - 1  # of whole numbers


@dataclass(frozen=True)
class Options:
    """How a run trains; fixed when it starts."""

    epochs: int = 10
    batch: int = 8
    lr: float = 0.05
    warmup: float = 0.1
    seed: int = 0
    augment: bool = True

    def __post_init__(self):
        of = asdict(self)
        whole = {name: type(of[name]) is int for name in ("epochs", "batch", "seed")}
        number = {name: type(of[name]) in (int, float) for name in ("lr", "warmup")}
        counted = f"a whole number from 1 to {LARGEST}"
        wanted = {
            "epochs": (whole["epochs"] and 1 <= self.epochs <= LARGEST, counted),
            "batch": (whole["batch"] and 1 <= self.batch <= LARGEST, counted),
            "lr": (number["lr"] and 0 <= self.lr <= sys.float_info.max, "a number >= 0"),
            "warmup": (number["warmup"] and 0 <= self.warmup <= 1, "a number from 0 to 1"),
            "seed": (whole["seed"], "a whole number"),
            "augment": (type(self.augment) is bool, "true or false"),
        }
        for name, (right, told) in wanted.items():
            if not right:
                raise Unusable(f"{name} must be {told}, not {of[name]!r}")

    @staticmethod
    def of(recipe: dict) -> Options:
        """By their names; refuses one that is not known."""
        known = {f.name for f in fields(Options)}
        for name in recipe:
            if name not in known:
                raise Unusable(f"the recipe of the export has {name!r}, which is not known here")
        return Options(**recipe)

    @property
    def peak(self) -> float:
        """The highest learning rate of a step."""
        return self.lr * self.batch / REFERENCE_BATCH

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step: rises over the warm-up, then falls as a cosine to 0."""
        rising = round(self.warmup * total)
        if step < rising:
            return self.peak * (step + 1) / (rising + 1)
        return self.peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))

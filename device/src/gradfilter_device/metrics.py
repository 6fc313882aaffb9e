"""How often a network is right; what is counted and what follows is as in `gradfilter train`."""

from __future__ import annotations

import numpy as np


def counts(truth: np.ndarray, found: np.ndarray, classes: int) -> np.ndarray:
    """How often each class is found where it is, is there, and is found [3, classes].

    A negative label does not count.
    """
    known = truth >= 0
    truth, found = truth[known], found[known]
    sets = truth[truth == found], truth, found
    return np.stack([np.bincount(some, minlength=classes) for some in sets])


def metrics(counted: np.ndarray, masks: bool) -> dict[str, float]:
    """The one that counts comes first: the share that is right, or of masks the mean IoU.

    A class that is neither there nor found has no part in the mean.
    """
    right, there, found = counted
    share = float(right.sum() / there.sum())
    if not masks:
        return {"accuracy": share}
    union = there + found - right
    return {"miou": float((right / union.clip(1))[union > 0].mean()), "pixel_accuracy": share}


def told(row: dict) -> str:
    """A row of a run in a line."""
    shares = [f"{k} {v:.1%}" for k, v in row.items() if k not in ("epoch", "step", "loss")]
    return f"epoch {row['epoch']:g}: loss {row['loss']:.3f}, {', '.join(shares)}"

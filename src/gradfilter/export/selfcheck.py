"""A few steps of PyTorch itself, for a device to compare its own with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradfilter.export.optimizers import State

CHECK_STEPS, CHECK_RATE = 3, 0.01
SUMS = 4  # of a change with random signs: that all are near 0, whatever its own, is unlikely
CHUNK = 2**20  # elements of a tensor that are taken at once


def check(step, start: dict[str, State], images: Tensor, targets: Tensor, outputs: int) -> dict:
    """Losses of steps on noise, and how far these moved every tensor.

    `start` has the `parameters` and the `state` as the step takes them; of the images and targets
    only shapes and types count.
    """
    random = np.random.RandomState(0)  # whose stream NumPy keeps fixed
    noise = torch.from_numpy(random.standard_normal(tuple(images.shape))).to(images.dtype)
    labels = torch.from_numpy(random.randint(outputs, size=tuple(targets.shape))).long()
    first = start["parameters"] | start["state"]
    now, losses = list(first.values()), []
    rate = torch.tensor(CHECK_RATE, dtype=images.dtype)
    for _ in range(CHECK_STEPS):
        *now, loss = step(*now, rate, noise, labels)[: len(now) + 1]
        losses.append(float(loss))
    pairs = zip(first.items(), now, strict=True)
    moves = {n: moved(old.numpy(), new.numpy(), i) for i, ((n, old), new) in enumerate(pairs)}
    return {"images": len(images), "rate": CHECK_RATE, "losses": losses, "moves": moves}


def moved(old: np.ndarray, new: np.ndarray, number: int) -> list[float]:
    """The norm of a change, and sums of it with random signs. The same as gradfilter-device's."""
    old, new, random = old.ravel(), new.ravel(), np.random.RandomState(number)
    found = np.zeros(1 + SUMS)
    for start in range(0, old.size, CHUNK):
        part = slice(start, start + CHUNK)
        change = np.subtract(new[part], old[part], dtype=np.float64)
        bits = np.frombuffer(random.bytes(change.size), np.uint8)
        signs = ((bits >> i & 1) * 2.0 - 1 for i in range(SUMS))
        found += [change @ change, *(change @ s for s in signs)]
    return [float(np.sqrt(found[0])), *map(float, found[1:])]

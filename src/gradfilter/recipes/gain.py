"""What a step costs with the methods on, against exact training of the same layers."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradfilter.demo import kept_bytes
from gradfilter.recipes.trainer import Trainer
from gradfilter.trial import exact_copy

PICTURES = 8  # to measure with on a CPU, where a whole batch would take long
REPEATS = 3


@dataclass(frozen=True)
class Gain:
    """Median seconds of a step and bytes kept for its backward pass, and both of exact training."""

    pictures: int
    seconds: float
    exact_seconds: float
    kept: int
    exact_kept: int

    def __str__(self) -> str:
        return (
            f"a step of {self.pictures} pictures: {1e3 * self.seconds:.0f} ms, exact "
            f"{1e3 * self.exact_seconds:.0f} ms ({self.exact_seconds / self.seconds:.2f}x); kept "
            f"for the backward pass: {self.kept / 2**20:.1f} MiB, exact "
            f"{self.exact_kept / 2**20:.1f} MiB ({self.exact_kept / max(1, self.kept):.1f}x)"
        )


def measure(trainer: Trainer) -> Gain:
    """A few steps of copies of the network, on noise, in turn; the trainer is left as it was."""
    on_cpu = trainer.device.type == "cpu"
    count = min(trainer.settings.batch, PICTURES) if on_cpu else trainer.settings.batch
    x = trainer.network.prepare(trainer.noise(count))
    rivals = [copy.deepcopy(trainer.model), exact_copy(trainer.model)]
    kept = []
    for model in rivals:
        with trainer.autocast():
            kept.append(kept_bytes(model, x))
    taken: list[list[float]] = [[], []]
    for _ in range(1 + REPEATS):
        for model, seconds in zip(rivals, taken, strict=True):
            seconds.append(_step(trainer, model, x))
    ours, plain = (statistics.median(seconds[1:]) for seconds in taken)
    return Gain(count, ours, plain, *kept)


def _step(trainer: Trainer, model: nn.Module, x: Tensor) -> float:
    """Seconds of a forward and a backward pass and a plain step of the weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    _finish(x)
    begin = time.perf_counter()
    with trainer.autocast():
        loss = model(x).float().square().mean()
    loss.backward()
    with torch.no_grad():
        for p in trained:
            if p.grad is not None:
                p -= 0.0 * p.grad
                p.grad = None
    _finish(x)
    return time.perf_counter() - begin


def _finish(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize()

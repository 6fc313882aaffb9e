"""A small comparison made up by hand, for what is done with its numbers."""

from __future__ import annotations

from gradfilter.fidelity import Match
from gradfilter.profiler import Spread
from gradfilter.recipes.comparison import DONE, FAILED, Comparison, Entry, Run
from gradfilter.recipes.contenders import Contender, contenders
from gradfilter.recipes.measuring import Layer, Measured

MIB = 2**20
METHODS = ["exact", "galerkin:grid=7", "gradient-filter:patch=2", "hosvd:energy=0.8"]
# by method and depth: scores of the seeds, kept MiB, step ms, backward millions
NUMBERS = {
    "exact-last4": ([0.80, 0.81, 0.82], 12, 90, 300),
    "exact-all": ([0.89, 0.90, 0.91], 80, 200, 900),
    "galerkin-grid7-last4": ([0.80, 0.80, 0.82], 2, 50, 120),
    "galerkin-grid7-all": ([0.885, 0.895, 0.905], 8, 70, 250),
    "gradient-filter-patch2-last4": ([0.79, 0.80, 0.81], 1.5, 45, 60),
    "gradient-filter-patch2-all": ([0.10, 0.20, 0.15], 6, 60, 100),
    "hosvd-energy0.8-last4": ([0.80, 0.81, 0.81], 5, 160, 200),
    "hosvd-energy0.8-all": ([None, None, None], 30, 500, 700),
}


def comparison(
    numbers: dict = NUMBERS, methods: list[str] = METHODS, depths=(4, None), **changes
) -> Comparison:
    """Contenders with these numbers; a score of None is a run that failed."""
    found = [c for c in contenders(methods, list(depths)) if c.name in numbers]
    about = {
        "model": "mobilenet_v2",
        "size": 64,
        "weights": "none (random)",
        "data": "photos",
        "task": "classification",
        "classes": 3,
        "train_pictures": 900,
        "test_pictures": 200,
        "seeds": list(range(len(next(iter(numbers.values()))[0]))),
        "settings": {"epochs": 2, "steps": None, "lr": 0.05},
        "date": "2026-01-01",
    }
    entries = [entry(c, *numbers[c.name]) for c in found]
    command = "gradfilter compare --data photos --out 'a folder'"
    parts = (about, "top1", entries, Spread(0.02, 0.03, 0.04), {"torch": "2.8"}, command)
    return Comparison(*parts, **changes)


def entry(contender: Contender, scores: list, kept: float, ms: float, million: float) -> Entry:
    runs = [run(contender, seed, score) for seed, score in enumerate(scores)]
    seconds = Spread(0.9e-3 * ms, 1e-3 * ms, 1.2e-3 * ms)
    layers = [layer(contender, k, kept, million) for k in range(4)]
    gradient = None if contender.exact else Match(0.9, 7.0, 0.95)
    costs = (8, seconds, Spread(2e6, 3e6, 4e6), round(kept * MIB), 10**9, round(million * 1e6))
    return Entry(contender, Measured(*costs, layers, gradient, 16), runs, "top1")


def layer(contender: Contender, k: int, kept: float, million: float) -> Layer:
    size, macs = round(kept * MIB / 4), round(million * 1e6 / 4)
    match = None if contender.exact else Match(0.6 + 0.1 * k, 2.0 + k, 0.9)
    return Layer(f"block.{k}", "conv", "method", True, macs, macs, size, 0, match, match)


def run(contender: Contender, seed: int, score: float | None) -> Run:
    folder = f"runs/{contender.name}-seed{seed}"
    rows = [
        {
            "epoch": float(k), "step": 10.0 * k, "lr": 0.05, "train_loss": 2.0 / (k + 1),
            "test_top1": 0.1 + ((score or 0.1) - 0.1) * k / 2, "test_loss": 2.0 / (k + 1),
            "seconds": 1.5 * k,
        }
        for k in range(3)
    ]  # fmt: skip
    command = f"gradfilter train --data photos --method {contender.method} --seed {seed}"
    if score is None:
        failure = "the loss stopped being a number <at step 15> & more"
        return Run(seed, folder, FAILED, rows[:2], None, failure, command)
    return Run(seed, folder, DONE, rows, 3.0, None, command)

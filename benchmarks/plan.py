"""Does a plan keep to its budget? Budget against predicted against measured, network by network.

Each network is surveyed once, then planned for three budgets of memory and three of time. Every
plan is put on a fresh model and measured there again: kept bytes by `gf.profile`, gradients and
momentum of a real step of SGD, processor time of a step on one thread (best and median of 10).
Budgets of time lie between the step that trains the output layer alone and exact training of all
layers. The weights are random, the pictures noise: what training takes does not depend on them.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/plan.py --model mobilenet_v2
    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/plan.py --suite    # what is not there yet
    PYTHONPATH=src python benchmarks/plan.py --table    # of the results there are
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import measure
import torch

import gradfilter as gf
from gradfilter import stopwatch
from gradfilter.planning.budget import Survey
from gradfilter.planning.prices import clock
from gradfilter.profiler import PLAN
from gradfilter.recipes import models

MIB = 2**20
RESULTS = Path(__file__).parent / "results"
# MB of memory, for a batch of 8 pictures of 224 px
BUDGETS = {
    "mobilenet_v2": (12, 24, 48),
    "tf_efficientnet_lite0": (12, 24, 48),
    "resnet18": (12, 32, 96),
}
SHARES = (0.25, 0.5, 0.75)  # of the way from the least time to exact training of all layers
STEPS = 10


def network(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = models.find(name).create(name, 100, 224)
    return model.to(memory_format=torch.channels_last).train()


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, 224, 224, generator=noise)
    return x.contiguous(memory_format=torch.channels_last), torch.arange(count)


def measured(name: str, plan: gf.Plan, x, target) -> dict:
    """What a fresh model takes with the plan."""
    model = network(name)
    gf.convert(model, plan, example=x)
    profile = gf.profile(model, x, target, repeats=1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9)
    torch.nn.functional.cross_entropy(model(x), target).backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if t is not None]
    found = {
        "kept": profile.rival(PLAN).kept,
        "gradients": measure.nbytes(p.grad for p in trained),
        "momentum": measure.nbytes(state),
    }
    optimizer.zero_grad(set_to_none=True)
    taken = times(model, x, target)
    peak = profile.rival(PLAN).peak
    return {
        "memory": sum(found.values()),
        **found,
        "seconds": min(taken),
        "seconds, median": statistics.median(taken),
        "peak over the weights": peak.min if peak else None,
    }


def times(model, x, target) -> list[float]:
    device = torch.device("cpu")
    step = stopwatch.Step(model, x, target, device, trains=True, clock=clock(device))
    return stopwatch.in_turns({"step": step}, STEPS)["step"]["step"]


def row(name: str, survey: Survey, budget: dict[str, float], x, target) -> dict:
    begin = time.perf_counter()
    plan = survey.plan(**budget)
    seconds = time.perf_counter() - begin
    a = plan.final
    real = measured(name, plan, x, target)
    kind = "memory" if "memory" in budget else "time"
    predicted = a.predicted.total if kind == "memory" else a.predicted_seconds
    again = real["memory"] if kind == "memory" else real["seconds"]
    trained = [r for r in plan.reasons if r.trained]
    found = {
        "budget": budget[kind],
        "kind": kind,
        "predicted": predicted,
        "measured by the plan": a.measured.total if kind == "memory" else a.measured_seconds,
        "measured": again,
        "measured / budget": again / budget[kind],
        "predicted / measured": predicted / again,
        "attempts": len(plan.attempts),
        "predicted and measured of each": [both(a, kind) for a in plan.attempts],
        "layers trained": len(trained),
        "methods": sorted({r.method for r in trained}),
        "value": plan.value,
        "measured value": plan.measured_value,
        "seconds to plan": seconds,
        "fresh model": real,
    }
    print(*told(name, found), sep="  ", flush=True)
    return found


def both(a, kind: str) -> tuple[float, float]:
    """What was predicted of a plan, and what was measured of it at once."""
    if kind == "memory":
        return a.predicted.total, a.measured.total
    return a.predicted_seconds, a.measured_seconds


def run(name: str, count: int) -> dict:
    x, target = batch(count)
    begin = time.perf_counter()
    survey = Survey(network(name), x, target=target, timed=True)
    surveyed = time.perf_counter() - begin
    exact = network(name)
    gf.convert(exact, {"*": gf.Exact()}, example=x)
    longest, least = min(times(exact, x, target)), survey.costs.base
    budgets = [{"memory": mb * MIB} for mb in BUDGETS[name]]
    budgets += [{"time": least + share * (longest - least)} for share in SHARES]
    rows = [row(name, survey, budget, x, target) for budget in budgets]
    return {
        **measure.about("plan.py", ["--model", name, "--batch", str(count)]),
        "model": name,
        "batch": count,
        "seconds to survey": surveyed,
        "least step, s": least,
        "exact step of all layers, s": longest,
        "rows": rows,
    }


HEAD = ["network", "budget", "predicted", "measured", "measured / budget", "first prediction / its "
        "measurement", "plans measured", "layers trained", "expected learning"]  # fmt: skip


def told(name: str, r: dict) -> list[str]:
    """One line of the table."""
    unit, word = (MIB, "MB") if r["kind"] == "memory" else (1e-3, "ms")
    values = [f"{r[key] / unit:.1f} {word}" for key in ("budget", "predicted", "measured")]
    predicted, real = r["predicted and measured of each"][0]
    ratios = [f"{r['measured / budget']:.2f}", f"{predicted / real:.2f}"]
    counts = [str(r["attempts"]), str(r["layers trained"])]
    return [name, *values, *ratios, *counts, f"{r['value']:.1%}"]


def table() -> str:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("plan-*.json"))]
    return measure.table(HEAD, [told(f["model"], r) for f in found for r in f["rows"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=BUDGETS, default="mobilenet_v2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--suite", action="store_true", help="all three networks")
    parser.add_argument("--table", action="store_true", help="print the results there are")
    args = parser.parse_args()
    if args.table:
        print(table())
        return
    torch.set_num_threads(1)
    for name in BUDGETS if args.suite else [args.model]:
        path = RESULTS / f"plan-cpu-{name}-b{args.batch}.json"
        if not (args.suite and path.exists()):
            measure.write(path, run(name, args.batch))


if __name__ == "__main__":
    main()

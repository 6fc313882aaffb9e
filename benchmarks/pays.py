"""Does a planned mix of methods pay, against each single method in the same memory?

For each network, data set and budget: the plan of `gf.plan` on a batch of that data, and the last
layers, as many as the budget holds, by one method each. Memory is what `gf.plan` counts: bytes kept
by a step, gradients and momentum. Plans are made first, on any machine; then all are trained as in
accuracy.py, where the weights and data are told of too:

    PYTHONPATH=src python benchmarks/pays.py --shared FOLDER --make
    PYTHONPATH=src python benchmarks/pays.py --shared FOLDER --jobs 3 --device cuda
    PYTHONPATH=src python benchmarks/pays.py --table --plot pays.png
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import accuracy
import measure
import runs
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import kept
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "pays"
BUDGETS = ("32MB", "80MB", "200MB")
BATCH = 32
COPIES = 2  # of every trained parameter: its gradient and its momentum
PLANNED, CLOSED = "planned", "planned without gaps"  # no layer frozen between trained ones
PLANS = {PLANNED: True, CLOSED: False}
SINGLE = {
    "exact": gf.Exact(),
    "gradient-filter": gf.GradientFilter(patch=2),
    "hosvd": gf.Hosvd(energy=0.8),
    "galerkin": gf.GalerkinFilter(grid=7),
}
MOST = {"hosvd": 8}  # layers; more would fit, but decomposing them all takes minutes a run
SHOWN = 15  # points below the best that a panel shows
SETS, NETS = ("flowers", "pets", "cifar10"), ("mobilenet_v2", "tf_efficientnet_lite0")


@dataclass(frozen=True)
class Row:
    """One run."""

    data: str
    model: str
    budget: str
    kind: str
    seed: int

    @property
    def plan(self) -> str:
        return "-".join([self.data, self.model, self.budget, self.kind.replace(" ", "-")])

    @property
    def name(self) -> str:
        return f"{self.plan}-seed{self.seed}"


def rows(budgets: Sequence[str] = BUDGETS) -> list[Row]:
    return [
        Row(data, net, budget, kind, seed)
        for data in SETS
        for net in NETS
        for budget in budgets
        for kind in (*PLANS, *SINGLE)
        for seed in accuracy.SEEDS
    ]


def settings_of(row: Row, args: argparse.Namespace, **method) -> Settings:
    plain = accuracy.Row(row.data, row.model, None, "exact", row.seed)
    settings = accuracy.settings_of(plain, args)
    epochs = args.epochs or settings.epochs
    return settings.changed(batch=BATCH, epochs=epochs, method="galerkin", **method)


def make(row: Row, args: argparse.Namespace) -> None:
    """Write the plan of a row, with the memory that it takes."""
    model, x, t = example(row, args)
    if row.kind in PLANS:
        gaps = PLANS[row.kind]
        plan = gf.plan(model, x, target=t, memory=row.budget, copies=COPIES, gaps=gaps)
        held, layers = plan.final.measured.total, sum(e.trained for e in plan.values())
    else:
        budget = int(row.budget.removesuffix("MB")) * 2**20
        layers, held, plan = most_layers(model, x, SINGLE[row.kind], budget, MOST.get(row.kind))
    plan.save(args.results / "plans" / f"{row.plan}.json")
    about = {"memory": held, "trained layers": layers}
    (args.results / "plans" / f"{row.plan}.about.json").write_text(json.dumps(about) + "\n")
    print(f"{row.plan}: {layers} layers trained, {held / 2**20:.1f} MB", flush=True)


def example(row: Row, args: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    """The network as training finds it, and one batch of its pictures."""
    settings = settings_of(row, args).changed(method="exact")
    data = runs.opened(settings.data)
    trainer = Trainer(settings, data.task, data.classes, ignore=data.ignore, level=data.augment)
    gf.revert(trainer.model)
    places = torch.linspace(0, len(data.train) - 1, BATCH).long().tolist()
    images, targets = zip(*(trainer.change[False](*data.train[i]) for i in places), strict=True)
    return trainer.model, trainer.network.prepare(torch.stack(images)), torch.tensor(targets)


def most_layers(
    model: nn.Module, x: Tensor, method: gf.Method, budget: int, most: int | None
) -> tuple[int, int, gf.Plan]:
    """As many of the last layers as the budget holds by one method: how many, bytes, the plan."""
    low, best = 1, None
    every = gf.convert(copy.deepcopy(model), method)
    high = most or sum(not entry.reason for entry in every.values())  # those that take the method
    while low <= high:
        layers = (low + high) // 2
        held, plan = taken(model, x, method, layers)
        if held <= budget:
            best, low = (layers, held, plan), layers + 1
        else:
            high = layers - 1
    if best is None:
        raise ValueError(f"not even the last layer fits {budget} bytes")
    return best


def taken(model: nn.Module, x: Tensor, method: gf.Method, layers: int) -> tuple[int, gf.Plan]:
    """Bytes that a step holds with the last layers trained by a method, and that plan."""
    copied = copy.deepcopy(model)
    plan = gf.convert(copied, method, last=layers, example=x[:1])
    found = kept.measure(copied, x, {}).total
    trained = sum(p.numel() * p.element_size() for p in copied.parameters() if p.requires_grad)
    return found + COPIES * trained, plan


def run_of(row: Row, args: argparse.Namespace) -> runs.Run:
    plans = args.results / "plans"
    about = json.loads((plans / f"{row.plan}.about.json").read_text())
    settings = settings_of(row, args, plan=str(plans / f"{row.plan}.json"))
    return runs.Run(settings, args.results / f"{row.name}.json", {"row": vars(row)} | about)


def found(args: argparse.Namespace) -> dict[tuple, list[dict]]:
    """What was run, by data, network, budget and kind."""
    results: dict[tuple, list[dict]] = {}
    for row in rows(args.budgets):
        path = args.results / f"{row.name}.json"
        if path.exists():
            key = row.data, row.model, row.budget, row.kind
            results.setdefault(key, []).append(json.loads(path.read_text()))
    return results


def table(args: argparse.Namespace) -> str:
    """Top-1 of every kind, and how far it is from the planned mix on average."""
    results, lines = found(args), []
    columns = [(data, net) for data in SETS for net in NETS]
    for budget in args.budgets:
        for kind in (*PLANS, *SINGLE):
            cells = [_cell(results.get((*column, budget, kind))) for column in columns]
            lines.append([budget, kind, *cells, _against(results, columns, budget, kind)])
    header = ["memory", "top-1 %", *(f"{d}, {n}" for d, n in columns), "against planned"]
    return measure.table(header, lines)


def _cell(results: list[dict] | None) -> str:
    if not results:
        return "not run"
    return f"{accuracy.spread(results)}, {results[0]['trained layers']} layers"


def _against(results: dict, columns: list, budget: str, kind: str) -> str:
    """Mean difference over the columns that both have."""
    pairs = [
        [results[(*c, budget, k)] for k in (kind, PLANNED)]
        for c in columns
        if (*c, budget, kind) in results and (*c, budget, PLANNED) in results
    ]
    if not pairs or kind == PLANNED:
        return "-"
    means = [[statistics.mean(r["headline"] for r in side) for side in pair] for pair in pairs]
    return f"{100 * statistics.mean(a - b for a, b in means):+.2f} ({len(pairs)} of {len(columns)})"


def plot(args: argparse.Namespace) -> None:
    """Accuracy over memory, one panel for each data set and network; what collapsed is below."""
    from matplotlib.figure import Figure

    results = found(args)
    panels = sorted({key[:2] for key in results})
    figure = Figure(figsize=(4.2 * max(1, len(panels)), 3.8), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=False):
        best = max(_curve(axis, results, panel, kind, args.budgets) for kind in (*PLANS, *SINGLE))
        axis.set(title=", ".join(panel), xlabel="memory of a step, MB", ylabel="top-1, %")
        axis.set_ylim(best - SHOWN, best + 2)
        axis.set_xscale("log")
        ticks = [float(budget.removesuffix("MB")) for budget in args.budgets]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(args.plot, dpi=120)


def _curve(axis, results: dict, panel: tuple, kind: str, budgets: Sequence[str]) -> float:
    """Draw one kind at its budgets; the highest mean."""
    runs_of = [results[(*panel, b, kind)] for b in budgets if (*panel, b, kind) in results]
    if not runs_of:
        return 0.0
    values = [[100 * r["headline"] for r in several] for several in runs_of]
    errors = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
    memory = [several[0]["memory"] / 2**20 for several in runs_of]
    means = [statistics.mean(v) for v in values]
    style = {"marker": "o", "capsize": 3, "linewidth": 2.5 if kind == PLANNED else 1.2}
    axis.errorbar(memory, means, errors, label=kind, **style)
    return max(means)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    runs.add_arguments(p, RESULTS)
    p.add_argument("--make", action="store_true", help="make the plans and run nothing")
    p.add_argument("--plot", type=Path, help="picture of the results")
    p.add_argument("--budgets", nargs="+", default=BUDGETS, metavar="MB", help="such as 80MB")
    p.add_argument("--size", type=int, help="image side, where not the network's own")
    p.add_argument("--epochs", type=int, help="where not those of accuracy.py")
    p.set_defaults(lr=None)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.until = time.time() + 60 * args.minutes
    wanted = [r for r in rows(args.budgets) if re.search(args.only, r.name)]
    if args.list:
        print("\n".join(r.name for r in wanted))
    elif args.table:
        print(table(args))
        if args.plot:
            plot(args)
    elif args.shared is None:
        print("pays.py: --shared FOLDER is needed", file=sys.stderr)
        return 2
    else:
        args.shared, args.results = args.shared.resolve(), args.results.resolve()
        (args.results / "plans").mkdir(parents=True, exist_ok=True)
        if args.make:
            plans = {r.plan: r for r in wanted}.values()
            for row in plans:
                if not (args.results / "plans" / f"{row.plan}.about.json").exists():
                    make(row, args)
        else:
            runs.run_all([run_of(r, args) for r in wanted], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

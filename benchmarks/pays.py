"""Does a planned mix of methods pay, against each single method in the same memory?

For each network, data set and budget: the plan of `gf.plan` on a batch of that data, and the last
layers, as many as the budget holds, by one method each. Memory is what `gf.plan` counts: bytes kept
by a step, gradients and momentum. Plans are made first, on any machine; then all are trained as in
accuracy.py, where the weights and data are told of too, but for `OPTIONS`:

    PYTHONPATH=src python benchmarks/pays.py --shared FOLDER --make
    PYTHONPATH=src python benchmarks/pays.py --shared FOLDER --jobs 3 --device cuda
    PYTHONPATH=src python benchmarks/pays.py --table --plot pays.png
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import accuracy
import measure
import runs
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import kept
from gradfilter.planning.budget import METHODS
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "pays"
BUDGETS = ("24MB", "64MB", "160MB")
SIZE, BATCH = 128, 32
OPTIONS = {  # those of `gradfilter train`; of CIFAR-10 one device's share, an eighth
    "flowers": {"epochs": 10},
    "pets": {"epochs": 10},
    "cifar10": {"epochs": 3, "split": "iid", "parts": 8},
}
STRIDE = {"cifar10": 2}  # of its 5,000 test pictures every second, since a CPU takes a minute
COPIES = 2  # of every trained parameter: its gradient and its momentum
# By the methods that were the default at first, without gaps and with layers frozen between trained
# ones; and by those that are, with `GalerkinFilter(grid=2)`.
PLANNED, GAPS, COARSE = "planned", "planned with gaps", "planned with grid 2"
FIRST = tuple(m for m in METHODS if m != gf.GalerkinFilter(grid=2))
PLANS = {
    PLANNED: {"methods": FIRST, "gaps": False},
    GAPS: {"methods": FIRST, "gaps": True},
    COARSE: {"gaps": False},
}
SINGLE = {
    "exact": gf.Exact(),
    "gradient-filter": gf.GradientFilter(patch=2),
    "hosvd": gf.Hosvd(energy=0.8),
    "galerkin": gf.GalerkinFilter(grid=7),
}
MOST = {"hosvd": 8}  # layers; more would fit, but decomposing them all takes minutes a run
SHOWN = 15  # points below the best that a panel shows
SETS, NETS = ("flowers", "pets", "cifar10"), ("mobilenet_v2", "tf_efficientnet_lite0")
COLUMNS = [(data, net) for data in SETS for net in NETS]
NAMES = {
    "flowers": "Flowers",
    "pets": "Pets",
    "cifar10": "CIFAR-10",
    "mobilenet_v2": "MobileNetV2",
    "tf_efficientnet_lite0": "Lite0",
}


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
        for seed in accuracy.SEEDS  # the first of all before the next
        for net in NETS
        for budget in budgets
        for kind in (*PLANS, *SINGLE)
    ]


def settings_of(row: Row, args: argparse.Namespace, **method) -> Settings:
    plain = accuracy.Row(row.data, row.model, None, "exact", row.seed)
    settings = accuracy.settings_of(plain, args)
    return settings.changed(batch=BATCH, method="galerkin", **OPTIONS[row.data], **method)


def make(row: Row, args: argparse.Namespace) -> None:
    """Write the plan of a row, with the memory that it takes."""
    model, x, t = example(row, args)
    if row.kind in PLANS:
        plan = gf.plan(model, x, target=t, memory=row.budget, copies=COPIES, **PLANS[row.kind])
        held, layers = plan.final.measured.total, sum(e.trained for e in plan.values())
    else:
        budget = int(row.budget.removesuffix("MB")) * 2**20
        layers, held, plan = most_layers(model, x, SINGLE[row.kind], budget, MOST.get(row.kind))
    plan.save(args.results / "plans" / f"{row.plan}.json")
    about = {"memory": held, "trained layers": layers}
    (args.results / "plans" / f"{row.plan}.about.json").write_text(json.dumps(about) + "\n")
    print(f"{row.plan}: {layers} layers trained, {held / 2**20:.1f} MB", flush=True)


def example(
    row: Row, args: argparse.Namespace, pictures: int = BATCH
) -> tuple[nn.Module, Tensor, Tensor]:
    """The network as training finds it, and a batch of its pictures from all over."""
    settings = settings_of(row, args).changed(method="exact")
    data = runs.opened(settings)
    trainer = Trainer(settings, data.task, data.classes, ignore=data.ignore, level=data.augment)
    gf.revert(trainer.model)
    places = torch.linspace(0, len(data.train) - 1, pictures).long().tolist()
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


def shared(row: Row, args: argparse.Namespace) -> Row:
    """The row of the least budget with the very plan of this one: its run is that of both."""
    text = _plan_text(row, args)
    same = [replace(row, budget=b) for b in args.budgets]
    return next((r for r in same if text and _plan_text(r, args) == text), row)


def _plan_text(row: Row, args: argparse.Namespace) -> str | None:
    path = args.results / "plans" / f"{row.plan}.json"
    return path.read_text() if path.exists() else None


def run_of(row: Row, args: argparse.Namespace) -> runs.Run:
    plans = args.results / "plans"
    about = json.loads((plans / f"{row.plan}.about.json").read_text())
    settings = settings_of(row, args, plan=str(plans / f"{row.plan}.json"))
    about |= {"row": vars(row)}
    return runs.Run(settings, file_of(row, args), about, STRIDE.get(row.data, 1))


def file_of(row: Row, args: argparse.Namespace) -> Path:
    return args.results / f"{row.name}{accuracy.backbone_rate(args)}.json"


def found(args: argparse.Namespace) -> dict[tuple, list[dict]]:
    """What was run, by data, network, budget and kind; equal plans have one run."""
    results: dict[tuple, list[dict]] = {}
    for row in rows(args.budgets):
        path = file_of(shared(row, args), args)
        if path.exists():
            key = row.data, row.model, row.budget, row.kind
            told = json.loads(path.read_text()) | {"seed": row.seed}
            results.setdefault(key, []).append(told)
    return results


def table(args: argparse.Namespace) -> str:
    """Top-1 of every kind, how far it is from the planned mix, and the mix from the singles."""
    results, lines = found(args), []
    for budget in args.budgets:
        for kind in (*PLANS, *SINGLE):
            cells = [_cell(results.get((*column, budget, kind)), kind) for column in COLUMNS]
            lines.append([budget, told(kind), *cells, _against(results, budget, kind)])
    names = [told(*column) for column in COLUMNS]
    header = ["memory", "top-1 %", *names, "against planned"]
    best = [[b, *_lead(results, b)] for b in args.budgets]
    second = ["memory", *names, "mean"]
    plans = [(b, kind) for b in args.budgets for kind in (PLANNED, COARSE)]
    leads = [_leads(results, *plan) for plan in plans]
    third = ["lead of", "best by its mean", "best by the other seeds", *map(told, SINGLE)]
    tables = (header, lines), (second, best), (third, leads)
    return "\n\n".join(measure.table(*each) for each in tables)


def told(*names: str) -> str:
    """Kinds, data sets or networks as the tables name them."""
    return ", ".join(f"`{SINGLE[n]!r}`" if n in SINGLE else NAMES.get(n, n) for n in names)


def _cell(results: list[dict] | None, kind: str) -> str:
    if not results:
        return "not run"
    layers = results[0]["trained layers"] + (kind in SINGLE)  # whose output layer was not counted
    some = f" ({len(results)} seeds)" if 1 < len(results) < len(accuracy.SEEDS) else ""
    return f"{accuracy.spread(results)}{some}, {layers} layers"


def _against(results: dict, budget: str, kind: str) -> str:
    """Mean difference over the columns that both have."""
    return "-" if kind == PLANNED else _mean(_differences(results, budget, kind, PLANNED))


def _differences(results: dict, budget: str, one: str, other: str) -> list[float]:
    """Points by which one kind is above another, of each column that both have."""
    keys = [((*c, budget, one), (*c, budget, other)) for c in COLUMNS]
    return [_ahead(results[a], results[b])[0] for a, b in keys if {a, b} <= results.keys()]


def _lead(results: dict, budget: str) -> list[str]:
    """In every column how far the planned mix is ahead of the single method with the best mean."""
    found = [_ahead_of_best(results, budget, column, PLANNED) for column in COLUMNS]
    cells = ["not run" if x is None else x[1] for x in found]
    return [*cells, _mean([x[0] for x in found if x is not None])]


def _ahead_of_best(
    results: dict, budget: str, column: tuple, plan: str
) -> tuple[float, str] | None:
    """How far, and how that is told."""
    rivals = [k for k in SINGLE if (*column, budget, k) in results]
    planned = results.get((*column, budget, plan))
    if not planned or not rivals:
        return None
    best = max(rivals, key=lambda k: _score(results[(*column, budget, k)]))
    lead, error = _ahead(planned, results[(*column, budget, best)])
    noise = f" ± {error:.1f}" if error is not None else " (1 seed)"
    return lead, f"{lead:+.1f}{noise}, {told(best)}"


def _leads(results: dict, budget: str, plan: str) -> list[str]:
    """Over the columns, how far a planned mix is ahead: of the best single method, and of each.

    The best of several noisy means is partly so by chance, which counts against the mix. Chosen by
    the other seeds (`_left_out`), the best one has no such luck, and is as good as it is.
    """
    best = [_ahead_of_best(results, budget, c, plan) for c in COLUMNS]
    fair = [_left_out(results, budget, c, plan) for c in COLUMNS]
    sides = [[x[0] for x in best if x is not None], [x for x in fair if x is not None]]
    sides += [_differences(results, budget, plan, kind) for kind in SINGLE]
    return [f"{budget}, {plan}", *map(_mean, sides)]


def _left_out(results: dict, budget: str, column: tuple, plan: str) -> float | None:
    """Mean over a mix's seeds of its lead over the method that is best by all seeds but that one.

    None where no method has that seed and another.
    """
    scores = {
        kind: {r["seed"]: 100 * r["headline"] for r in results.get((*column, budget, kind), [])}
        for kind in (plan, *SINGLE)
    }
    leads = []
    for seed, score in scores.pop(plan).items():
        rivals = [of for of in scores.values() if seed in of and len(of) > 1]
        others = [statistics.mean(v for s, v in of.items() if s != seed) for of in rivals]
        if rivals:
            leads.append(score - rivals[others.index(max(others))][seed])
    return statistics.mean(leads) if leads else None


def _score(results: list[dict]) -> float:
    return 100 * statistics.mean(r["headline"] for r in results)


def _ahead(one: list[dict], other: list[dict]) -> tuple[float, float | None]:
    """Points by which the mean of one is above that of the other, and the standard error."""
    ahead = _score(one) - _score(other)
    sides = [[100 * r["headline"] for r in side] for side in (one, other)]
    if min(map(len, sides)) < 2:
        return ahead, None
    return ahead, math.sqrt(sum(statistics.variance(v) / len(v) for v in sides))


def _mean(points: list[float]) -> str:
    """Mean and standard error over columns, and how many they are where some were not run."""
    if not points:
        return "-"
    count = len(points)
    error = f" ± {statistics.stdev(points) / math.sqrt(count):.2f}" if count > 1 else ""
    few = f" ({count} of {len(COLUMNS)})" if count < len(COLUMNS) else ""
    return f"{statistics.mean(points):+.2f}{error}{few}"


def plot(args: argparse.Namespace) -> None:
    """Accuracy over memory, one panel for each data set and network; what collapsed is below."""
    from matplotlib.figure import Figure

    results = found(args)
    run = {kind for *_, kind in results}
    figure = Figure(figsize=(4 * len(SETS), 3.4 * len(NETS)), layout="constrained")
    axes = figure.subplots(len(NETS), len(SETS), squeeze=False)
    for data, net in COLUMNS:
        axis = axes[NETS.index(net)][SETS.index(data)]
        panel = {k: v for k, v in results.items() if k[:2] == (data, net)}
        best = max([_score(v) for v in panel.values()], default=SHOWN)
        for number, kind in enumerate((*SINGLE, *reversed(PLANS))):  # the planned one on top
            if kind in run:
                _curve(axis, [v for k, v in panel.items() if k[3] == kind], kind, f"C{number}")
        axis.set(title=told(data, net), ylim=(best - SHOWN, best + 2))
        axis.set(xlabel="memory of a step, MB", ylabel="top-1, %", xscale="log")
        ticks = [float(budget.removesuffix("MB")) for budget in args.budgets]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(args.plot, dpi=120)


def _curve(axis, several: list[list[dict]], kind: str, colour: str) -> None:
    """Draw one kind at its budgets, with the deviation of its seeds."""
    memory = [results[0]["memory"] / 2**20 for results in several]
    means = [_score(results) for results in several]
    values = [[100 * r["headline"] for r in results] for results in several]
    errors = [statistics.stdev(v) if len(v) > 1 else 0 for v in values]
    style = {"marker": "o", "capsize": 3, "linewidth": 2.5 if kind == PLANNED else 1.2}
    axis.errorbar(memory, means, errors, label=told(kind).strip("`"), color=colour, **style)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    runs.add_arguments(p, RESULTS)
    p.add_argument("--make", action="store_true", help="make the plans and run nothing")
    p.add_argument("--plot", type=Path, help="picture of the results")
    p.add_argument("--budgets", nargs="+", default=BUDGETS, metavar="MB", help="such as 80MB")
    p.add_argument("--size", type=int, default=SIZE, help="image side")
    p.add_argument("--backbone-lr", type=float, default=1.0, help=accuracy.BACKBONE_HELP)
    p.set_defaults(lr=None)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.until = time.time() + 60 * args.minutes
    wanted = runs.chosen({r.name: r for r in rows(args.budgets)}, args.only)
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
            runs.run_all([run_of(r, args) for r in wanted if shared(r, args) == r], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

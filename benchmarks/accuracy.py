"""How well does a network learn by each method, when its last 2, last 4 or all layers are trained?

Every row is one training run by the trainer of `gradfilter train`, with its recipe (SGD, momentum,
cosine, warm-up, clip 2.0, frozen batch norm), tested once, at its end. A row's JSON file says all
of it; rows that have theirs are not run again. Data and ImageNet weights lie in one folder:

    PYTHONPATH=src python benchmarks/accuracy.py --shared FOLDER --jobs 3 --device cuda
    PYTHONPATH=src python benchmarks/accuracy.py --shared FOLDER --only camvid pets --minutes 8
    PYTHONPATH=src python benchmarks/accuracy.py --table        # what has been run, and what not
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import measure
import runs
import torch

import gradfilter as gf
from gradfilter.recipes import models
from gradfilter.recipes.settings import Settings

RESULTS = Path(__file__).parent / "results" / "accuracy"
SEEDS = (0, 1, 2)
BACKBONE_HELP = "share of the learning rate that all but the output layer have"


@dataclass(frozen=True)
class Data:
    folder: str
    headline: str
    options: dict


@dataclass(frozen=True)
class Row:
    """One run."""

    data: str
    model: str
    last: int | None
    method: str
    seed: int

    @property
    def name(self) -> str:
        depth = "all" if self.last is None else f"last{self.last}"
        return "-".join([self.data, self.model, depth, self.method, f"seed{self.seed}"])


DATA = {
    "cifar10": Data("cifar10", "top1", {"epochs": 3, "batch": 128}),
    "flowers": Data("flowers102_subset", "top1", {"epochs": 20, "batch": 64}),
    "pets": Data("pets_subset", "top1", {"epochs": 20, "batch": 64}),
    # the rate at which exact training does best on CamVid's validation pictures, of 0.1, 0.2, 0.4
    "camvid": Data("camvid", "miou", {"epochs": 40, "batch": 16, "size": 256, "lr": 0.2}),
}
WEIGHTS = {
    "mobilenet_v2": "weights_mobilenet_v2/mobilenet_v2_1.0_224_tfhub.pth",
    "tf_efficientnet_lite0": "weights_efficientnet_lite0/efficientnet-lite0-57934424.pth",
    "fcn-mobilenet_v2": "weights_mobilenet_v2/mobilenet_v2_1.0_224_tfhub.pth",
}
METHODS = {
    "exact": {"method": "exact"},
    "galerkin-grid7": {"method": "galerkin", "grid": 7},
    "galerkin-grid14": {"method": "galerkin", "grid": 14},
    "gradient-filter-patch2": {"method": "gradient-filter", "patch": 2},
    "gradient-filter-patch4": {"method": "gradient-filter", "patch": 4},
    "gradient-filter-patch7": {"method": "gradient-filter", "patch": 7},
    "int8-galerkin-grid7": {"method": "galerkin", "grid": 7, "bits": 8},
    "hosvd-0.8": {"method": "hosvd", "energy": 0.8},
    "asi": {"method": "asi", "rank": 4},
}
# Dense prediction: patch sides in pixels of each map; a plan is one of `plan_of`.
DENSE = {
    "galerkin-patch2": {"method": "galerkin", "patch": 2},
    "galerkin-patch4": {"method": "galerkin", "patch": 4},
    "galerkin-grid14": METHODS["galerkin-grid14"],
    "gradient-filter-patch2": METHODS["gradient-filter-patch2"],
    "exact-early-patch2": {"plan": {"exact_from": None, "fine": 2, "coarse": 1}},
    "exact-10-patch2": {
        "plan": {"exact_from": "segmentation_head", "fine": 2, "coarse": 1, "early": 10}
    },
    "exact-conv-patch2-all": {"plan": {"exact_from": "decoder.conv", "fine": 2, "coarse": 2}},
    "exact-conv-patch2": {"plan": {"exact_from": "decoder.conv", "fine": 2, "coarse": 4}},
    "exact-head-patch2": {"plan": {"exact_from": "decoder", "fine": 2, "coarse": 4}},
    "exact-18-patch4": {"plan": {"exact_from": "features.18", "fine": 4, "coarse": 8}},
}


def rows() -> list[Row]:
    """The most telling first: all layers, dense prediction, then the last 4 and the last 2."""
    nets, sets = ("mobilenet_v2", "tf_efficientnet_lite0"), ("flowers", "pets", "cifar10")

    def classify(last, methods):
        return [
            Row(data, net, last, method, seed)
            for method in methods
            for data in sets
            for net in nets
            for seed in SEEDS
        ]

    dense = [
        Row("camvid", "fcn-mobilenet_v2", None, method, seed)
        for seed in SEEDS
        for method in ("exact", *DENSE)
    ]
    main, others = list(METHODS)[:6], list(METHODS)[6:]
    return (
        classify(None, main) + dense + classify(4, main) + classify(4, others)
        + classify(2, METHODS) + classify(None, others)
    )  # fmt: skip


def plan_of(
    names: list[str], exact_from: str | None, fine: int, coarse: int, early: int = 7
) -> dict[str, dict]:
    """Exact from one layer on; before it one patch in the early blocks, another in the others.

    The encoder's maps are at their smallest from its eighth block, the seventh from 0, on.
    """
    found, exact = {}, False
    for name in names:
        exact = exact or (exact_from is not None and exact_from in name)
        block = name.split("features.")[-1].split(".")[0]
        first = "features." in name and block.isdecimal() and int(block) < early
        patch = {"method": "galerkin", "patch": coarse if first else fine}
        found[name] = {"method": "exact"} if exact else patch
    return found


def settings_of(row: Row, args: argparse.Namespace) -> Settings:
    """The settings that `gradfilter train` would take."""
    method = {**METHODS, **DENSE}[row.method]
    if "plan" in method:
        method = {"plan": str(_plan_file(row, args, **method["plan"]))}
    settings = Settings(
        data=str(args.shared / DATA[row.data].folder),
        model=row.model,
        weights=str(args.shared / WEIGHTS[row.model]),
        last=row.last,
        seed=row.seed,
        device=args.device,
        workers=args.workers,
        in_memory=True,
        deterministic=False,
        **DATA[row.data].options,
        **method,
    )
    given = {"size": args.size, "lr": args.lr, "backbone_lr": args.backbone_lr}
    return settings.changed(**{k: v for k, v in given.items() if v})


def _plan_file(row: Row, args: argparse.Namespace, **plan) -> Path:
    """A row's plan, beside its result."""
    path = args.results / f"{row.model}-{row.method}.plan.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plan_of(layers_of(row.model, DATA[row.data].options["size"]), **plan))
        path.write_text(text + "\n")
    return path


def layers_of(model: str, size: int) -> list[str]:
    """The layers of a segmentation network in the order they are run."""
    network = models.build(model, 2, task="segmentation", weights="none", size=size)
    spent = gf.cost(network.model, torch.zeros(1, 3, size, size))
    return [row.name for row in spent.layers if row.kind in ("conv", "linear")]


def run_of(row: Row, args: argparse.Namespace) -> runs.Run:
    return runs.Run(settings_of(row, args), file_of(row, args), {"row": vars(row)})


def table(args: argparse.Namespace) -> str:
    """Mean and spread over the seeds, one table per depth."""
    found: dict[tuple, list[dict]] = {}
    for row in rows():
        path = file_of(row, args)
        if path.exists():
            key = row.last, row.method, row.data, row.model
            found.setdefault(key, []).append(json.loads(path.read_text()))
    parts = [_depth(found, last) for last in (None, 4, 2)]
    return "\n\n".join([*parts, _dense(found), f"run with: {_commands(found)}"])


def _depth(found: dict, last: int | None) -> str:
    columns = [(d, m) for d in ("cifar10", "flowers", "pets") for m in list(WEIGHTS)[:2]]
    lines = []
    for method in METHODS:
        cells = [_cell(found.get((last, method, *column))) for column in columns]
        lines.append([method, *cells, _against_exact(found, last, method, columns)])
    title = "all layers" if last is None else f"last {last} layers"
    header = [f"{title}: top-1 %", *(f"{d}, {m}" for d, m in columns), "mean against exact"]
    return measure.table(header, lines)


def _cell(results: list[dict] | None) -> str:
    return spread(results) if results else "not run"


def spread(results: list[dict]) -> str:
    """Mean and deviation of the headlines, in percent."""
    values = [100 * r["headline"] for r in results]
    told = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else " (1 seed)"
    return f"{statistics.mean(values):.1f}{told}"


def _against_exact(found: dict, last: int | None, method: str, columns: list) -> str:
    """Mean over the columns that both have, of the difference of means."""
    pairs = [
        (found[(last, method, *c)], found[(last, "exact", *c)])
        for c in columns
        if (last, method, *c) in found and (last, "exact", *c) in found
    ]
    if not pairs or method == "exact":
        return "-"
    means = [[statistics.mean(r["headline"] for r in side) for side in pair] for pair in pairs]
    return f"{100 * statistics.mean(a - b for a, b in means):+.2f} ({len(pairs)} of {len(columns)})"


def _dense(found: dict) -> str:
    lines = []
    exact = found.get((None, "exact", "camvid", "fcn-mobilenet_v2"))
    for method in ("exact", *DENSE):
        results = found.get((None, method, "camvid", "fcn-mobilenet_v2"))
        saved = "-"
        if results and exact:
            macs = [r[0]["macs of a picture"]["backward"] for r in (exact, results)]
            saved = f"{macs[0] / macs[1]:.2f}x"
        lines.append([method, _cell(results), saved])
    return measure.table(["CamVid, all layers", "mIoU %", "backward cheaper"], lines)


def _commands(found: dict) -> str:
    return "; ".join(sorted({r["command"] for results in found.values() for r in results}))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    runs.add_arguments(p, RESULTS)
    p.add_argument("--size", type=int, help="image side, where not the network's own")
    help = "learning rates, where not the recipe's; rows are run at each"
    p.add_argument("--lr", type=float, nargs="+", default=[None], help=help)
    help = BACKBONE_HELP + "; rows are run at each"
    p.add_argument("--backbone-lr", type=float, nargs="+", default=[1.0], help=help)
    return p


def at_each_rate(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments with one learning rate and one share of it."""
    return [
        argparse.Namespace(**vars(args) | {"lr": lr, "backbone_lr": share})
        for lr in args.lr
        for share in args.backbone_lr
    ]


def backbone_rate(args: argparse.Namespace) -> str:
    """What the name of a row's file says of it."""
    return "" if args.backbone_lr == 1 else f"-backbone{args.backbone_lr:g}"


def file_of(row: Row, args: argparse.Namespace) -> Path:
    size = f"-{args.size}px" if args.size else ""
    rate = f"-lr{args.lr:g}" if args.lr else ""
    return args.results / f"{row.name}{size}{rate}{backbone_rate(args)}.json"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.until = time.time() + 60 * args.minutes
    args.results = args.results.resolve()
    args.shared = args.shared and args.shared.resolve()
    every = {file_of(r, one).stem: (r, one) for one in at_each_rate(args) for r in rows()}
    wanted = runs.chosen(every, args.only)
    if args.list:
        print("\n".join(file_of(*pair).stem for pair in wanted))
    elif args.table:
        print("\n\n".join(table(one) for one in at_each_rate(args)))
    elif args.shared is None:
        print("accuracy.py: --shared FOLDER is needed", file=sys.stderr)
        return 2
    else:
        args.results.mkdir(parents=True, exist_ok=True)
        runs.run_all([run_of(*pair) for pair in wanted], args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

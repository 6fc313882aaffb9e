"""How well does a network learn by each method, when its last 2, last 4 or all layers are trained?

Every row is one training run by the trainer of `gradfilter train`, with its recipe (SGD, momentum,
cosine, warm-up, clip 2.0, frozen batch norm), tested once, at its end. A row's JSON file says all
of it; rows that have theirs are not run again. On a GPU the pictures, cut as the trainer's loader
cuts them, stay on it for the next row, and steps are CUDA graphs where the method allows it. Data
and ImageNet weights lie in one folder:

    PYTHONPATH=src python benchmarks/accuracy.py --shared FOLDER --jobs 3 --device cuda
    PYTHONPATH=src python benchmarks/accuracy.py --shared FOLDER --only camvid --minutes 8
    PYTHONPATH=src python benchmarks/accuracy.py --table        # what has been run, and what not
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
from resident import Resident

import gradfilter as gf
from gradfilter.recipes import models
from gradfilter.recipes.capture import Captured, refusal
from gradfilter.recipes.datasets import open_data
from gradfilter.recipes.loading import per_epoch
from gradfilter.recipes.parallel import World
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Diverged, Trainer

RESULTS = Path(__file__).parent / "results" / "accuracy"
SEEDS = (0, 1, 2)
CHANCE = 0.0  # of a run that diverged


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
    "camvid": Data("camvid", "miou", {"epochs": 40, "batch": 16, "size": 256}),
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


def plan_of(names: list[str], exact_from: str, fine: int, coarse: int) -> dict[str, dict]:
    """Exact from one layer on; before it a fine grid on the small maps, a coarse one on the large.

    The encoder's maps are at their smallest stride from its eighth block on.
    """
    found, exact = {}, False
    for name in names:
        exact = exact or exact_from in name
        block = name.split("features.")[-1].split(".")[0]
        early = "features." in name and block.isdecimal() and int(block) < 7
        patch = {"method": "galerkin", "patch": coarse if early else fine}
        found[name] = {"method": "exact"} if exact else patch
    return found


def settings_of(row: Row, shared: Path, device: str, workers: int):
    """The settings that `gradfilter train` would take."""
    method = {**METHODS, **DENSE}[row.method]
    return Settings(
        data=str(shared / DATA[row.data].folder),
        model=row.model,
        weights=str(shared / WEIGHTS[row.model]),
        last=row.last,
        seed=row.seed,
        device=device,
        workers=workers,
        in_memory=True,
        deterministic=False,
        **DATA[row.data].options,
        **({} if "plan" in method else method),
    )


def run(row: Row, args: argparse.Namespace) -> dict:
    """Train and test one row; what its file will say."""
    settings = settings_of(row, args.shared, args.device, args.workers)
    given = {"size": args.size, "lr": args.lr}
    settings = settings.changed(**{k: v for k, v in given.items() if v})
    plan = {**METHODS, **DENSE}[row.method].get("plan")
    data = opened(settings.data)
    if plan:
        path = args.results / f"{row.name}.plan.json"
        path.write_text(json.dumps(plan_of(layers_of(settings, data), **plan), indent=1) + "\n")
        settings = settings.changed(plan=str(path))
    trainer = Trainer(
        settings, data.task, data.classes,
        ignore=data.ignore, level=data.augment, world=World(torch.device(args.device)),
    )  # fmt: skip
    total = args.steps or settings.epochs * per_epoch(len(data.train), trainer.batch)
    x = trainer.network.prepare(trainer.noise(1))
    cheap = row.method not in ("hosvd-0.8",)  # whose ranks depend on the data
    spent = gf.cost(trainer.model, x).total if cheap else None
    taken = resident_steps(trainer, data, total) if args.device != "cpu" else None
    begin, losses, diverged = time.monotonic(), [], None
    try:
        for done in taken or trainer.steps(data.train, range(total), total):
            if done % max(1, total // 20) == 0:
                loss, count = trainer.sums.tolist()
                losses.append(round(loss / max(count, 1), 4))
                trainer.sums.zero_()
        trainer.check(total - 1)
    except Diverged as error:
        diverged = str(error)
    seconds = time.monotonic() - begin
    metrics = {} if diverged else trainer.evaluate(data.test)[0]
    trainer.close()
    return measure.about(__file__, sys.argv[1:]) | {
        "row": vars(row),
        "settings": {k: _short(v, args.shared) for k, v in settings.as_dict().items()},
        "plan": plan,
        "where": _where(trainer.plan),
        "macs of a picture": spent
        and {"forward": spent.forward_macs, "backward": spent.backward_macs},
        "kept bytes of a picture": spent and spent.kept_bytes,
        "steps": total,
        "seconds": seconds,
        "losses": losses,
        "diverged": diverged,
        "metrics": metrics,
        "headline": metrics.get(DATA[row.data].headline, CHANCE),
    }


RESIDENT: dict[tuple, Resident] = {}


def resident_steps(trainer, data, total: int):
    """As `Trainer.steps`, from pictures that stay on the device; tests will be from there too."""
    epochs = -(-total // per_epoch(len(data.train), trainer.batch))
    key = data.train, trainer.size, trainer.settings.seed, epochs
    if key not in RESIDENT:
        RESIDENT[key] = Resident(trainer, data.train, data.test, epochs)
    shown = RESIDENT[key]
    trainer.testing[data.test] = shown.tests(trainer.batch)
    take = trainer.step if refusal(trainer) else Captured(trainer).step
    for number in range(total):
        take(shown.batch(number, trainer.batch), number, trainer.rate(number, total))
        yield number + 1


OPENED: dict[str, object] = {}


def opened(where: str):
    """A data set, decoded once for all rows of a process."""
    if where not in OPENED:
        OPENED[where] = open_data(where, download=False, cache=True)
    return OPENED[where]


def layers_of(settings, data) -> list[str]:
    """The layers of a network in the order they are run."""
    network = models.build(
        settings.model, len(data.classes), task=data.task, weights="none", size=settings.size
    )
    x = torch.zeros(1, 3, settings.size, settings.size)
    return [row.name for row in gf.cost(network.model, x).layers if row.kind in ("conv", "linear")]


def _where(plan) -> dict[str, int]:
    """How many trained layers run where."""
    found: dict[str, int] = {}
    for entry in plan.values():
        if entry.trained:
            place = (entry.where or "layer level").split(":")[0].split(" ")[0]
            found[place] = found.get(place, 0) + 1
    return found


def _short(value, shared: Path):
    return value.replace(f"{shared}{os.sep}", "") if isinstance(value, str) else value


def work(jobs, args: argparse.Namespace) -> None:
    """Take rows from a queue until it is empty or the time is up."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(args.threads)
    while True:
        row = jobs.get()
        if row is None or time.time() > args.until:
            return
        path = file_of(row, args)
        try:
            result = run(row, args)
        except Exception as error:  # the other rows go on
            print(f"{row.name}: failed: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        finally:
            gc.collect()  # the network and its graphs, which hold on to each other
            torch.cuda.empty_cache()
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(result, indent=1) + "\n")
        draft.replace(path)
        print(f"{row.name}: {result['headline']:.2%} in {result['seconds']:.0f} s", flush=True)


def run_all(args: argparse.Namespace) -> None:
    args.results.mkdir(parents=True, exist_ok=True)
    wanted = [r for r in rows() if re.search(args.only, r.name)]
    left = [r for r in wanted if not file_of(r, args).exists()]
    print(f"{len(left)} rows of {len(wanted)} to run", flush=True)
    context = multiprocessing.get_context("spawn")
    # a queue a seed, as far as there are jobs: rows of one seed see the same pictures
    queues = [context.Queue() for _ in range(min(args.jobs, len(SEEDS)))]
    for row in left:
        queues[row.seed % len(queues)].put(row)
    workers = []
    for job in range(args.jobs):
        queue = queues[job % len(queues)]
        queue.put(None)
        workers.append(context.Process(target=work, args=(queue, args)))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


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
    if not results:
        return "not run"
    values = [100 * r["headline"] for r in results]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else " (1 seed)"
    return f"{statistics.mean(values):.1f}{spread}"


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
    p.add_argument("--shared", type=Path, help="folder of the data and the ImageNet weights")
    p.add_argument("--only", default="", help="regular expression that a row's name must hold")
    p.add_argument("--jobs", type=int, default=1, help="rows at a time, each in a process")
    p.add_argument("--workers", type=int, default=0, help="processes that load, for each row")
    p.add_argument("--threads", type=int, default=1, help="of each row's process")
    p.add_argument("--size", type=int, help="image side, where not the network's own")
    p.add_argument("--lr", type=float, help="learning rate, where not the recipe's")
    p.add_argument("--steps", type=int, help="so many steps only, to try a row out")
    p.add_argument("--minutes", type=float, default=1e6, help="begin no row after so long")
    p.add_argument("--device", default="cpu")
    p.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows' files")
    p.add_argument("--table", action="store_true", help="print the tables and run nothing")
    p.add_argument("--list", action="store_true", help="print the names of the rows")
    return p


def file_of(row: Row, args: argparse.Namespace) -> Path:
    size = f"-{args.size}px" if args.size else ""
    return args.results / f"{row.name}{size}.json"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.until = time.time() + 60 * args.minutes
    if args.list:
        print("\n".join(r.name for r in rows() if re.search(args.only, r.name)))
    elif args.table:
        print(table(args))
    elif args.shared is None:
        print(shlex.join(["accuracy.py:", "--shared FOLDER is needed"]), file=sys.stderr)
        return 2
    else:
        args.shared = args.shared.resolve()
        run_all(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

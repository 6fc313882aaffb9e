"""Training runs by the trainer of `gradfilter train`: one JSON file each, several at a time.

On a GPU the pictures, cut as the trainer's loader cuts them, stay on it for the next run, and steps
are CUDA graphs where the methods allow it.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import measure
import torch
from resident import Resident

import gradfilter as gf
from gradfilter.recipes import parts
from gradfilter.recipes.capture import Captured, refusal
from gradfilter.recipes.datasets import Data, open_data
from gradfilter.recipes.loading import per_epoch
from gradfilter.recipes.parallel import World
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Diverged, Trainer

Row = TypeVar("Row")
LOSSES = 20  # shares of a run whose mean loss is noted
SEEDS = 3


@dataclass(frozen=True)
class Run:
    """One run: what it trains, the file of its result, and what that file says beside it.

    Of the test pictures every `stride`-th is shown.
    """

    settings: Settings
    path: Path
    about: dict = field(default_factory=dict)
    stride: int = 1


def train(run: Run, args: argparse.Namespace) -> dict:
    """Train, test once at the end, and tell all of it."""
    settings, data = run.settings, opened(run.settings)
    shown = torch.arange(0, len(data.test), run.stride)
    data = replace(data, test=data.test.subset(shown)) if run.stride > 1 else data
    trainer = Trainer(
        settings, data.task, data.classes,
        ignore=data.ignore, level=data.augment, world=World(torch.device(args.device)),
    )  # fmt: skip
    total = args.steps or settings.epochs * per_epoch(len(data.train), trainer.batch)
    spent = _price(trainer)
    begin, losses, diverged = time.monotonic(), [], None
    try:
        for done in _steps(trainer, data, total, resident=args.device != "cpu"):
            if done % max(1, total // LOSSES) == 0:
                loss, count = trainer.sums.tolist()
                losses.append(round(loss / max(count, 1), 4))
                trainer.sums.zero_()
        trainer.check(total - 1)
    except Diverged as error:
        diverged = str(error)
    seconds = time.monotonic() - begin
    metrics = {} if diverged else trainer.evaluate(data.test)[0]
    trainer.close()
    return measure.about(sys.argv[0], sys.argv[1:]) | run.about | spent | {
        "settings": {k: _short(v, args.shared) for k, v in settings.as_dict().items()},
        "where": _where(trainer.plan),
        "steps": total,
        "seconds": seconds,
        "losses": losses,
        "diverged": diverged,
        "test pictures": len(data.test),
        "metrics": metrics,
        "headline": metrics.get(trainer.task.headline, 0.0),
    }  # fmt: skip


def _price(trainer: Trainer) -> dict:
    """Multiply-adds and kept bytes; not where ranks follow from the data, which noise is not."""
    if any(getattr(e.method, "energy", None) is not None for e in trainer.plan.values()):
        return {"macs of a picture": None, "kept bytes of a picture": None}
    spent = gf.cost(trainer.model, trainer.network.prepare(trainer.noise(1))).total
    return {
        "macs of a picture": {"forward": spent.forward_macs, "backward": spent.backward_macs},
        "kept bytes of a picture": spent.kept_bytes,
    }


PART = ("data", "split", "parts", "part", "per_part", "alpha", "split_seed", "test")
OPENED: dict[tuple, Data] = {}
RESIDENT: dict[tuple, Resident] = {}


def opened(settings: Settings) -> Data:
    """A data set or the part of it that is asked for, decoded once for all runs of a process."""
    key = tuple(getattr(settings, name) for name in PART)
    if key not in OPENED:
        whole = open_data(settings.data, download=False, cache=True)
        OPENED[key] = parts.choose(settings, whole)[0]
    return OPENED[key]


def _steps(trainer: Trainer, data: Data, total: int, resident: bool) -> Iterator[int]:
    """As `Trainer.steps`, or from pictures that stay on the device; tests are from there too."""
    if not resident:
        yield from trainer.steps(data.train, range(total), total)
        return
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


def _where(plan: gf.Plan) -> dict[str, int]:
    """How many trained layers run where."""
    found: dict[str, int] = {}
    for entry in plan.values():
        if entry.trained:
            place = (entry.where or "layer level").split(":")[0].split(" ")[0]
            found[place] = found.get(place, 0) + 1
    return found


def _short(value, shared: Path):
    """A setting without the place where a file lay."""
    if not isinstance(value, str) or not os.path.isabs(value):
        return value
    inside = Path(value).is_relative_to(shared)
    return str(Path(value).relative_to(shared)) if inside else Path(value).name


def chosen(rows: dict[str, Row], only: list[str]) -> list[Row]:
    """Of rows by name those that hold one of the expressions, those of the first one first."""
    found = {name: row for e in only for name, row in rows.items() if re.search(e, name)}
    return list(found.values())


def run_all(runs: list[Run], args: argparse.Namespace) -> None:
    """Take the runs whose files are not there yet, `args.jobs` at a time."""
    left = [run for run in runs if not run.path.exists()]
    print(f"{len(left)} runs of {len(runs)} to take", flush=True)
    context = multiprocessing.get_context("spawn")
    # a queue a seed, as far as there are jobs: runs of one seed see the same pictures
    queues = [context.Queue() for _ in range(min(args.jobs, SEEDS))]
    for run in left:
        queues[run.settings.seed % len(queues)].put(run)
    workers = []
    for job in range(args.jobs):
        queue = queues[job % len(queues)]
        queue.put(None)
        workers.append(context.Process(target=_work, args=(queue, args)))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _work(queue, args: argparse.Namespace) -> None:
    """Take runs from a queue until it is empty or the time is up."""
    multiprocessing.set_start_method("fork", force=True)  # loaders would be spawned as we were
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(args.threads)
    while (run := queue.get()) is not None and time.time() < args.until:
        if run.path.exists():  # by another command, meanwhile
            continue
        try:
            result = train(run, args)
        except Exception as error:  # the other runs go on
            print(f"{run.path.stem}: failed: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        finally:
            gc.collect()  # the network and its graphs, which hold on to each other
            torch.cuda.empty_cache()
        draft = run.path.with_suffix(".part")
        draft.write_text(json.dumps(result, indent=1) + "\n")
        draft.replace(run.path)
        print(f"{run.path.stem}: {result['headline']:.2%} in {result['seconds']:.0f} s", flush=True)


def add_arguments(parser: argparse.ArgumentParser, results: Path) -> None:
    """The options of every benchmark that trains."""
    add = parser.add_argument
    add("--shared", type=Path, help="folder of the data and the ImageNet weights")
    help = "regular expressions, one of which a row's name must hold; rows of the first come first"
    add("--only", nargs="+", default=[""], help=help)
    add("--jobs", type=int, default=1, help="rows at a time, each in a process")
    add("--workers", type=int, default=0, help="processes that load, for each row")
    add("--threads", type=int, default=1, help="of each row's process")
    add("--steps", type=int, help="so many steps only, to try a row out")
    add("--minutes", type=float, default=1e6, help="begin no row after so long")
    add("--device", default="cpu")
    add("--results", type=Path, default=results, help="folder of the rows' files")
    add("--table", action="store_true", help="print the tables and run nothing")
    add("--list", action="store_true", help="print the names of the rows")

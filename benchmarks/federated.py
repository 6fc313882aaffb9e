"""What does federated training gain by each method: accuracy, a client's step and memory, bytes?

CIFAR-10 in 10 parts of few classes each, EfficientNet-Lite0 with ImageNet weights, 10 rounds of
FedAvg, by the Flower app of `gradfilter federate` on a grid within one process. A row is one run;
rows that have their JSON file are not run again, and a row that was stopped goes on after its last
round. Steps and memory are measured apart, all methods in turns.

    PYTHONPATH=src python benchmarks/federated.py --shared FOLDER --device cuda --jobs 3
    PYTHONPATH=src python benchmarks/federated.py --shared FOLDER --device cuda --measure
    PYTHONPATH=src python benchmarks/federated.py --table
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import measure

RESULTS = Path(__file__).parent / "results" / "federated"
MODEL = "tf_efficientnet_lite0"
WEIGHTS = "weights_efficientnet_lite0/efficientnet-lite0-57934424.pth"
CLIENTS, ROUNDS, SEEDS = 10, 10, (0, 1, 2)
METHODS = {
    "exact": {"method": "exact"},
    "galerkin-grid7": {"method": "galerkin", "grid": 7},
    "gradient-filter-last4": {"method": "gradient-filter", "patch": 2, "last": 4},
    "exact-last4": {"method": "exact", "last": 4},
}
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One run."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-seed{self.seed}"


def rows() -> list[Row]:
    return [Row(method, seed) for seed in SEEDS for method in METHODS]


def settings_of(row: Row, args: argparse.Namespace):
    """What `gradfilter federate` would be asked."""
    from gradfilter.federated import settings

    return settings.of(
        {
            "data": str(args.shared / "cifar10"),
            "model": MODEL,
            "weights": str(args.shared / WEIGHTS),
            "simulate": CLIENTS,
            "in_process": True,
            "rounds": args.rounds,
            "split": "non-iid",
            "split_seed": row.seed,
            "seed": row.seed,
            "in_memory": True,
            "download": False,
            "deterministic": False,
            "backbone_lr": 1.0,
            "size": args.size,
            "steps": args.steps,
            "device": args.device,
            "workers": args.workers,
            "out": str((args.work / file_of(row.name, args).stem).absolute()),
        }
        | METHODS[row.method]
    )


def run(row: Row, args: argparse.Namespace) -> dict:
    """Train with all clients; what the row's file will say."""
    from gradfilter.federated import app, grid, server, settings
    from gradfilter.recipes.screen import Screen

    both = settings_of(row, args)
    out = Path(both[0].out)
    out.mkdir(parents=True, exist_ok=True)
    here = grid.InProcess(app.client, settings.to_config(both), grid.parts(CLIENTS))
    server.serve(both, Screen(), here, poll=0.0)
    rounds, clients = (_read(out / name) for name in ("rounds.csv", "clients.csv"))
    result = measure.about(__file__, sys.argv[1:]) | {
        "row": vars(row),
        "settings": _short(settings.as_dict(both), args.shared),
        "rounds": rounds,
        "used": sum(c["status"] == "used" for c in clients),
        "asked": len(clients),
        "bytes a round": rounds[-1]["bytes"],
        "bytes a round, whole networks": rounds[-1]["full_bytes"],
        "top1": rounds[-1]["test_top1"],
    }
    shutil.rmtree(out)
    return result


def _read(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return [{k: _value(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> float | str | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text


def _short(options: dict, shared: Path) -> dict:
    """Without where things lay on this machine."""
    prefix = f"{shared}/"
    kept = {k: v.replace(prefix, "") if isinstance(v, str) else v for k, v in options.items()}
    return {k: v for k, v in kept.items() if k != "out"}


def measured(args: argparse.Namespace) -> dict:
    """A client's training step by every method, in turns: seconds, and peak memory over weights."""
    import torch

    from gradfilter import stopwatch

    if args.device == "cuda":
        measure.use_cuda()
    steps = {name: _step(name, args) for name in METHODS}
    for step in steps.values():
        for _ in range(3):
            step()
    device = torch.device(args.device)
    clock = measure.cuda_clock if device.type == "cuda" else measure.cpu_clock
    found = measure.in_turns(steps, args.repeats, clock)
    peaks, problems = stopwatch.peaks(steps, device)
    return measure.about(__file__, sys.argv[1:]) | {
        "batch": _step_settings(args).batch,
        "size": args.size,
        "seconds": found,
        "peak bytes": {name: statistics.median(values) for name, values in peaks.items()},
        "problems": problems,
    }


def _step_settings(args: argparse.Namespace, method: str = "exact"):
    return settings_of(Row(method, 0), args)[0]


def _step(method: str, args: argparse.Namespace):
    """The step that a client takes, on pictures that are on its device already."""
    import torch

    from gradfilter.recipes.trainer import Trainer

    trainer = Trainer(_step_settings(args, method), "classification", tuple("0123456789"))
    batch = (trainer.noise(trainer.batch),), torch.arange(trainer.batch) % 10
    return lambda: trainer.step(batch, 1, 1e-6)


def work(jobs, args: argparse.Namespace) -> None:
    """Take rows from a queue until it is empty or the time is up."""
    import torch

    multiprocessing.set_start_method("fork", force=True)  # loaders would be spawned as we were
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(args.threads)
    while (row := jobs.get()) is not None and time.time() < args.until:
        begin = time.monotonic()
        try:
            result = run(row, args)
        except Exception as error:  # the other rows go on
            print(f"{row.name}: failed: {type(error).__name__}: {error}", flush=True)
            continue
        measure.write(file_of(row.name, args), result)
        took = time.monotonic() - begin
        print(f"{row.name}: {result['top1']:.2%}, {took:.0f} s of this call", flush=True)


def run_all(args: argparse.Namespace) -> None:
    wanted = [r for r in rows() if all(word in r.name for word in args.only)]
    left = [r for r in wanted if not file_of(r.name, args).exists()]
    print(f"{len(left)} rows of {len(wanted)} to run", flush=True)
    context = multiprocessing.get_context("spawn")
    jobs = context.Queue()
    for row in [*left, *[None] * args.jobs]:
        jobs.put(row)
    workers = [context.Process(target=work, args=(jobs, args)) for _ in range(args.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def table(args: argparse.Namespace) -> str:
    """Mean and spread over the seeds, with the step and memory that were measured apart."""
    path = file_of(f"steps-{args.device}", args)
    steps = json.loads(path.read_text()) if path.exists() else None
    lines = []
    for method in METHODS:
        files = [file_of(Row(method, seed).name, args) for seed in SEEDS]
        found = [json.loads(path.read_text()) for path in files if path.exists()]
        lines.append([method, *_accuracy(found), *_measured(steps, method), *_bytes(found)])
    header = ["method", "top-1 %", "step, ms", "peak, MiB", "MiB a round", "whole networks, MiB"]
    return measure.table(header, lines)


def _accuracy(found: list[dict]) -> list[str]:
    if not found:
        return ["not run"]
    values = [100 * r["top1"] for r in found]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return [f"{statistics.mean(values):.1f}{spread} ({len(values)} seeds)"]


def _measured(steps: dict | None, method: str) -> list[str]:
    if steps is None:
        return ["not run", "not run"]
    times = steps["seconds"][method]
    clock = times["cuda" if "cuda" in times else "cpu"]
    peak = steps["peak bytes"].get(method)
    return [f"{1e3 * statistics.median(clock):.1f}", f"{peak / MIB:.0f}" if peak else "?"]


def _bytes(found: list[dict]) -> list[str]:
    if not found:
        return ["not run", "not run"]
    keys = ("bytes a round", "bytes a round, whole networks")
    return [f"{statistics.mean(r[key] for r in found) / MIB:.1f}" for key in keys]


def file_of(name: str, args: argparse.Namespace) -> Path:
    """Where a result is written; what is not the usual run has it in its name."""
    size = f"-{args.size}px" if args.size else ""
    tried = f"-{args.steps}steps" if args.steps else ""
    rounds = f"-{args.rounds}rounds" if args.rounds != ROUNDS else ""
    return args.results / f"{name}{size}{tried}{rounds}.json"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--shared", type=Path, help="folder of the data and the ImageNet weights")
    p.add_argument("--only", nargs="*", default=[], help="words that a row's name must have")
    p.add_argument("--jobs", type=int, default=1, help="rows at a time, each in a process")
    p.add_argument("--workers", type=int, default=0, help="processes that load, for each row")
    p.add_argument("--threads", type=int, default=1, help="of each row's process")
    p.add_argument("--size", type=int, help="image side, where not the network's own")
    p.add_argument("--rounds", type=int, default=ROUNDS)
    p.add_argument("--steps", type=int, help="so many steps a client and round, to try it out")
    p.add_argument("--minutes", type=float, default=1e6, help="begin no row after so long")
    p.add_argument("--device", default="cpu")
    p.add_argument("--repeats", type=int, default=10, help="turns of --measure")
    p.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows' files")
    p.add_argument("--work", type=Path, default=Path("runs/federated"), help="of unfinished rows")
    p.add_argument("--measure", action="store_true", help="measure steps instead of training")
    p.add_argument("--table", action="store_true", help="print the table and run nothing")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.until = time.time() + 60 * args.minutes
    if args.table:
        print(table(args))
        return 0
    if args.shared is None:
        print("federated.py: --shared FOLDER is needed", file=sys.stderr)
        return 2
    args.shared = args.shared.resolve()
    if args.measure:
        measure.write(file_of(f"steps-{args.device}", args), measured(args))
    else:
        run_all(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The tables of targets, each row a run of benchmarks/step.py whose JSON file is kept."""

from __future__ import annotations

import argparse
import importlib.util
import json
import operator
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import measure

MODELS = ("mobilenet_v2", "tf_efficientnet_lite0", "resnet18")
STAND_IN = {"tf_efficientnet_lite0": "efficientnet_b0"}  # where timm is missing
MEETS = {"<=": operator.le, ">=": operator.ge}

GALERKIN = ("--batch", "8", "--method", "galerkin", "--grid", "7")
SINGLE = ("--batch", "1", "--method", "galerkin", "--grid", "7")
LAST = (*GALERKIN, "--last", "4")
FILTER = ("--batch", "8", "--method", "gradient-filter", "--patch", "4")
CUDA = ("--device", "cuda", "--batch", "128", "--method", "galerkin", "--grid", "7")
NONE = (None, None, None)
Value = Callable[[dict], float]


@dataclass(frozen=True)
class Row:
    """A line of the table: the run it reads, what it reads there, and a target per model."""

    title: str
    options: tuple[str, ...]
    value: Value
    meets: str = "<="
    targets: tuple[float | None, ...] = NONE


def time_ratio(name: str) -> Value:
    return lambda result: result["ratios"][name][result["headline"]]


def ratio(name: str, key: str) -> Value:
    return lambda result: result["ratios"][name][key]


def milliseconds(variant: str) -> Value:
    return lambda result: 1e3 * min(result["variants"][variant]["seconds"]["cuda"])


def gigabytes(variant: str) -> Value:
    return lambda result: result["variants"][variant]["peak"]["raw"] / 1e9


FOLDED, EXACT = time_ratio("step / folded inference"), time_ratio("speed-up over exact")
PEAK, KEPT = "peak memory: step / folded inference", "kept bytes: exact / engine"
CPU_ROWS = [
    Row("galerkin grid=7: step / folded inference", GALERKIN, FOLDED, "<=", (1.7, 1.75, 1.8)),
    Row("the same: speed-up over exact", GALERKIN, EXACT, ">=", (3, 3, 1.8)),
    Row("batch 1: speed-up over exact", SINGLE, EXACT, ">=", (2.8, 2.8, 1.6)),
    Row("gradient-filter patch=4: step / folded inference", FILTER, FOLDED, "<=", (1.25,) * 3),
    Row("last=4: step / folded inference", LAST, FOLDED, "<=", (1.15,) * 3),
    Row(PEAK, GALERKIN, ratio(PEAK, "activations"), "<=", (1.2,) * 3),
    Row("the same, mapped", GALERKIN, ratio(PEAK, "activations, mapped"), "<=", (1.2,) * 3),
    Row(KEPT, GALERKIN, ratio(KEPT, "bytes"), ">=", (12,) * 3),
]


def cuda_rows(precision: str, options: tuple[str, ...], targets: bool) -> list[Row]:
    def row(title: str, value: Value, *wanted: float | None) -> Row:
        return Row(f"{precision}: {title}", options, value, "<=", wanted if targets else NONE)

    return [
        row("engine, CUDA graph, ms", milliseconds("engine graph"), 9, None, 7),
        row("engine, eager, ms", milliseconds("engine"), *NONE),
        row("exact, CUDA graph, ms", milliseconds("exact graph"), *NONE),
        row("exact, compiled, ms", milliseconds("compiled"), *NONE),
        row("exact, eager, ms", milliseconds("exact"), *NONE),
        row("folded inference, CUDA graph, ms", milliseconds("folded graph"), *NONE),
        row("engine, peak GB over weights", gigabytes("engine"), 1.8, None, 1.1),
        row("exact, peak GB over weights", gigabytes("exact"), *NONE),
        row("folded inference, peak GB over weights", gigabytes("folded"), *NONE),
    ]


CUDA_ROWS = cuda_rows("TF32", CUDA, True) + cuda_rows("bf16", (*CUDA, "--amp", "bf16"), False)


def run(args: argparse.Namespace) -> int:
    """Run what is not there yet, then print the table; 1 when a run failed."""
    rows = CUDA_ROWS if args.suite_cuda else CPU_ROWS
    models = {m: _available(m) for m in ([args.model] if args.model else MODELS)}
    settings = dict.fromkeys(row.options for row in rows)
    runs = [(model, options) for options in settings for model in models.values()]
    failed = 0
    for i, (model, options) in enumerate(runs):
        path = args.results / _file(model, options, args)
        fresh = args.force or not path.exists()
        print(f"[{i + 1}/{len(runs)}] {path.name}{'' if fresh else ': there already'}", flush=True)
        if fresh:
            failed += not _step(model, options, args, path)
    print("\n" + summary(rows, models, args))
    return 1 if failed else 0


def _step(model: str, options: tuple[str, ...], args: argparse.Namespace, path: Path) -> bool:
    common = ["--size", args.size, "--threads", args.threads, "--repeats", args.repeats]
    script = Path(__file__).with_name("step.py")
    command = [sys.executable, script, "--model", model, *options, *common, "--out", path]
    return subprocess.run(list(map(str, command))).returncode == 0


def _available(model: str) -> str:
    if model not in STAND_IN or importlib.util.find_spec("timm"):
        return model
    print(f"timm is not installed: {STAND_IN[model]} stands in for {model}")
    return STAND_IN[model]


def _file(model: str, options: tuple[str, ...], args: argparse.Namespace) -> str:
    given = dict(zip(options[::2], options[1::2], strict=True))
    parts = ["step", given.get("--device", "cpu"), model, f"b{given['--batch']}", given["--method"]]
    parts += [f"{k}{given['--' + k]}" for k in ("grid", "patch", "last") if f"--{k}" in given]
    parts += [given["--amp"]] if "--amp" in given else []
    parts += [f"{args.size}px"] if args.size != 224 else []
    parts += [f"{args.threads}threads"] if args.threads != 1 else []
    return "-".join(parts) + ".json"


def summary(rows: list[Row], models: dict[str, str], args: argparse.Namespace) -> str:
    """Target and measured value for every model."""
    header = [""]
    for model in models.values():
        header += [model, "target", "met"]
    lines = []
    for row in rows:
        cells = [row.title]
        for model, used in models.items():
            path = args.results / _file(used, row.options, args)
            target = row.targets[MODELS.index(model)] if model in MODELS and model == used else None
            cells += _cells(row, path, target)
        lines.append(cells)
    return measure.table(header, lines)


def _cells(row: Row, path: Path, target: float | None) -> list[str]:
    wanted = "-" if target is None else f"{row.meets} {target:g}"
    try:
        value = row.value(json.loads(path.read_text()))
    except (OSError, KeyError):  # the run failed, or did not have this variant
        return ["not run", wanted, "-"]
    if target is None:
        return [f"{value:.2f}", wanted, "-"]
    return [f"{value:.2f}", wanted, "yes" if MEETS[row.meets](value, target) else "NO"]

"""What does a training step cost, in time and memory, against inference and exact training?

One process times every variant in turns: inference (eager, and with batch norm folded), exact
training (eager, and compiled), the layer level and the engine. Batch norm keeps its statistics
and trains gamma and beta, the loss is cross-entropy, and the step of SGD counts. The weights are
random, the batch-norm statistics those of a batch of noise.

    PYTHONPATH=src python benchmarks/step.py --model mobilenet_v2 --batch 8 --grid 7
    PYTHONPATH=src python benchmarks/step.py --model resnet18 --method gradient-filter --patch 4
    PYTHONPATH=src python benchmarks/step.py --suite         # the CPU table, resumable
    PYTHONPATH=src python benchmarks/step.py --suite-cuda    # the GPU table

Time on the CPU is given as best and median of wall time and of the process's own CPU time, which
a shared machine disturbs less. Peak memory is growth over loaded weights: resident memory of a
child process per variant, or the CUDA allocator's. "raw" is all of it; "activations" leaves out
gradients and optimizer state, but is never less than the peak of a first forward pass. glibc's
heap keeps much of what is freed, more or less by chance: of the variants whose ratios are asked for
the middle one of three children counts. "mapped" is a child that runs without that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import measure
import torch
from torch import Tensor
from variants import TITLES, Bench, Captured, Inference, Training

import gradfilter as gf

MIB = 2**20
PEAK_STEPS = 8  # glibc's heap goes on growing for a few steps
# Under it glibc gives every block of 256 KiB its own pages, and takes them back when it is freed.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "262144"}
# name -> (above, below); those whose variants were not run are left out
RATIOS = {
    "step / folded inference": ("engine", "folded"),
    "step / eager inference": ("engine", "inference"),
    "speed-up over exact": ("exact", "engine"),
    "speed-up over compiled": ("compiled", "engine"),
    "speed-up over the layer level": ("layer", "engine"),
    "exact / folded inference": ("exact", "folded"),
    "graph: step / folded inference": ("engine graph", "folded graph"),
    "graph: speed-up over exact graph": ("exact graph", "engine graph"),
    "graph: speed-up over compiled": ("compiled", "engine graph"),
}
PEAKS = {
    "activations": ("peak", "activations"),
    "raw": ("peak", "raw"),
    "activations, mapped": ("mapped", "activations"),
    "raw, mapped": ("mapped", "raw"),
}
# Allowed distances of outputs and of gradients. Rounding puts some pixels on the other side of a
# ReLU's corner, each of which shows in the gradient; in float64 engine and layer level agree.
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-3, 0.02


def check(bench: Bench) -> dict[str, dict[str, float]]:
    """How far the variants are apart, in full float32, which is judged, and as they are run."""
    with measure.full_float32():
        found = distances(bench.without_amp())
    for name, distance in found.items():
        limit = GRADIENT_LIMIT if "gradient" in name else OUTPUT_LIMIT
        if not distance <= limit:
            raise AssertionError(f"step: {name} is off by {distance:.2g}, allowed are {limit}")
    rough = bench.args.device == "cuda" or bench.args.amp is not None
    return {"float32": found} | ({"as run": distances(bench)} if rough else {})


def distances(bench: Bench) -> dict[str, float]:
    """|a - b| / |b| of outputs, losses and gradients that should be equal."""
    plain, fold = (bench.build(name)().float() for name in ("inference", "folded"))
    loss, gradient = {}, {}
    for name in ("exact", "layer", "engine"):
        run = bench.build(name)
        result = run.forward()
        result.backward()
        loss[name] = float(result.detach())
        grads = [p.grad for p in run.model.parameters() if p.grad is not None]
        gradient[name] = torch.cat([g.flatten().float() for g in grads])
    return {
        "folded output": _distance(fold, plain),
        "layer level loss": _distance(loss["layer"], loss["exact"]),
        "engine loss": _distance(loss["engine"], loss["exact"]),
        "engine gradient": _distance(gradient["engine"], gradient["layer"]),
    }


def _distance(a, b) -> float:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return float((a - b).norm() / b.norm())


def peak(run: Inference | Training, watch) -> dict[str, int | list[int]]:
    """Peak growth over several steps, from a start without gradients and optimizer state."""
    found: dict[str, int | list[int]] = {"forward": [], "backward": []}
    for _ in range(PEAK_STEPS):
        watch.reset()
        result = run.forward()
        found["forward"].append(watch.read())
        if isinstance(run, Training):
            watch.reset()
            run.backward(result)
            found["backward"].append(watch.read())
        del result
    gradients = states = 0
    if isinstance(run, Training):
        gradients = measure.nbytes(p.grad for p in run.model.parameters())
        held = (v for state in run.optimizer.state.values() for v in state.values())
        states = measure.nbytes(v for v in held if isinstance(v, Tensor))
    raw = max(found["forward"] + found["backward"])
    return found | {
        "raw": raw,
        "activations": max(found["forward"][0], raw - gradients - states),
        "gradients": gradients,
        "optimizer state": states,
    }


def resident_peak(bench: Bench, name: str) -> dict[str, int]:
    """The peak of one variant in this process, which does nothing else."""
    run = bench.build(name)
    small = bench.images(1, max(32, bench.args.size // 4))
    if name == "compiled":  # another size would compile another program
        run()
    elif isinstance(run, Training):
        replace(run, x=small, t=bench.t[:1])()
    else:
        replace(run, x=small)()
    run.clear()
    return peak(run, measure.ResidentPeak())


def peaks(bench: Bench, runs: dict, argv: list[str]) -> dict[str, dict[str, dict]]:
    """The peaks of every variant, graphs excepted: they allocate what their runs do."""
    found = {}
    for name, run in runs.items():
        if isinstance(run, Captured):
            continue
        measure.progress(f"peak memory: {TITLES[name]}")
        if bench.args.device == "cuda":
            run.clear()
            found[name] = {"peak": peak(run, measure.CudaPeak())}
        else:
            command = [sys.executable, __file__, *argv, "--peak-of", name]
            asked = name in ("inference", "folded", "engine")  # for their ratios
            children = [_child(command, {}) for _ in range(3 if asked else 1)]
            children.sort(key=lambda child: child["activations"])
            each = [child["activations"] for child in children]
            found[name] = {"peak": children[len(children) // 2] | {"activations of each": each}}
            if asked:
                found[name]["mapped"] = _child(command, MAPPED)
    return found


def _child(command: list[str], environment: dict[str, str]) -> dict:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def build(bench: Bench) -> tuple[dict, dict[str, str]]:
    """Every variant, warmed up; and why a step could not be captured in a CUDA graph."""
    runs, failed = {}, {}
    for name in bench.variants():
        measure.progress(f"building: {TITLES[name]}")
        try:
            runs[name] = bench.build(name)
        except RuntimeError as error:
            if not name.endswith(" graph"):
                raise
            torch.cuda.set_stream(torch.cuda.default_stream())  # a failed capture leaves its own
            failed[name] = str(error).strip().partition("\n")[0]
            continue
        for _ in range(2):
            runs[name]()
    return runs, failed


def run(args: argparse.Namespace, argv: list[str]) -> dict:
    """Measure every variant; the result that goes into the JSON file."""
    bench = Bench(args)
    checks = check(bench)
    runs, failed = build(bench)
    training = {name: r for name, r in runs.items() if isinstance(r, Training)}
    kept = {name: measure.kept_bytes(r.forward, r.model) for name, r in training.items()}
    clock = measure.cuda_clock if args.device == "cuda" else measure.cpu_clock
    samples = measure.in_turns(runs, args.repeats, clock)
    for name, r in runs.items():
        model = r.run.model if isinstance(r, Captured) else r.model
        if not all(p.isfinite().all() for p in model.parameters()):
            raise AssertionError(f"step: the weights of '{TITLES[name]}' overflowed: lower --lr")
    held = peaks(bench, runs, argv) if args.peak else {}
    variants = {
        name: {"seconds": samples[name], "kept": kept.get(name), **held.get(name, {})}
        for name in runs
    }
    return measure.about(__file__, argv) | {
        "setting": {k: v for k, v in vars(args).items() if isinstance(v, int | float | str)},
        "method": repr(bench.method),
        "layers": bench.places(),
        "checks": checks,
        "not captured": failed,
        "headline": headline(args),
        "ratios": ratios(variants),
        "variants": variants,
    }


def headline(args: argparse.Namespace) -> str:
    """The statistic that speaks for a run; CPU time says little of several threads."""
    if args.device == "cuda":
        return "cuda best"
    return "cpu best" if args.threads == 1 else "wall best"


def ratios(variants: dict[str, dict]) -> dict[str, dict[str, float]]:
    found = {
        name: measure.ratios(variants[a]["seconds"], variants[b]["seconds"])
        for name, (a, b) in RATIOS.items()
        if a in variants and b in variants
    }
    shown = [key for key in PEAKS if PEAKS[key][0] in variants["engine"]]
    for kind, below in (("folded", "folded"), ("eager", "inference")) if shown else ():
        top, bottom = variants["engine"], variants[below]
        found[f"peak memory: step / {kind} inference"] = {
            key: _held(top, *PEAKS[key]) / _held(bottom, *PEAKS[key]) for key in shown
        }
    exact, engine = (sum(variants[name]["kept"].values()) for name in ("exact", "engine"))
    found["kept bytes: exact / engine"] = {"bytes": exact / engine}
    return found


def _held(variant: dict, *key: str) -> int | None:
    """The bytes under a key of PEAKS, where they were measured."""
    return variant.get(key[0], {}).get(key[1])


def report(result: dict) -> str:
    """The readable tables."""
    setting, variants = result["setting"], result["variants"]
    clocks = list(next(iter(variants.values()))["seconds"])
    columns = [(clock, name) for clock in clocks for name in measure.STATISTICS]
    shown = [title for title, key in PEAKS.items() if key[0] in variants["engine"]]
    rows = []
    for name, v in variants.items():
        times = [measure.STATISTICS[s](v["seconds"][c]) * 1e3 for c, s in columns]
        kept = sum(v["kept"].values()) if v["kept"] else None
        memory = [kept, *(_held(v, *PEAKS[title]) for title in shown)]
        cells = ["-" if m is None else f"{m / MIB:.1f}" for m in memory]
        rows.append([TITLES[name], *(f"{ms:.2f}" for ms in times), *cells])
    header = ["variant", *(f"{c} {s} ms" for c, s in columns), "kept MiB"]
    header += [f"peak {title} MiB" for title in shown]
    what = f"{setting['model']}, batch {setting['batch']}, {setting['size']} px, {result['method']}"
    lines = [what, f"layers: {result['layers']}", measure.table(header, rows), ""]
    lines += [f"{TITLES[n]}: not captured: {why}" for n, why in result["not captured"].items()]
    return "\n".join([*lines, ratio_tables(result["ratios"])])


def ratio_tables(found: dict[str, dict[str, float]]) -> str:
    """One table for all ratios that have the same columns."""
    tables = []
    for columns in dict.fromkeys(map(tuple, found.values())):
        rows = [
            [name, *(f"{value:.2f}" for value in values.values())]
            for name, values in found.items()
            if tuple(values) == columns
        ]
        tables.append(measure.table(["ratio", *columns], rows))
    return "\n\n".join(tables)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--model", help="a torchvision or timm name; mobilenet_v2, or all of a suite")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--size", type=int, default=224, help="image side in pixels")
    p.add_argument("--threads", type=int, default=1, help="on the CPU; 1 stays on one core")
    p.add_argument("--method", choices=list(gf.METHODS), default="galerkin")
    p.add_argument("--grid", type=int, help="patches a side")
    p.add_argument("--patch", type=int, help="patch side, in pixels")
    p.add_argument("--last", type=int, help="train only the last so many layers")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--amp", choices=["bf16"], help="run under autocast")
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--momentum", type=float, default=0.0)
    compiled = "compiled exact training too; on by default with cuda"
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help=compiled)
    held = "peak memory too; on the CPU that takes a child process for every variant"
    p.add_argument("--peak", action=argparse.BooleanOptionalAction, default=True, help=held)
    p.add_argument("--repeats", type=int, default=10, help="turns, of two timings each")
    p.add_argument("--out", type=Path, help="JSON file of the result")
    p.add_argument("--peak-of", choices=list(TITLES), help=argparse.SUPPRESS)
    p.add_argument("--suite", action="store_true", help="the CPU table of targets")
    p.add_argument("--suite-cuda", action="store_true", help="the GPU table of targets")
    folder = "a suite's JSON files; what is there is not run again"
    p.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help=folder)
    p.add_argument("--force", action="store_true", help="run them again")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.suite or args.suite_cuda:
        import suite

        return suite.run(args)
    args.model = args.model or "mobilenet_v2"
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    if args.peak_of:
        print(json.dumps(resident_peak(Bench(args), args.peak_of)))
        return 0
    result = run(args, argv)
    print(report(result))
    if args.out:
        measure.write(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

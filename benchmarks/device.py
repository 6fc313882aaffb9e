"""A training step in PyTorch and in ONNX Runtime: time, memory and file size, side by side.

Every measurement is a process of its own, on one thread; the variants take turns, so that a busy
machine is busy for all of them. Time is processor time of a step, best and median of all turns.
Memory is the resident size of the whole process at its peak, and its growth over what was there
when model and graph were loaded. SGD with momentum 0.9 updates the parameters in each variant.
"Portable" are the graphs for every processor; on x86 the runner takes those in blocks.

    python benchmarks/device.py                               # the whole table, about 20 minutes
    python benchmarks/device.py --models mobilenet_v2 --batches 1 --layers all
    python benchmarks/device.py --models fcn-mobilenet_v2 --size 256 --patch 2 --out masks.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
RUNNER = HERE.parent / "device" / "src"
EXACT, PLAN, PORTABLE = "ONNX Runtime exact", "ONNX Runtime plan", ", portable"
VARIANTS = ("PyTorch exact", "PyTorch engine", EXACT, PLAN, EXACT + PORTABLE, PLAN + PORTABLE)
MODELS = ("mobilenet_v2", "tf_efficientnet_lite0")
LAYERS = {"last 4": 4, "all": None}
CLASSES = 11  # of masks, as CamVid has


def main() -> None:
    args = arguments()
    if args.child:
        print(json.dumps(CHILDREN[args.child[0]](*args.child[1:])))
        return
    cases = [(m, b, n) for m in args.models for b in args.batches for n in args.layers]
    path = args.out
    found = json.loads(path.read_text())["rows"] if path.exists() else {}
    for case in cases:
        found[", ".join(map(str, case))] = measured(*case, args)
        write(path, __file__, found)
    print(table(found))


def write(path: Path, script: str, rows: dict) -> None:
    import measure  # loads torch, which the measured processes must not

    about = measure.about(script, sys.argv[1:])
    about["versions"]["onnxruntime"] = metadata.version("onnxruntime")
    measure.write(path, {"about": about, "rows": rows})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS)
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    add("--repeats", type=int, default=3, help="turns of every variant")
    add("--steps", type=int, default=6, help="steps of a turn; the first is not counted")
    add("--size", type=int, default=224, help="image side in pixels")
    add("--patch", type=int, help="GalerkinFilter(patch=...) instead of GalerkinFilter(grid=7)")
    add("--out", type=Path, default=HERE / "results" / "device.json")
    add("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(model: str, batch: int, layers: str, args: argparse.Namespace) -> dict:
    """All variants of one case, in turns."""
    method = "grid=7" if args.patch is None else f"patch={args.patch}"
    print(f"{model}, batch {batch}, {layers}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as place:
        folders = {v: f"{place}/{v}" for v in (EXACT, PLAN)}
        common = (model, str(batch), str(args.size), layers)
        methods = {v: "exact" if "exact" in v else method for v in VARIANTS}
        sizes = {v: child("export", *common, methods[v], folders[v]) for v in folders}
        turns: dict[str, list[dict]] = {v: [] for v in VARIANTS}
        for _ in range(args.repeats):
            for v in VARIANTS[:2]:
                turns[v].append(child("torch", *common, methods[v], str(args.steps)))
            for v in VARIANTS[2:]:
                folder = folders[v.removesuffix(PORTABLE)]
                turns[v].append(child("runtime", v, folder, str(args.steps)))
    return {v: summary(turns[v]) | sizes.get(v, {}) for v in VARIANTS}


def summary(turns: list[dict]) -> dict:
    seconds = [s for turn in turns for s in turn["seconds"]]
    return {
        "seconds": seconds,
        "best": min(seconds),
        "median": statistics.median(seconds),
        "peak": min(turn["peak"] for turn in turns),
        "growth": min(turn["peak"] - turn["loaded"] for turn in turns),
    }


def child(*arguments: str, script: str = __file__) -> dict:
    """The answer of a process of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(RUNNER), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, script, "--child", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def converted(model: str, batch: str, size: str, layers: str, method: str):
    import torch

    import gradfilter as gf
    from gradfilter.recipes import models

    torch.manual_seed(0)
    x = torch.randn(int(batch), 3, int(size), int(size))
    if "-" in model:  # a segmentation network, HEAD-ENCODER
        built = models.build(model, CLASSES, task="segmentation", weights="none", size=int(size))
        net, t = built.model.train(), torch.zeros(int(batch), *x.shape[2:], dtype=torch.int64)
    else:
        net, t = models.create(model).train(), torch.zeros(int(batch), dtype=torch.int64)
    # the same layers are trained by both: exact training counts Linear layers too
    knob, _, number = ("grid=7" if method == "exact" else method).partition("=")
    gf.convert(net, gf.GalerkinFilter(**{knob: int(number)}), example=x, last=LAYERS[layers])
    if method == "exact":
        trained = {n for n, p in net.named_parameters() if p.requires_grad}
        gf.convert(net, gf.Exact(), example=x)
        for n, p in net.named_parameters():
            p.requires_grad_(n in trained)
    own = [p for p in net.parameters() if p.requires_grad]
    return net, x, t, torch.optim.SGD(own, lr=1e-4, momentum=0.9)


def export(model: str, batch: str, size: str, layers: str, method: str, folder: str) -> dict:
    """Write a folder; its size."""
    import gradfilter as gf

    net, x, t, optimizer = converted(model, batch, size, layers, method)
    path = gf.export(net, x, t, folder, optimizer=optimizer, batch=int(batch))
    return {"files": {f.name: f.stat().st_size for f in path.iterdir()}}


def torch_steps(model: str, batch: str, size: str, layers: str, method: str, steps: str) -> dict:
    import time

    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    net, x, t, optimizer = converted(model, batch, size, layers, method)
    loaded, seconds = resident("VmRSS"), []
    for _ in range(int(steps)):
        begin = time.process_time()
        optimizer.zero_grad()
        scores = net(x)
        if t.ndim == 3:
            scores = F.interpolate(scores, t.shape[1:], mode="bilinear", align_corners=False)
        F.cross_entropy(scores, t).backward()
        optimizer.step()
        seconds.append(time.process_time() - begin)
    return {"seconds": seconds[1:], "peak": resident("VmHWM"), "loaded": loaded}


def runtime_steps(variant: str, folder: str, steps: str) -> dict:
    import time

    import numpy as np
    from gradfilter_device import memory
    from gradfilter_device.exported import Exported
    from gradfilter_device.stepping import Stepper

    memory.keep()  # as the runner does
    model = Exported(Path(folder))
    model.blocks &= not variant.endswith(PORTABLE)
    stepper = Stepper(model, 1, model.start())
    images, targets = (model.manifest[name] for name in ("images", "targets"))
    images = np.random.RandomState(0).standard_normal(images).astype(np.float32)
    targets = np.zeros(targets, np.int64)
    loaded, seconds = resident("VmRSS"), []
    for _ in range(int(steps)):
        begin = time.process_time()
        stepper.step(images, targets, 1e-4)
        seconds.append(time.process_time() - begin)
    return {"seconds": seconds[1:], "peak": resident("VmHWM"), "loaded": loaded}


CHILDREN = {"export": export, "torch": torch_steps, "runtime": runtime_steps}


def resident(key: str) -> int:
    """Resident bytes now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def table(rows: dict) -> str:
    head = "| | variant | step, ms: best (median) | peak, MB | growth, MB | files, MB |"
    lines = [head, "|---|---|---|---|---|---|"]
    for case, variants in rows.items():
        for name, v in variants.items():
            size = sum(v["files"].values()) / 1e6 if "files" in v else None
            lines.append(
                f"| {case} | {name} | {1e3 * v['best']:.0f} ({1e3 * v['median']:.0f}) "
                f"| {v['peak'] / 1e6:.0f} | {v['growth'] / 1e6:.0f} "
                f"| {'' if size is None else f'{size:.1f}'} |"
            )
        for which in ("", PORTABLE):
            exact, plan = variants[EXACT + which], variants[PLAN + which]
            lines.append(
                f"| | plan against exact{which} | {exact['best'] / plan['best']:.2f}x "
                f"({exact['median'] / plan['median']:.2f}x) faster | "
                f"| {plan['growth'] / exact['growth']:.2f}x | |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

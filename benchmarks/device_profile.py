"""Where the time of an exported step of one image goes, all layers trained, by ONNX operator.

ONNX Runtime's own profiler, on one thread, in a process of its own for each step: of every node the
median of all steps, less what the profiler takes itself (the quickest Reshape, which does nothing),
summed by operator. Beside it, without the profiler, the best processor time of a step and of the
forward pass alone (`predict.onnx`).

With the profiler on, the largest map is given back to the system and taken anew at every step: its
node, a Conv, has 1 to 2 ms too many, which are page faults that a step without it does not have.

    python benchmarks/device_profile.py                       # both networks, a minute
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import device

STEPS, SIZE, SHOWN = 20, 224, 12


def main() -> None:
    args = arguments()
    if args.child:
        print(json.dumps(profiled(*args.child)))
        return
    rows = {}
    for model in args.models:
        for method in ("exact", "grid=7"):
            with tempfile.TemporaryDirectory() as folder:
                device.child("export", model, "1", str(SIZE), "all", method, folder)
                rows[f"{model}, {method}"] = device.child(folder, script=__file__)
    device.write(args.out, __file__, rows)
    for name, row in rows.items():
        kinds = ", ".join(f"{k} {1e3 * s:.1f}" for k, s in list(row["kinds"].items())[:SHOWN])
        print(f"{name}: step {1e3 * row['step']:.1f} ms, forward {1e3 * row['forward']:.1f}")
        print(f"    {kinds}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=device.MODELS)
    parser.add_argument("--out", type=Path, default=device.HERE / "results" / "device-profile.json")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def profiled(folder: str) -> dict:
    """Seconds of a step, of the forward pass alone, and of a step by operator."""
    import numpy as np
    from gradfilter_device import memory
    from gradfilter_device.exported import PREDICT, Exported
    from gradfilter_device.stepping import Stepper

    memory.keep()  # as the runner does
    model = Exported(Path(folder))
    images = np.random.RandomState(0).standard_normal((1, 3, SIZE, SIZE)).astype(np.float32)
    targets = np.zeros(1, np.int64)
    stepper, forward = Stepper(model, 1, model.start()), model.session(PREDICT, 1)
    given = {n: stepper.values[n] for n in model.parameters} | {"images": images}
    found = {
        "step": best(lambda: stepper.step(images, targets, 1e-4)),
        "forward": best(lambda: forward.run(None, given)),
    }
    with profiling(folder):
        stepper = Stepper(model, 1, model.start())
    best(lambda: stepper.step(images, targets, 1e-4))
    return found | by_kind(Path(stepper.session.end_profiling()))


def best(run: Callable) -> float:
    seconds = []
    for _ in range(STEPS):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return min(seconds)


@contextmanager
def profiling(folder: str) -> Iterator[None]:
    """Sessions that are made within have ONNX Runtime's profiler on."""
    import onnxruntime

    plain = onnxruntime.SessionOptions

    def options():
        found = plain()
        found.enable_profiling, found.profile_file_prefix = True, f"{folder}/profile"
        return found

    onnxruntime.SessionOptions = options
    try:
        yield
    finally:
        onnxruntime.SessionOptions = plain


def by_kind(path: Path) -> dict:
    """Seconds by operator, the most first, and how many nodes there are."""
    times, kinds = defaultdict(list), {}
    for event in json.loads(path.read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["name"]].append(1e-6 * event["dur"])
            kinds[event["name"]] = event["args"]["op_name"]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    nothing = min(s for name, s in medians.items() if kinds[name] == "Reshape")
    found: dict[str, float] = defaultdict(float)
    for name, seconds in medians.items():
        found[kinds[name]] += max(seconds - nothing, 0)
    ranked = dict(sorted(found.items(), key=lambda pair: -pair[1]))
    return {"kinds": ranked, "nodes": len(kinds), "nothing": nothing}


if __name__ == "__main__":
    main()

"""What this machine computes, against what PyTorch did when the network was exported."""

from __future__ import annotations

import time

import numpy as np

from gradfilter_device import memory
from gradfilter_device.exported import PREDICT, Exported, Unusable
from gradfilter_device.stepping import Stepper
from gradfilter_device.training import Tester

TOLERANCE = 1e-3  # of a loss; float32 adds in another order everywhere


def compare(model: Exported, threads: int = 0) -> str:
    """Take the steps of the manifest's check; refuses losses that are not PyTorch's."""
    check = model.manifest["check"]
    images, targets = pictures(model.manifest, check["images"])
    stepper, losses, seconds = Stepper(model, threads, model.start()), [], []
    for _ in check["losses"]:
        begin = time.perf_counter()
        losses.append(stepper.step(images, targets, check["rate"]))
        seconds.append(time.perf_counter() - begin)
    wrong = np.abs(np.array(losses) - check["losses"]).max() / max(
        1e-6, np.abs(check["losses"]).max()
    )
    own, expected = (", ".join(f"{v:.6f}" for v in values) for values in (losses, check["losses"]))
    told = f"losses {own}; PyTorch's {expected}"
    if not wrong <= TOLERANCE:
        raise Unusable(f"this machine computes something else: {told}")
    step = f"{1e3 * min(seconds):.0f} ms a step of {len(images)} images, {memory.told()}"
    check_scores(model, Tester(model, stepper.values, threads).scores(images))
    return f"ok: {told}; {step}"


def check_scores(model: Exported, scores: np.ndarray) -> None:
    """Refuse scores that are not one number for every class, and every pixel of a mask."""
    expected = (model.manifest["outputs"], *model.manifest["targets"][1:])
    if scores.shape[1:] != expected or not np.isfinite(scores).all():
        raise Unusable(f"{PREDICT} does not give numbers {expected} for an image")


def pictures(manifest: dict, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise, the same everywhere: NumPy keeps the stream of RandomState fixed."""
    random = np.random.RandomState(0)
    images = random.standard_normal((count, *manifest["images"][1:])).astype(manifest["dtype"])
    targets = random.randint(manifest["outputs"], size=(count, *manifest["targets"][1:]))
    return images, targets.astype(np.int64)

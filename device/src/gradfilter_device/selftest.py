"""What this machine computes, against what PyTorch did when the network was exported."""

from __future__ import annotations

import time

import numpy as np

from gradfilter_device import memory
from gradfilter_device.exported import PREDICT, SUMS, Exported, Unusable, Values
from gradfilter_device.stepping import Stepper
from gradfilter_device.training import Tester

TOLERANCE = 1e-3  # of a loss; float32 adds in another order everywhere
# Of what a tensor moves. Float32 alone mostly differs by less than 0.005 of it (MobileNetV2, FCN,
# U-Net, EfficientNet-Lite0 and ResNet-18, heads at random and at 0, SGD and AdamW, in blocks and
# not), but by up to 0.051 in EfficientNet-Lite0 with a random head: an element that is nearly 0
# may fall to the other side of a ReLU. PyTorch in float32 and in float64 differ by 0.006, too.
# A missing or a doubled update differs by 1, a reversed one by about 2 in one of the sums.
SHARE = 0.25
LEAST = 1e-15  # moves so short are of gradients that float32 has no room for on the way back
CHUNK = 2**20  # elements of a tensor that are taken at once


def compare(model: Exported, threads: int = 0) -> str:
    """Take the steps of the manifest's check; refuses what does not go as it went in PyTorch."""
    check = model.manifest["check"]
    images, targets = pictures(model.manifest, check["images"])
    stepper, losses, seconds = Stepper(model, threads, model.start()), [], []
    for _ in check["losses"]:
        begin = time.perf_counter()
        losses.append(stepper.step(images, targets, check["rate"]))
        seconds.append(time.perf_counter() - begin)
    step = f"{1e3 * min(seconds):.0f} ms a step of {len(images)} images, {memory.told()}"
    told = check_losses(losses, check["losses"])
    check_moves(model, stepper.values)
    check_scores(model, Tester(model, stepper.values, threads).scores(images))
    return f"ok: {told}; {step}"


def check_losses(losses: list[float], expected: list[float]) -> str:
    """Refuse losses that are not PyTorch's; gives both, to be told."""
    largest = max(1e-6, np.abs(expected).max())
    own, theirs = (", ".join(f"{v:.6f}" for v in values) for values in (losses, expected))
    told = f"losses {own}; PyTorch's {theirs}"
    if not np.abs(np.subtract(losses, expected)).max() / largest <= TOLERANCE:
        raise Unusable(f"this machine computes something else: {told}")
    return told


def check_moves(model: Exported, values: Values) -> None:
    """Refuse parameters and state that the steps have not taken to where PyTorch's are.

    Losses alone tell little of gradients: a few steps hardly change them.
    """
    check, start = model.manifest["check"], model.start()
    rounding = len(check["losses"]) * np.finfo(model.dtype).eps  # of a value in so many steps

    def alike(i: int, name: str) -> bool:
        expected = np.array(check["moves"][name])
        off = np.abs(moved(start[name], values[name], i) - expected).max()
        allowed = SHARE * expected[0] + rounding * np.linalg.norm(start[name]) + LEAST
        return off <= allowed < np.inf

    names = enumerate((*model.parameters, *model.state))
    with np.errstate(all="ignore"):  # what is no number is not alike
        wrong = [name for i, name in names if not alike(i, name)]
    if wrong:
        raise Unusable(
            f"this machine computes something else: its steps do not change {wrong[0]} as "
            f"PyTorch's do ({len(wrong)} of {len(check['moves'])} tensors)"
        )


def moved(old: np.ndarray, new: np.ndarray, number: int) -> list[float]:
    """The norm of a change, and sums of it with random signs. The same as gradfilter's."""
    old, new, random = old.ravel(), new.ravel(), np.random.RandomState(number)
    found = np.zeros(1 + SUMS)
    for start in range(0, old.size, CHUNK):
        part = slice(start, start + CHUNK)
        change = np.subtract(new[part], old[part], dtype=np.float64)
        bits = np.frombuffer(random.bytes(change.size), np.uint8)
        signs = ((bits >> i & 1) * 2.0 - 1 for i in range(SUMS))
        found += [change @ change, *(change @ s for s in signs)]
    return [float(np.sqrt(found[0])), *map(float, found[1:])]


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

"""A few steps of PyTorch itself, for a device to compare its own with, and this machine too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradfilter.export.optimizers import State

STEPS, RATES = 3, (1e-2, 1e-3, 1e-4, 1e-5)  # the highest rate at which steps can be compared
ASIDE = 3e-6  # of the images: about as far as float32 takes two implementations apart
STEADY = 0.05  # of what a tensor moves, that it may move elsewhere for that
SHARE = 0.25  # of what a tensor moves, as gradfilter-device allows it
LEAST = 1e-15  # moves so short are of gradients that float32 has no room for on the way back
SUMS = 4  # of a change with random signs: that all are near 0, whatever its own, is unlikely
CHUNK = 2**20  # elements of a tensor that are taken at once


@dataclass(frozen=True)
class Check:
    """Steps on noise from `start` on, which has parameters and state as the step takes them."""

    start: State
    images: Tensor
    targets: Tensor
    rate: float
    losses: list[float]
    end: State

    def about(self) -> dict:
        """As the manifest has it: losses, and how far the steps moved every tensor."""
        names = enumerate(self.start)
        moves = {n: moved(self.start[n].numpy(), self.end[n].numpy(), i) for i, n in names}
        count, losses = len(self.images), self.losses
        return {"images": count, "rate": self.rate, "losses": losses, "moves": moves}

    def differing(self, path: Path, new: str) -> list[str]:
        """The tensors that ONNX Runtime takes elsewhere by the graph at `path`.

        None of a graph that it has no kernels for here, and none that are no numbers in PyTorch.
        `new` stands before the names of what the graph puts out.
        """
        if (session := _session(path)) is None:
            return []
        names = [o.name for o in session.get_outputs()]
        now = {n: t.numpy() for n, t in self.start.items()}
        given = {"images": self.images.numpy(), "targets": self.targets.numpy()}
        given["rate"] = np.array(self.rate, np.float32)
        for _ in self.losses:
            found = dict(zip(names, session.run(None, now | given), strict=True))
            now = {n: found[new + n] for n in now}
        return self.apart({n: torch.from_numpy(t) for n, t in now.items()}, SHARE)

    def apart(self, found: State, share: float) -> list[str]:
        """The tensors that are further from their end than by a share of their way."""
        return [n for n in self.start if not self._alike(n, found[n], share)]

    def _alike(self, name: str, found: Tensor, share: float) -> bool:
        start, end = self.start[name], self.end[name]
        if not end.isfinite().all():
            return True
        rounding = len(self.losses) * torch.finfo(end.dtype).eps * start.norm()
        allowed = share * (end - start).norm() + rounding + LEAST
        return bool((found.view_as(end) - end).norm() <= allowed)


def check(step, start: State, images: Tensor, targets: Tensor, outputs: int) -> Check:
    """Take the steps; of the images and targets only shapes and types count.

    A network that learns too fast to be followed is anywhere after three steps: its rate is lower.
    """
    random = np.random.RandomState(0)  # whose stream NumPy keeps fixed
    noise = torch.from_numpy(random.standard_normal(tuple(images.shape))).to(images.dtype)
    labels = torch.from_numpy(random.randint(outputs, size=tuple(targets.shape))).long()
    aside = torch.from_numpy(random.standard_normal(tuple(images.shape))).to(images.dtype)
    for rate in RATES:
        losses, end = _taken(step, start, noise, labels, rate)
        found = Check(start, noise, labels, rate, losses, end)
        _, other = _taken(step, start, noise + ASIDE * aside, labels, rate)
        if all(t.isfinite().all() for t in end.values()) and not found.apart(other, STEADY):
            break
    return found


def _taken(step, start: State, images: Tensor, targets: Tensor, rate: float):
    """The losses of some steps, and where they end."""
    now, losses = list(start.values()), []
    for _ in range(STEPS):
        *now, loss = step(*now, images.new_tensor(rate), images, targets)[: len(now) + 1]
        losses.append(float(loss))
    return losses, dict(zip(start, now, strict=True))


def _session(path: Path):
    """ONNX Runtime's session of a graph; None where it has no kernels for it, as in blocks."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return None


def moved(old: np.ndarray, new: np.ndarray, number: int) -> list[float]:
    """The norm of a change, and sums of it with random signs. The same as gradfilter-device's."""
    old, new, random = old.ravel(), new.ravel(), np.random.RandomState(number)
    found = np.zeros(1 + SUMS)
    for start in range(0, old.size, CHUNK):
        part = slice(start, start + CHUNK)
        change = np.subtract(new[part], old[part], dtype=np.float64)
        bits = np.frombuffer(random.bytes(change.size), np.uint8)
        signs = ((bits >> i & 1) * 2.0 - 1 for i in range(SUMS))
        found += [change @ change, *(change @ s for s in signs)]
    return [float(np.sqrt(found[0])), *map(float, found[1:])]

"""A few steps of PyTorch itself, for a device to compare its own with, and this machine too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradfilter.export.optimizers import State

CHECK_STEPS, CHECK_RATE = 3, 0.01
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
    losses: list[float]
    end: State

    def about(self) -> dict:
        """As the manifest has it: losses, and how far the steps moved every tensor."""
        names = enumerate(self.start)
        moves = {n: moved(self.start[n].numpy(), self.end[n].numpy(), i) for i, n in names}
        count, losses = len(self.images), self.losses
        return {"images": count, "rate": CHECK_RATE, "losses": losses, "moves": moves}

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
        given["rate"] = np.array(CHECK_RATE, np.float32)
        for _ in self.losses:
            found = dict(zip(names, session.run(None, now | given), strict=True))
            now = {n: found[new + n] for n in now}
        return [n for n in now if not self._alike(n, torch.from_numpy(now[n]))]

    def _alike(self, name: str, found: Tensor) -> bool:
        start, end = self.start[name], self.end[name]
        if not end.isfinite().all():
            return True
        rounding = len(self.losses) * torch.finfo(end.dtype).eps * start.norm()
        allowed = SHARE * (end - start).norm() + rounding + LEAST
        return bool((found.view_as(end) - end).norm() <= allowed)


def check(step, start: State, images: Tensor, targets: Tensor, outputs: int) -> Check:
    """Take the steps; of the images and targets only shapes and types count."""
    random = np.random.RandomState(0)  # whose stream NumPy keeps fixed
    noise = torch.from_numpy(random.standard_normal(tuple(images.shape))).to(images.dtype)
    labels = torch.from_numpy(random.randint(outputs, size=tuple(targets.shape))).long()
    now, losses = list(start.values()), []
    rate = torch.tensor(CHECK_RATE, dtype=images.dtype)
    for _ in range(CHECK_STEPS):
        *now, loss = step(*now, rate, noise, labels)[: len(now) + 1]
        losses.append(float(loss))
    return Check(start, noise, labels, losses, dict(zip(start, now, strict=True)))


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

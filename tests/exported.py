"""What the suites of the export share: a step in PyTorch and the same step by its graph."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.order import evaluating

RATE = 0.05


def loss_of(output, target: Tensor) -> Tensor:
    """The loss as PyTorch has it."""
    scores = output["out"] if isinstance(output, dict) else output
    if target.ndim == 3:
        scores = F.interpolate(scores, target.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(scores, target)


def optimizer_of(model: nn.Module, kind, **options) -> torch.optim.Optimizer:
    return kind([p for p in model.parameters() if p.requires_grad], lr=RATE, **options)


def in_pytorch(model: nn.Module, x, target, optimizer, clip=None, steps=1) -> dict[str, Tensor]:
    """Parameters and loss after steps of PyTorch's own optimizer; the model is changed."""
    with evaluating(model):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(x), target)
            loss.backward()
            if clip is not None:
                own = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(own, clip)
            optimizer.step()
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return trained | {"loss": loss.detach()}


class Folder:
    """An exported folder, run by the runtime that is given."""

    def __init__(self, path: Path, runtime):
        self.path = path
        self.manifest = json.loads((path / "manifest.json").read_text())
        self.run_train, self.run_predict = (
            runtime(path / "train.onnx"),
            runtime(path / "predict.onnx"),
        )
        self.values = dict(np.load(path / "parameters.npz"))
        dtype = self.manifest["dtype"]
        self.values |= {n: np.zeros(s, dtype) for n, s in self.manifest["state"].items()}

    def step(self, x: Tensor, target: Tensor, rate: float = RATE) -> float:
        given = {
            "rate": np.array(rate, x.numpy().dtype),
            "images": x.numpy(),
            "targets": target.numpy(),
        }
        rows = {n: self.values[n].reshape(1, -1) for n in self.manifest["rows"]}
        found = self.run_train(self.values | rows | given)
        self.values = {n: found[f"new.{n}"].reshape(v.shape) for n, v in self.values.items()}
        return float(found["loss"])

    def scores(self, x: Tensor) -> np.ndarray:
        own = {n: self.values[n] for n in self.manifest["parameters"]}
        return self.run_predict(own | {"images": x.numpy()})["scores"]


def reference(path: Path):
    """ONNX's own reference implementation, in any precision; four operators of it are wrong."""
    import onnx
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):  # the package's own takes 64 elements at most
        def _run(self, data, indices, axis=0):
            return (np.take_along_axis(data, indices, axis),)

    class MaxPool(OpRun):  # the package's own has wrong places where windows overlap
        def _run(self, x, kernel_shape, pads, strides, dilations, ceil_mode, **_):
            y, place = F.max_pool2d(
                torch.tensor(x), kernel_shape, strides, pads[:2], dilations, bool(ceil_mode), True
            )
            first = torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], 1, 1)
            return y.numpy(), (place + first * x.shape[2] * x.shape[3]).numpy()

    class ConvTranspose(OpRun):  # the package's own takes no groups
        def _run(self, x, w, pads, strides, dilations, group, output_padding, **_):
            top, left, bottom, right = pads
            x, w = torch.tensor(x), torch.tensor(w)
            y = F.conv_transpose2d(x, w, None, strides, 0, 0, group, dilations)
            y = F.pad(y, (-left, output_padding[1] - right, -top, output_padding[0] - bottom))
            return (y.numpy(),)

    class Erf(OpRun):  # the package's own gives float32
        def _run(self, x):
            return (torch.erf(torch.tensor(x)).numpy(),)

    own = [GatherElements, MaxPool, ConvTranspose, Erf]
    session = ReferenceEvaluator(onnx.load(path), new_ops=own)
    return lambda feeds: dict(zip(session.output_names, session.run(None, feeds), strict=True))


def runtime(path: Path):
    """ONNX Runtime, which convolves in float32 alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(None, feeds), strict=True))


def exported(model: nn.Module, x, target, path: Path, by=reference, **options) -> Folder:
    """A copy of the model, exported, with one of its optimizer."""
    model, options = copy.deepcopy((model, options))
    return Folder(gf.export(model, x, target, path, **options), by)


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    """Equal, relative to the largest element of each tensor (or to 1e-3)."""
    for name, e in expected.items():
        e = e.numpy()
        error = np.abs(found[name] - e).max()
        assert found[name].shape == e.shape, name
        assert error <= tolerance * max(np.abs(e).max(), 1e-3), (name, error)

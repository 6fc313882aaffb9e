"""The folder that an export is: two graphs, their constants, parameters and a manifest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from gradfilter.export import Runner, blocked, recorded, slices, write
from gradfilter.export.align import align
from gradfilter.export.check import naming_methods, no_exact_gradient
from gradfilter.export.graph import OPSET, Batch, Graph, Value
from gradfilter.export.inplace import in_place, wait_for_readers
from gradfilter.export.lower import Lowering
from gradfilter.export.onebyone import one_by_one
from gradfilter.export.optimizers import understood
from gradfilter.export.probe import probe
from gradfilter.export.products import accumulate, by_outputs, by_rows, onto_products
from gradfilter.export.selfcheck import Check, check
from gradfilter.export.step import (
    TrainingStep,
    as_row,
    enlarged,
    of_products,
    remembered,
    scores_of,
    shaped,
    together,
)
from gradfilter.export.trace import traced
from gradfilter.order import evaluating

FORMAT = 4
TRAIN, PREDICT, CONSTANTS = "train.onnx", "predict.onnx", "constants.bin"
PROBE, IN_BLOCKS = "probe.onnx", "-blocked.onnx"  # the end of the name of a graph in blocks
PARAMETERS, MANIFEST = "parameters.npz", "manifest.json"
NEW = "new."  # stands before the name of what a step puts out
# names in a graph, of any optimizer, and in the files that NumPy writes of parameters
OWN = ("rate", "images", "targets", "loss", "scores", "step", "file", "about")
DTYPES = (torch.float32, torch.float64)


class Export:
    """A training step, traced and lowered; `write` puts it into a folder."""

    def __init__(self, model: nn.Module, example, target, optimizer, clip, batch: int | None):
        _check_model(model)
        _check_given(example, target, clip, batch)
        self.model, self.batch, self.clip = model, batch, clip
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer, self.own = understood(optimizer, trained)
        self.parameters = {n: p.detach() for n, p in trained.items()}
        self.groups = together(self.parameters, self.own)
        self.count = batch or 2
        self.example, self.target = (_repeated(t, self.count + 1) for t in (example, target))
        with evaluating(model), naming_methods(model):
            step = self._step_of(of_products(self.parameters, self.groups))
            prediction = self._prediction()
            self.predict = self._lowered(prediction)
        self.graphs = {TRAIN: self.train, PREDICT: self.predict}
        for name, found in ((TRAIN, step), (PREDICT, prediction)):
            graph = self._lowered(found, blocks=True)
            if blocked.used(graph):
                self.graphs |= {in_blocks(name): graph, PROBE: probe()}

    def _step_of(self, products: set[str]) -> _Traced:
        """The step, whose graph is `train`; where products cannot be added to what the optimizer
        remembers of these groups, that are rows after all."""
        self.state = self.optimizer.start(remembered(self.parameters, self.groups, products))
        _check_names(self.parameters, self.state)
        step = self._step()
        self.train = self._lowered(step)
        found = onto_products(self.train, products, self.optimizer.keeps, NEW)
        return step if found == products else self._step_of(found)

    def _step(self) -> _Traced:
        names = tuple(self.parameters), tuple(self.state)
        how = self.groups, self.optimizer, self.own, self.clip
        step = self.step = TrainingStep(self.model, *names, *how)
        fixed = [*shaped(self.parameters).values(), *self.state.values()]
        rate = torch.zeros((), dtype=self.example.dtype)
        found = _Traced(self, step, lambda n: [*fixed, rate, self.example[:n], self.target[:n]])
        found.names = [*self.parameters, *self.state, "rate", "images", "targets"]
        found.outputs = [*(NEW + n for n in (*self.parameters, *self.state)), "loss"]
        grads = found.trace.outputs[len(found.outputs) :]
        no_exact_gradient(found.trace, self.model, list(self.parameters), grads)
        return found

    def _prediction(self) -> _Traced:
        maps = self.target.ndim == 3

        def predict(*tensors: Tensor) -> tuple[Tensor]:
            own = dict(zip(self.parameters, tensors[:-1], strict=True))
            scores = scores_of(functional_call(self.model, own, (tensors[-1],)))
            return (enlarged(scores, tensors[-1].shape[-2:]) if maps else scores,)

        own = list(self.parameters.values())
        found = _Traced(self, predict, lambda n: [*own, self.example[:n]])
        found.names, found.outputs = [*self.parameters, "images"], ["scores"]
        return found

    def _lowered(self, found: _Traced, blocks: bool = False) -> Graph:
        graph = Graph(blocks)
        inputs = [
            _input(graph, n, t, found.free) for n, t in zip(found.names, found.tensors, strict=True)
        ]
        results = Lowering(graph, found.convolutions).run(found.trace, inputs)
        for name, value in zip(found.outputs, results, strict=False):
            graph.output(name, value)
        graph.prune()
        by_outputs(graph)
        accumulate(graph)
        by_rows(graph)
        blocked.fuse(graph)
        slices.split(graph)
        one_by_one(graph)
        if NEW + next(iter(self.parameters)) in found.outputs:
            wait_for_readers(graph, [*self.parameters, *self.state], NEW)
        return graph

    def write(self, path: Path, runner: Runner | None) -> Path:
        if runner is not None:
            outputs = self.predict.outputs[0][1].shape[1]
            runner.check(self.example, self.target, outputs, self.batch)
        path.mkdir(parents=True, exist_ok=True)
        for name in (MANIFEST, in_blocks(TRAIN), in_blocks(PREDICT), PROBE):
            (path / name).unlink(missing_ok=True)  # of an export into the same folder before
        store = write.Constants(path / CONSTANTS)
        for name, graph in self.graphs.items():
            write.save(graph, path / name, store)
        np.savez(path / PARAMETERS, **{n: p.cpu().numpy() for n, p in self.parameters.items()})
        found = self._check()
        self._compare(found, path)
        files = (*self.graphs, CONSTANTS, PARAMETERS)
        about = self._about(runner) | {"files": {n: digest(path / n) for n in files}}
        about = signed(about | {"check": found.about()})
        (path / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return path

    def _compare(self, found: Check, path: Path) -> None:
        """Refuse graphs by which ONNX Runtime, if it is there, computes something else."""
        if self.example.dtype != torch.float32 or find_spec("onnxruntime") is None:
            return
        for name in self.graphs.keys() & {TRAIN, in_blocks(TRAIN)}:
            if wrong := found.differing(path / name, NEW):
                raise ValueError(
                    f"export: ONNX Runtime does not change {wrong[0]} as PyTorch does by {name} "
                    f"({len(wrong)} of {len(found.start)} tensors); this network cannot be "
                    "exported, which is an error of gradfilter's: please report it"
                )

    def _about(self, runner: Runner | None) -> dict:
        """What the manifest says beside the hashes."""
        dtype = str(self.example.dtype).removeprefix("torch.")
        sizes = {"parameters": self.parameters, "state": self.state}
        about = {
            "format": FORMAT,
            "versions": {n: _version(n) for n in ("gradfilter", "torch", "onnx")}
            | {"opset": OPSET},
            "dtype": dtype,
            **{k: {n: list(t.shape) for n, t in v.items()} for k, v in sizes.items()},
            "rows": [n for n, p in self.parameters.items() if as_row(p)],
            "images": [self.batch, *self.example.shape[1:]],
            "targets": [self.batch, *self.target.shape[1:]],
            "task": "segmentation" if self.target.ndim == 3 else "classification",
            "optimizer": {
                "name": self.optimizer.name,
                **vars(self.optimizer),
                "weight_decay": sorted({o.weight_decay for o in self.own.values()}),
                "clip": self.clip,
            },
            "layers": {
                name: "frozen" if not m.weight.requires_grad else repr(m.gf.method)
                for name, m in self.model.named_modules()
                if hasattr(m, "gf")
            },
            "outputs": self.predict.outputs[0][1].shape[1],
            "in_place": all(
                in_place(graph, [*self.parameters, *self.state], NEW)
                for name, graph in self.graphs.items()
                if name in (TRAIN, in_blocks(TRAIN))
            ),
            "frozen": any(not p.requires_grad for p in self.model.parameters()),
        }
        return about | ({} if runner is None else runner.about())

    def _check(self) -> Check:
        start = shaped(self.parameters) | self.state
        given = self.example[: self.count], self.target[: self.count]
        with evaluating(self.model):
            return check(self.step, start, *given, self.predict.outputs[0][1].shape[1])


class _Traced:
    """A function traced for one number of images, or for any by two traces compared."""

    def __init__(self, export: Export, function, tensors):
        model, count = export.model, export.count
        self.free = export.batch is None
        self.tensors = tensors(count)
        with _warmed(model, export.example[:count]) as self.convolutions:
            self.trace = traced(function, self.tensors, model)
        if self.free:
            with _warmed(model, export.example):
                align(self.trace, traced(function, tensors(count + 1)), (count, count + 1))


@contextmanager
def _warmed(model: nn.Module, images: Tensor):
    """The model after it ran on such images, so that the engine has worked out all it needs."""
    with torch.enable_grad():
        model(images)
    with recorded.recording(model) as convolutions:
        yield list(convolutions)


def _input(graph: Graph, name: str, t: Tensor, free: bool) -> Value:
    shape = tuple(t.shape)
    per_image = free and name in ("images", "targets")
    return graph.input(name, (Batch(), *shape[1:]) if per_image else shape, t.dtype)


def _check_model(model: nn.Module) -> None:
    if not any(hasattr(m, "gf") for m in model.modules()):
        raise ValueError("export: convert the model first; gf.Exact() leaves every gradient exact")
    for name, m in model.named_modules():
        if hasattr(m, "gf") and m.gf.method.stateful and m.weight.requires_grad:
            raise ValueError(
                f"export: layer {name!r} has {m.gf.method!r}, which remembers something from step "
                "to step; the exported step would not"
            )
        if isinstance(m, _BatchNorm) and m.training:
            raise ValueError("export: batch norm must be frozen: convert with norm='frozen'")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("export: the model has nothing to train: every parameter is frozen")
    for p in model.parameters():
        if p.is_floating_point() and p.dtype not in DTYPES:
            raise ValueError(f"export: the model is {p.dtype}; make it float() or double() first")
    if next(model.parameters()).device.type != "cpu":
        raise ValueError("export: move the model to the CPU first")


def _check_given(example, target, clip, batch) -> None:
    if not isinstance(example, Tensor) or example.ndim != 4 or not len(example):
        raise ValueError("export: example must be a batch of images [N, C, H, W]")
    if not isinstance(target, Tensor) or target.ndim not in (1, 3) or target.dtype != torch.int64:
        raise ValueError("export: target must be int64, classes [N] or masks [N, H, W]")
    if len(target) != len(example):
        raise ValueError(f"export: {len(example)} images in example, but {len(target)} in target")
    if example.dtype not in DTYPES:
        raise ValueError(f"export: example must be float32 or float64, not {example.dtype}")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ValueError(f"export: batch must be a whole number >= 1, got {batch!r}")
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"export: clip must be a number above 0, got {clip!r}")


def _check_names(parameters: Iterable[str], state: Iterable[str]) -> None:
    """Refuse a parameter with a name that the graphs, or files of parameters, need themselves."""
    taken = {*OWN, *state, *(NEW + name for name in (*parameters, *state))}
    for name in parameters:
        if name in taken:
            raise ValueError(
                f"export: a parameter is called {name!r}, and so is something else in the graph; "
                "give it another name"
            )


def _repeated(t: Tensor, count: int) -> Tensor:
    """So many images, those of t over and over."""
    return t.detach()[torch.arange(count) % len(t)].contiguous()


def in_blocks(name: str) -> str:
    """The name of the same graph in blocks."""
    return name.removesuffix(".onnx") + IN_BLOCKS


def signed(manifest: dict) -> dict:
    """A manifest with a digest of all that it says, as it is read from its file."""
    manifest = json.loads(json.dumps(manifest))
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return manifest | {"digest": hashlib.sha256(text.encode()).hexdigest()}


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"

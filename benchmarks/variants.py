"""The ways to run one network on one batch that benchmarks/step.py compares."""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections import Counter
from dataclasses import dataclass

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

import gradfilter as gf
from gradfilter.region.trace import trace

TITLES = {
    "inference": "inference, eager",
    "folded": "inference, folded",
    "exact": "exact, eager",
    "compiled": "exact, compiled",
    "layer": "layer level",
    "engine": "engine",
    "folded graph": "inference, folded, CUDA graph",
    "exact graph": "exact, CUDA graph",
    "engine graph": "engine, CUDA graph",
}


def network(name: str) -> nn.Module:
    """The torchvision or timm network of that name with random weights."""
    import torchvision.models as tv

    if name in tv.list_models(module=tv):
        extra = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        return tv.get_model(name, weights=None, **extra)
    import timm

    return timm.create_model(name, pretrained=False)


def settle(model: nn.Module, x: Tensor) -> None:
    """Give every batch norm the statistics of x, so that no activation fades or explodes."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    before = [m.momentum for m in norms]
    for m in norms:
        m.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for m, momentum in zip(norms, before, strict=True):
        m.momentum = momentum
    model.eval()


def folded(model: nn.Module) -> fx.GraphModule:
    """A copy for inference whose batch norms are folded into the convolutions before them."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    graph = trace(model)
    if isinstance(graph, str):
        raise ValueError(f"step: the network cannot be folded: {graph}")
    modules = dict(model.named_modules())
    calls = Counter(n.target for n in graph.nodes if n.op == "call_module")
    for node in list(graph.nodes):
        conv, norm = _foldable(node, modules, calls)
        if conv is None:
            continue
        before = node.args[0]
        model.set_submodule(before.target, fuse_conv_bn_eval(conv, norm))
        act = getattr(norm, "act", nn.Identity())  # timm's batch norm may carry the activation
        if isinstance(act, nn.Identity):
            node.replace_all_uses_with(before)
            graph.erase_node(node)
        else:
            model.set_submodule(node.target, act)
    return fx.GraphModule(model, graph).to(memory_format=torch.channels_last)


def _foldable(node: fx.Node, modules: dict[str, nn.Module], calls: Counter):
    """The convolution and the batch norm of a node that reads it alone, else (None, None)."""
    before = node.args[0] if node.args else None
    if not (isinstance(before, fx.Node) and node.op == before.op == "call_module"):
        return None, None
    conv, norm = modules[before.target], modules[node.target]
    once = calls[before.target] == calls[node.target] == len(before.users) == 1
    if once and isinstance(conv, nn.Conv2d) and isinstance(norm, _BatchNorm):
        return conv, norm
    return None, None


@dataclass
class Inference:
    model: nn.Module
    x: Tensor
    autocast: contextlib.AbstractContextManager

    def forward(self) -> Tensor:
        with torch.inference_mode(), self.autocast:
            return self.model(self.x)

    __call__ = forward

    def clear(self) -> None:
        pass


@dataclass
class Training:
    model: nn.Module
    x: Tensor
    t: Tensor
    autocast: contextlib.AbstractContextManager
    optimizer: torch.optim.Optimizer

    def forward(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            return F.cross_entropy(self.model(self.x), self.t)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    def __call__(self) -> None:
        self.backward(self.forward())

    def clear(self) -> None:
        """Leave no gradient and no optimizer state."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()


class Captured:
    """A run as one CUDA graph."""

    def __init__(self, run: Inference | Training):
        self.run, self.graph = run, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
            # the captured step makes its own gradients; optimizer state must be there already
            for p in run.model.parameters():
                p.grad = None
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            run()

    def __call__(self) -> None:
        self.graph.replay()


class Bench:
    """One network, one batch, one method; builds every variant from the same weights."""

    def __init__(self, args: argparse.Namespace):
        measure.use_cuda() if args.device == "cuda" else measure.use_cpu(args.threads)
        torch.manual_seed(0)
        self.args, self.method = args, method_of(args)
        self.base = network(args.model).to(args.device, memory_format=torch.channels_last)
        self.x = self.images(args.batch, args.size)
        settle(self.base, self.images(8, args.size))
        with torch.no_grad():
            classes = self.base(self.images(1, args.size)).shape[1]
        self.t = torch.randint(0, classes, (args.batch,), device=args.device)

    def images(self, batch: int, size: int) -> Tensor:
        x = torch.randn(batch, 3, size, size, device=self.args.device)
        return x.contiguous(memory_format=torch.channels_last)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.args.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(self.args.device, torch.bfloat16)

    def without_amp(self) -> Bench:
        """The same network and batch, run in the precision of their data."""
        other = copy.copy(self)
        other.args = argparse.Namespace(**vars(self.args) | {"amp": None})
        return other

    def variants(self) -> list[str]:
        cuda = self.args.device == "cuda"
        names = ["inference", "folded", "exact", "compiled", "layer", "engine"]
        if not self.args.compile:
            names.remove("compiled")
        return names + ["folded graph", "exact graph", "engine graph"] if cuda else names

    def build(self, name: str) -> Inference | Training | Captured:
        if name.endswith(" graph"):
            return Captured(self.build(name.removesuffix(" graph")))
        if name in ("inference", "folded"):
            model = self.base if name == "inference" else folded(self.base)
            return Inference(model, self.x, self.autocast())
        return self.train(self.converted(name) if name in ("layer", "engine") else self.exact(name))

    def train(self, model: nn.Module) -> Training:
        args = self.args
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            lr=args.lr,
            momentum=args.momentum,
            foreach=True if args.device == "cuda" else None,
        )
        return Training(model, self.x, self.t, self.autocast(), optimizer)

    def converted(self, name: str) -> nn.Module:
        model = copy.deepcopy(self.base)
        options = {"last": self.args.last, "example": self.x}
        if name == "layer":
            gf.convert(model, self.method, engine="layer", **options)
        else:
            self.plan = gf.convert(model, self.method, **options)
        return model

    def exact(self, name: str) -> nn.Module:
        """Plain PyTorch that trains the same parameters."""
        model = copy.deepcopy(self.base)
        if self.args.last is not None:
            frozen = copy.deepcopy(self.base)
            gf.convert(frozen, self.method, last=self.args.last, example=self.x)
            for p, like in zip(model.parameters(), frozen.parameters(), strict=True):
                p.requires_grad_(like.requires_grad)
        return torch.compile(model) if name == "compiled" else model

    def places(self) -> dict[str, int]:
        """How many trained layers with the method run in a region, and why the others do not."""
        found: dict[str, int] = {}
        for name in self.plan.converted:
            where = self.plan[name].where or "layer level: not traced"
            key = "in a region" if where.startswith("region") else where
            found[key] = found.get(key, 0) + 1
        return found


def method_of(args: argparse.Namespace) -> gf.Method:
    knobs = {k: v for k in ("grid", "patch") if (v := getattr(args, k)) is not None}
    return gf.METHODS[args.method](**knobs)

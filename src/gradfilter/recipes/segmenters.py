"""Networks that give a class to every pixel: a head on an encoder, or torchvision's own."""

from __future__ import annotations

import difflib

import torch.nn.functional as F
from torch import Tensor, fx, nn

SIZE = 256  # pixels, a side to train at
CLASSES = 21
WIDTH = 128  # channels of FCN's decoder
STRIDED = {"unet": "Unet", "fpn": "FPN", "upernet": "UPerNet"}  # encoders of stride 32
DILATED = {"pspnet": "PSPNet", "deeplabv3": "DeepLabV3", "fcn": None}  # of stride 8, as published
HEADS = ("deeplabv3", "fcn", "fpn", "pspnet", "unet", "upernet")


class Segmenter(nn.Module):
    """Encoder, decoder and head by segmentation-models-pytorch's names; images of any size.

    Takes what the encoder cannot divide by its stride with zeros at the right and bottom, whose
    scores are cut off again. Gives scores [N, C, H, W] before softmax.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, segmentation_head: nn.Module):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.segmentation_head = segmentation_head

    def forward(self, x: Tensor) -> Tensor:
        padded = pad_to(x, self.encoder.output_stride)
        return crop_to(self.segmentation_head(self.decoder(self.encoder(padded))), x)


@fx.wrap  # one call in a traced graph: what they do depends on the size
def pad_to(x: Tensor, multiple: int) -> Tensor:
    """x [N, C, H, W] with zeros at the right and bottom, up to multiples."""
    h, w = x.shape[2:]
    right, bottom = -w % multiple, -h % multiple
    return F.pad(x, (0, right, 0, bottom)) if right or bottom else x


@fx.wrap
def crop_to(y: Tensor, x: Tensor) -> Tensor:
    """The top left of y [N, C, H, W], as large as x."""
    return y if y.shape[2:] == x.shape[2:] else y[:, :, : x.shape[2], : x.shape[3]]


class Deepest(nn.Module):
    """FCN's decoder on the deepest map of the encoder: narrowed first, to cost little beside it."""

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.narrow = nn.Conv2d(channels, out, 1, bias=False)
        self.bn1, self.relu1 = nn.BatchNorm2d(out), nn.ReLU()
        self.conv = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2, self.relu2, self.dropout = nn.BatchNorm2d(out), nn.ReLU(), nn.Dropout(0.1)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.relu1(self.bn1(self.narrow(features[-1])))
        return self.dropout(self.relu2(self.bn2(self.conv(x))))


class Unwrapped(nn.Module):
    """A torchvision segmentation network that gives the scores themselves, at its own stride."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.backbone, self.classifier = network.backbone, network.classifier
        self.several = "LRASPP" in type(network).__name__  # its head reads two maps

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x)
        return self.classifier(features if self.several else features["out"])


def split(name: str) -> tuple[str, str] | None:
    """`unet-resnet18` -> ("unet", "resnet18"); None where the name is of another kind."""
    head, dash, encoder = name.partition("-")
    return (head, encoder) if dash and head in HEADS else None


def encoders() -> list[str]:
    """The names of segmentation-models-pytorch's encoders; `tu-<timm name>` are others."""
    from segmentation_models_pytorch.encoders import get_encoder_names

    return get_encoder_names()


def create(name: str, num_classes: int = CLASSES) -> Segmenter:
    """The network of the name `<head>-<encoder>`, with random weights."""
    head, encoder = split(name)
    try:
        return _create(head, encoder, num_classes)
    except (KeyError, RuntimeError, ValueError) as error:
        known = encoder in encoders() or encoder.startswith("tu-")
        near = difflib.get_close_matches(encoder, encoders(), n=4)
        hint = f"; near names: {', '.join(f'{head}-{e}' for e in near)}" if near else ""
        why = str(error) if known else f"no encoder is called {encoder!r}{hint}"
        raise ValueError(f"cannot build {name}: {why}") from error


def _create(head: str, encoder: str, num_classes: int) -> Segmenter:
    import segmentation_models_pytorch as smp
    from segmentation_models_pytorch.base.initialization import initialize_decoder

    if head == "fcn":
        return _fcn(encoder, num_classes)
    strides = {"pspnet": {"encoder_depth": 5, "output_stride": 8}}.get(head, {})
    kind = getattr(smp, STRIDED.get(head) or DILATED[head])
    network = kind(encoder, encoder_weights=None, classes=num_classes, **strides)
    if head == "deeplabv3":  # the library starts the others like this, and it needs it as much
        initialize_decoder(network.decoder)
    return Segmenter(network.encoder, network.decoder, network.segmentation_head)


def _fcn(encoder: str, num_classes: int) -> Segmenter:
    from segmentation_models_pytorch.base import SegmentationHead
    from segmentation_models_pytorch.base.initialization import initialize_decoder, initialize_head
    from segmentation_models_pytorch.encoders import get_encoder

    body = get_encoder(encoder, weights=None, output_stride=8)
    decoder = Deepest(body.out_channels[-1], WIDTH)
    head = SegmentationHead(WIDTH, num_classes, kernel_size=1, upsampling=8)
    initialize_decoder(decoder)
    initialize_head(head)
    return Segmenter(body, decoder, head)


def library(encoder: str) -> tuple[dict[str, Tensor], tuple, tuple]:
    """An encoder's published ImageNet weights; mean and deviation of its input, in bytes."""
    from segmentation_models_pytorch.encoders import get_encoder, get_preprocessing_params

    weights = True if encoder.startswith("tu-") else "imagenet"
    state = get_encoder(encoder, weights=weights).state_dict()
    seen = get_preprocessing_params(encoder)
    unit = 255 / seen["input_range"][1]
    mean, std = (tuple(unit * v for v in seen[key]) for key in ("mean", "std"))
    return state, mean, std


def torchvision_names() -> list[str]:
    import torchvision.models as tv

    return tv.list_models(module=tv.segmentation)


def create_torchvision(name: str, num_classes: int = CLASSES) -> Unwrapped:
    """torchvision's segmentation network of that name, with random weights."""
    import torchvision.models as tv

    return Unwrapped(
        tv.get_model(name, weights=None, weights_backbone=None, num_classes=num_classes)
    )

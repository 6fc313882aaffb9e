"""Handwritten digits that come with scikit-learn: no download."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.recipes.datasets.pictures import Data, TensorPictures

Labelled = tuple[Tensor, Tensor]  # images of bytes [N, 3, H, W], classes [N]


def digits(size: int) -> tuple[Labelled, Labelled]:
    """scikit-learn's bundled handwritten digits, a fixed split: 1,437 to train on, 360 to test.

    Real 8x8 scans (UCI "Optical Recognition of Handwritten Digits"), enlarged to `size` pixels;
    the three channels are views of one.
    """
    from sklearn.datasets import load_digits

    scans, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(scans).float().reshape(-1, 1, 8, 8) * (255 / 16)
    images = F.interpolate(images, (size, size), mode="bilinear").round().to(torch.uint8)
    images, classes = images.expand(-1, 3, -1, -1), torch.from_numpy(classes)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    test, train = order.split([360, len(order) - 360])
    return (images[train], classes[train]), (images[test], classes[test])


def open_digits() -> Data:
    """The digits at their own 8x8 pixels; mirroring would turn them into other signs."""
    train, test = (
        TensorPictures(f"digits {part}", *pictures)
        for part, pictures in zip(("train", "test"), digits(8), strict=True)
    )
    classes = tuple(map(str, range(10)))
    return Data("digits", "classification", classes, train, test, augment="light")

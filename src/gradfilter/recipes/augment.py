"""What happens to a picture between its file and the network: cropped, mirrored, resized.

Masks go through the same cuts as their pictures. All chance comes from torch's global CPU
generator: seeded alike, a picture comes out alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Target = int | Tensor  # a class, or a mask uint8 [H, W]
Transform = Callable[[Tensor, Target], tuple[Tensor, Target]]
Box = tuple[int, int, int, int]  # top, left, height, width

LEVELS = ("none", "light", "standard")
SMALL = 64  # pixels a side; such pictures are cut at their own resolution and enlarged last
CENTRE = 7 / 8  # share of a photograph's short side that is looked at when testing
JITTER = 0.3  # of brightness, contrast and saturation, where masks are trained


def training(task: str, size: int, level: str = "standard") -> Transform:
    """Pictures to train on, uint8 [3, size, size].

    "none" is `evaluation`; "light" moves and scales a little; "standard" cuts out parts down to a
    third of the area, mirrors half of the pictures and, for segmentation, changes the colours.
    """
    if level not in LEVELS:
        raise ValueError(f"no augmentation is called {level!r}; there are {', '.join(LEVELS)}")
    if level == "none":
        return evaluation(task, size)
    return Varied(has_masks(task), size, mild=level == "light")


def evaluation(task: str, size: int) -> Transform:
    """Pictures to test on, uint8 [3, size, size]: no chance in it.

    Of a photograph to classify, the square in the middle; of one to segment all there is.
    """
    return Plain(has_masks(task), size)


@dataclass(frozen=True)
class Varied:
    """A part of the picture, drawn anew at every call."""

    masks: bool
    size: int
    mild: bool

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        smallest = 0.7 if self.mild else 0.33
        if self.masks:
            box = random_part(image, smallest)
        elif is_small(image, self.size):
            image, box = shifted(image)
        else:
            box = random_square(image, smallest)
        mirrored = not self.mild and torch.rand(()).item() < 0.5
        image, target = cut(image, target, box, self.size, mirrored)
        return recoloured(image) if self.masks and not self.mild else image, target


@dataclass(frozen=True)
class Plain:
    """The middle of the picture, or all of it, always alike."""

    masks: bool
    size: int

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        height, width = image.shape[1:]
        if self.masks:
            return cut(image, target, (0, 0, height, width), self.size)
        share = 1 if is_small(image, self.size) else CENTRE
        side = max(1, round(share * min(height, width)))
        box = ((height - side) // 2, (width - side) // 2, side, side)
        return cut(image, target, box, self.size)


def has_masks(task: str) -> bool:
    """Whether the targets are masks."""
    if task not in ("classification", "segmentation"):
        raise ValueError(f"no task is called {task!r}")
    return task == "segmentation"


def is_small(image: Tensor, size: int) -> bool:
    return max(image.shape[1:]) <= max(SMALL, size // 2)


def cut(
    image: Tensor, target: Target, box: Box, size: int, mirrored: bool = False
) -> tuple[Tensor, Target]:
    """The part in the box, mirrored if asked for, at `size`; of a mask the nearest pixels."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    def sized(pixels: Tensor, mode: InterpolationMode, antialias: bool) -> Tensor:
        part = F.crop(pixels, *box)
        part = F.horizontal_flip(part) if mirrored else part
        return F.resize(part, [size, size], interpolation=mode, antialias=antialias)

    image = sized(image, InterpolationMode.BILINEAR, True)
    if isinstance(target, Tensor):
        target = sized(target[None], InterpolationMode.NEAREST_EXACT, False)[0]
    return image, target


def random_square(image: Tensor, smallest: float) -> Box:
    """A part of `smallest` to all of the area, and of a side ratio from 3:4 to 4:3."""
    from torchvision.transforms.v2 import RandomResizedCrop

    draw = RandomResizedCrop(1, scale=(smallest, 1), ratio=(3 / 4, 4 / 3))
    box = draw.make_params([image])
    return box["top"], box["left"], box["height"], box["width"]


def random_part(image: Tensor, smallest: float) -> Box:
    """A part of `smallest` to all of the area, about as long and as high as the picture.

    Testing squeezes the whole picture into a square; so does training with such a part.
    """
    height, width = image.shape[1:]
    area = smallest + (1 - smallest) * torch.rand(()).item()
    ratio = (4 / 3) ** (2 * torch.rand(()).item() - 1)
    h = min(height, max(1, round(height * (area / ratio) ** 0.5)))
    w = min(width, max(1, round(width * (area * ratio) ** 0.5)))
    top = torch.randint(height - h + 1, ()).item()
    left = torch.randint(width - w + 1, ()).item()
    return top, left, h, w


def shifted(image: Tensor) -> tuple[Tensor, Box]:
    """A small picture padded by an eighth, and a square of its own size somewhere in it."""
    from torchvision.transforms.v2 import functional as F

    side = min(image.shape[1:])
    image = F.pad(image, [max(1, side // 8)] * 4)
    height, width = image.shape[1:]
    top = torch.randint(height - side + 1, ()).item()
    left = torch.randint(width - side + 1, ()).item()
    return image, (top, left, side, side)


def recoloured(image: Tensor) -> Tensor:
    from torchvision.transforms.v2 import ColorJitter

    return ColorJitter(brightness=JITTER, contrast=JITTER, saturation=JITTER)(image)

"""A class for every pixel: the loss, what is counted, and what is shown."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.recipes import confusion
from gradfilter.recipes.confusion import Tally

Sample = tuple[Tensor, Tensor, Tensor]  # image of bytes [3, H, W], mask [H, W], scores [C, h, w]

DRAWN = 6  # samples in a picture
BLEND = 0.55  # share of the colour in an overlay


class Segmentation:
    """Cross-entropy of every pixel; mean intersection over union. Some pixels may be ignored."""

    headline = "miou"
    picture = "predictions.png"

    def __init__(self, classes: Sequence[str], ignore: int | None = None):
        self.classes, self.ignore = tuple(classes), ignore

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the pixels' losses from scores [N, C, h, w], and how many pixels it is over.

        The scores are enlarged to the masks [N, H, W].
        """
        skip = -100 if self.ignore is None else self.ignore
        scores = enlarged(output, target.shape[-2:])
        # pixels as a batch: the loss of maps has no deterministic form on a GPU
        scores, target = scores.permute(0, 2, 3, 1).flatten(0, 2), target.flatten().long()
        total = F.cross_entropy(scores, target, reduction="sum", ignore_index=skip)
        return total, (target != skip).sum()

    def tally(self) -> Tally:
        return confusion.tally(len(self.classes))

    @torch.no_grad()
    def add(self, tally: Tally, output: Tensor, target: Tensor) -> None:
        """Count a batch in; the tally moves to the device of the scores."""
        scores = enlarged(output, target.shape[-2:])
        loss, count = self.loss(scores, target)
        found = scores.argmax(1)
        if self.ignore is not None:
            found, target = (t[target != self.ignore] for t in (found, target))
        found = confusion.count(target, found, len(self.classes))
        for key, value in {"confusion": found, "loss": loss.double(), "count": count}.items():
            tally[key] = tally[key].to(value.device) + value

    def metrics(self, tally: Tally) -> dict[str, float]:
        """Over all pixels counted; a class that is neither there nor found has no part in miou."""
        each = confusion.iou(tally["confusion"])
        return {
            "miou": float(each.nanmean()),
            "pixel_accuracy": confusion.accuracy(tally["confusion"]),
            "loss": float(tally["loss"] / tally["count"].double()),
            **{f"iou {name}": float(v) for name, v in zip(self.classes, each, strict=True)},
        }

    def check(self, target: Tensor) -> None:
        """Refuse labels that are no class."""
        confusion.check(target, len(self.classes), self.ignore)

    def pictures(self, tally: Tally, samples: Sequence[Sample], folder: Path) -> list[Path]:
        """Draw `predictions.png`: images, truth and prediction side by side."""
        path = Path(folder) / self.picture
        return [self._draw(samples[:DRAWN], path)] if samples else []

    def show(self, output: Tensor, image: Tensor):
        """The image of bytes [3, H, W] with the classes laid over it in colour, as a PIL image."""
        from PIL import Image

        colours = self.coloured(self.found(output, image.shape[-2:]))
        mixed = (1 - BLEND) * image.cpu().float() + BLEND * colours.float()
        return Image.fromarray(mixed.round().to(torch.uint8).permute(1, 2, 0).numpy())

    def numbered(self, output: Tensor, image: Tensor):
        """The mask of class numbers, as a PIL image of a byte or two a pixel."""
        from PIL import Image

        mask = self.found(output, image.shape[-2:]).numpy()
        return Image.fromarray(mask.astype("uint8" if len(self.classes) <= 256 else "uint16"))

    def found(self, output: Tensor, size: Sequence[int]) -> Tensor:
        """The mask [H, W] of that size that scores [C, h, w] or [1, C, h, w] give."""
        scores = output.detach().reshape(1, *output.shape[-3:])
        return enlarged(scores, size).argmax(1)[0].cpu()

    def coloured(self, mask: Tensor) -> Tensor:
        """A mask [H, W] in colours, bytes [3, H, W]; what is ignored is black."""
        table = torch.tensor([*palette(len(self.classes)), (0, 0, 0)], dtype=torch.uint8)
        mask = mask.cpu().long()
        mask = mask.masked_fill((mask < 0) | (mask >= len(self.classes)), len(self.classes))
        return table[mask].permute(2, 0, 1)

    def _draw(self, samples: Sequence[Sample], path: Path) -> Path:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        height, width = samples[0][0].shape[-2:]
        figure = Figure((9, 3 * len(samples) * height / width + 1.2), dpi=110, layout="constrained")
        axes = figure.subplots(len(samples), 3, squeeze=False)
        for row, (image, target, output) in zip(axes, samples, strict=True):
            masks = target, self.found(output, image.shape[-2:])
            for cell, drawn in zip(row, (image.cpu(), *map(self.coloured, masks)), strict=True):
                cell.imshow(drawn.permute(1, 2, 0).numpy())
                cell.set_axis_off()
        for cell, title in zip(axes[0], ("image", "truth", "prediction"), strict=True):
            cell.set_title(title)
        colours = [[c / 255 for c in colour] for colour in palette(len(self.classes))]
        names = map(confusion.drawable, self.classes)
        keys = [Patch(color=c, label=n) for c, n in zip(colours, names, strict=True)]
        place = {"loc": "outside lower center", "ncols": 6, "frameon": False}
        for text in figure.legend(handles=keys[:40], **place).get_texts():
            text.set_parse_math(False)  # a dollar begins no formula
        figure.savefig(path)
        return path


def enlarged(scores: Tensor, size: Sequence[int]) -> Tensor:
    """Scores [N, C, h, w] at the resolution of a mask, in float32."""
    scores = scores.float()
    if tuple(scores.shape[-2:]) == tuple(size):
        return scores
    return F.interpolate(scores, tuple(size), mode="bilinear", align_corners=False)


def palette(count: int) -> list[tuple[int, int, int]]:
    """So many colours, told apart by hue and, in turn, by brightness; the same on every call."""
    golden = 0.618034
    hsv = [(i * golden % 1, (0.85, 0.5)[i % 2], (0.95, 0.7, 0.85)[i % 3]) for i in range(count)]
    return [tuple(round(255 * v) for v in colorsys.hsv_to_rgb(*c)) for c in hsv]

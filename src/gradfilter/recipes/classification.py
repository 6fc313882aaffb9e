"""A class for every picture: the loss, what is counted, and what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter.recipes import confusion
from gradfilter.recipes.confusion import Tally

Sample = tuple[Tensor, int | Tensor, Tensor]  # image of bytes [3, H, W], class, scores [C]

SHOWN = 5


class Classification:
    """Cross-entropy; top-1, top-5 and a confusion matrix."""

    headline = "top1"
    picture = "confusion.png"

    def __init__(self, classes: Sequence[str], ignore: int | None = None):
        self.classes, self.ignore = tuple(classes), ignore

    def loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the pictures' losses from scores [N, C], and how many pictures it is over."""
        skip = -100 if self.ignore is None else self.ignore
        total = F.cross_entropy(output.float(), target, reduction="sum", ignore_index=skip)
        return total, (target != skip).sum()

    def tally(self) -> Tally:
        top5 = torch.zeros((), dtype=torch.int64)
        return confusion.tally(len(self.classes)) | {"top5": top5}

    @torch.no_grad()
    def add(self, tally: Tally, output: Tensor, target: Tensor) -> None:
        """Count a batch in; the tally moves to the device of the scores."""
        loss, count = self.loss(output, target)
        if self.ignore is not None:
            output, target = (t[target != self.ignore] for t in (output, target))
        best = output.topk(min(5, len(self.classes)), dim=1).indices
        found = {
            "confusion": confusion.count(target, output.argmax(1), len(self.classes)),
            "loss": loss.double(),
            "count": count,
            "top5": (best == target[:, None]).sum(),
        }
        for key, value in found.items():
            tally[key] = tally[key].to(value.device) + value

    def metrics(self, tally: Tally) -> dict[str, float]:
        count = tally["count"].double()
        return {
            "top1": confusion.accuracy(tally["confusion"]),
            "top5": float(tally["top5"] / count),
            "loss": float(tally["loss"] / count),
        }

    def check(self, target: Tensor) -> None:
        """Refuse labels that are no class."""
        confusion.check(target, len(self.classes), self.ignore)

    def pictures(self, tally: Tally, samples: Sequence[Sample], folder: Path) -> list[Path]:
        """Draw `confusion.png`; the samples are for other tasks."""
        path = Path(folder) / self.picture
        return [confusion.picture(tally["confusion"], self.classes, path)]

    def show(self, output: Tensor, image: Tensor) -> list[tuple[str, float]]:
        """The best classes of scores [C] or [1, C], each with its share of the probability."""
        shares = output.detach().float().flatten().softmax(0)
        best = shares.topk(min(SHOWN, len(self.classes)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(self.classes[i], share) for i, share in pairs]

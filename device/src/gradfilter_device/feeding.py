"""Batches of pictures in an order and with random cuts that follow from the seed alone."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradfilter_device import photos
from gradfilter_device.exported import Exported
from gradfilter_device.photos import Broken, Example

SMALLEST = 0.33  # share of a photograph's area that a random cut has at least


@dataclass(frozen=True)
class Batch:
    """Images as the network takes them, and their classes or masks."""

    images: np.ndarray
    targets: np.ndarray


def open_examples(model: Exported, data: Path) -> tuple[list[Example], list[Example]]:
    return photos.open_folder(Path(data), list(model.pictures["classes"]), model.masks)


class Skipped:
    """Broken pictures by their place in the folder of pictures, wherever that lies."""

    def __init__(self, root: Path):
        self.root, self.names = Path(root), []

    def __contains__(self, path: Path) -> bool:
        # earlier versions noted paths as they were given
        return self._name(path) in self.names or str(path) in self.names

    def add(self, path: Path) -> None:
        self.names.append(self._name(path))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


class Feeder:
    """Reads examples; one that is broken is told once, and left out from then on."""

    def __init__(
        self,
        model: Exported,
        examples: list[Example],
        seed: int,
        varied: bool,
        skipped: Skipped,
    ):
        self.model, self.examples, self.skipped = model, examples, skipped
        self.seed, self.varied = seed, varied
        about = model.pictures
        self.mean, self.std = (
            np.array(about[key], np.float32)[:, None, None] for key in ("mean", "std")
        )

    def batch(self, epoch: int, within: int, size: int) -> Batch | None:
        """The batch of a step; None where every picture of it is broken."""
        order = noise("order", self.seed, epoch).permutation(len(self.examples))
        return self.read(order[within * size : (within + 1) * size], epoch)

    def read(self, places: Iterable[int], epoch: int = 0) -> Batch | None:
        """These examples; a fixed batch is filled up with what has no part in the loss."""
        found = [one for i in places if (one := self._one(int(i), epoch)) is not None]
        if not found:
            return None
        images, targets = (np.stack(part) for part in zip(*found, strict=True))
        missing = (self.model.batch or len(images)) - len(images)
        if missing > 0:
            blank = np.zeros((missing, *images.shape[1:]), images.dtype)
            none = np.full((missing, *targets.shape[1:]), photos.NOTHING)
            images, targets = np.concatenate([images, blank]), np.concatenate([targets, none])
        return Batch(images, targets)

    def _one(self, i: int, epoch: int) -> tuple[np.ndarray, np.ndarray] | None:
        path, target = self.examples[i]
        if path in self.skipped:
            return None
        try:
            return self.prepared(path, target, noise("picture", self.seed, epoch, i))
        except Broken as error:
            self.skipped.add(path)
            print(f"skipped a broken picture: {error}", file=sys.stderr, flush=True)
            return None

    def prepared(self, path: Path, target, random) -> tuple[np.ndarray, np.ndarray]:
        """A picture and its target as the network takes them."""
        image, size, masks = photos.picture(path), self.model.size, self.model.masks
        if self.varied and not masks and max(image.size) > max(photos.SMALL, max(size) // 2):
            pixels = self._varied(image, random)
        else:
            pixels = photos.cut(image, size, masks)
        x = ((pixels.astype(np.float32) - self.mean) / self.std).astype(self.model.dtype)
        if not masks:
            return x, np.array(target, np.int64)
        about = self.model.pictures
        return x, photos.mask(target, size, len(about["classes"]), about.get("ignore"))

    def _varied(self, image, random) -> np.ndarray:
        """A random part of a photograph, mirrored half of the time."""
        width, height = image.size
        area = random.uniform(SMALLEST, 1) * width * height
        ratio = (4 / 3) ** random.uniform(-1, 1)
        w = min(width, max(1, round((area * ratio) ** 0.5)))
        h = min(height, max(1, round((area / ratio) ** 0.5)))
        left, top = random.integers(width - w + 1), random.integers(height - h + 1)
        box = (left, top, left + w, top + h)
        resized = image.resize(self.model.size[::-1], photos.Image.Resampling.BILINEAR, box=box)
        pixels = np.asarray(resized).transpose(2, 0, 1)
        return pixels[:, :, ::-1] if random.uniform() < 0.5 else pixels


def noise(*what: int | str) -> np.random.Generator:
    """A generator that follows from this alone."""
    told = ",".join(map(str, what)).encode()
    return np.random.default_rng(
        int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big")
    )

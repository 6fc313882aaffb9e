"""Batches of pictures in an order and with random cuts that follow from the seed alone."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from gradfilter_device import memory, photos
from gradfilter_device.exported import Exported
from gradfilter_device.folders import Example, open_folder
from gradfilter_device.photos import Broken, Photo

SMALLEST = 0.33  # share of a photograph's area that a random cut has at least
RATIO = 4 / 3  # of its sides, at most


@dataclass(frozen=True)
class Batch:
    """Images as the network takes them, and their classes or masks."""

    images: np.ndarray
    targets: np.ndarray


def open_examples(model: Exported, data: Path) -> tuple[list[Example], list[Example]]:
    return open_folder(Path(data), list(model.pictures["classes"]), model.masks)


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
        # of the short side: at least this is cut out at random
        share = (SMALLEST / RATIO) ** 0.5 if self.cuts else photos.seen(model.masks)
        self.side = photos.least(model.size, share)
        self.large = False  # whether a picture was that was read last

    @property
    def cuts(self) -> bool:
        """Whether random parts are cut out."""
        return self.varied and not self.model.masks

    def batch(self, epoch: int, within: int, size: int) -> Batch | None:
        """The batch of a step; None where every picture of it is broken."""
        order = noise("order", self.seed, epoch).permutation(len(self.examples))
        return self.read(order[within * size : (within + 1) * size], epoch)

    def read(self, places: Iterable[int], epoch: int = 0) -> Batch | None:
        """These examples, less those that are broken; None where all are."""
        return self.first(places, None, epoch)

    def first(self, places: Iterable[int], count: int | None, epoch: int = 0) -> Batch | None:
        """The first so many that can be read, or all.

        A fixed batch is filled up with what has no part in the loss.
        """
        self.large = False
        readable = (one for i in places if (one := self._one(int(i), epoch)) is not None)
        found = list(islice(readable, count))
        if self.large:
            memory.release()  # or it would be kept beside the memory of the steps
        if not found:
            return None
        images, targets = (np.stack(part) for part in zip(*found, strict=True))
        missing = (self.model.batch or len(images)) - len(images)
        if missing > 0:
            blank = np.zeros((missing, *images.shape[1:]), images.dtype)
            none = np.full((missing, *targets.shape[1:]), photos.NOTHING)
            images, targets = np.concatenate([images, blank]), np.concatenate([targets, none])
        return Batch(images, targets)

    def largest(self) -> list[int]:
        """The places of the examples, those whose pictures take the most memory first."""
        taken = [photos.pixels(path, self.side) for path, _ in self.examples]
        return sorted(range(len(taken)), key=lambda i: -taken[i])

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
        photo, size = self.picture(path), self.model.size
        if self.cuts and not photos.is_small(photo, size):
            pixels = self._varied(photo, random)
        else:
            pixels = photos.cut(photo, size, self.model.masks)
        x = self.normal(pixels)
        if not self.model.masks:
            return x, np.array(target, np.int64)
        about = self.model.pictures
        classes, ignore = len(about["classes"]), about.get("ignore")
        return x, photos.mask(target, photo, size, classes, ignore)

    def picture(self, path: Path) -> Photo:
        """A picture with as many pixels as are needed."""
        found = photos.picture(path, self.side)
        self.large |= found.large
        return found

    def normal(self, pixels: np.ndarray) -> np.ndarray:
        """Bytes as the network takes them."""
        return ((pixels.astype(np.float32) - self.mean) / self.std).astype(self.model.dtype)

    def _varied(self, photo: Photo, random) -> np.ndarray:
        """A random part of a photograph, mirrored half of the time."""
        width, height = photo.size
        area = random.uniform(SMALLEST, 1) * width * height
        ratio = RATIO ** random.uniform(-1, 1)
        w = min(width, max(1, round((area * ratio) ** 0.5)))
        h = min(height, max(1, round((area / ratio) ** 0.5)))
        left, top = random.integers(width - w + 1), random.integers(height - h + 1)
        pixels = photo.part((left, top, left + w, top + h), self.model.size)
        return pixels[:, :, ::-1] if random.uniform() < 0.5 else pixels


def noise(*what: int | str) -> np.random.Generator:
    """A generator that follows from this alone."""
    told = ",".join(map(str, what)).encode()
    return np.random.default_rng(
        int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big")
    )

"""Pictures with a class or a mask each: tensors in memory, or files decoded when asked for."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gradfilter.recipes.datasets import decode
from gradfilter.recipes.datasets.decode import BadPicture

CACHED_SIDE = 256  # short side of the photographs that `FilePictures.cached` holds


class Pictures(Dataset):
    """A map-style data set of (uint8 [3, H, W], class or uint8 mask [H, W]).

    `labels` holds every class, int64 [N], without decoding a picture; None where there are masks.
    """

    labels: Tensor | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> tuple[Tensor, int | Tensor]:
        raise NotImplementedError

    def name(self, i: int) -> str:
        """What to call picture `i` in a message."""
        raise NotImplementedError

    def subset(self, indices: Tensor) -> Pictures:
        """The pictures at these places, in this order."""
        raise NotImplementedError

    def relabelled(self, numbers: Tensor) -> Pictures:
        """The same pictures, class i being number `numbers[i]` now."""
        chosen = copy.copy(self)
        chosen.labels = numbers[self.labels]
        return chosen

    def fingerprint(self) -> str:
        """A hash that changes when pictures, classes or their order do."""
        raise NotImplementedError

    def cached(self) -> Pictures:
        """The same pictures, held in memory."""
        return self


@dataclass(frozen=True)
class Data:
    """A data set to train on and to test on; checks that every class has a name."""

    name: str
    task: str  # "classification" or "segmentation"
    classes: tuple[str, ...]
    train: Pictures
    test: Pictures
    ignore: int | None = None  # the value of mask pixels that count for nothing
    augment: str = "standard"  # the level of `augment.training` that suits these pictures
    unread: str = ""  # what is to be said of pictures that were passed over
    held_out: bool = False  # whether those to test on were taken from among those to train on

    def __post_init__(self) -> None:
        for part, pictures in (("train", self.train), ("test", self.test)):
            if len(pictures) == 0:
                raise ValueError(f"{self.name}: there is no picture to {part} on")
            if pictures.labels is not None:
                check_labels(pictures, len(self.classes))


def check_labels(pictures: Pictures, count: int) -> None:
    """Refuse classes outside 0..count-1, naming the first picture that has one."""
    outside = ((pictures.labels < 0) | (pictures.labels >= count)).nonzero()
    if len(outside):
        i = outside[0].item()
        raise ValueError(
            f"{pictures.name(i)}: class {pictures.labels[i].item()} is outside 0..{count - 1}"
        )


class TensorPictures(Pictures):
    """Small pictures of one size, all in memory as bytes [N, 3, H, W]."""

    def __init__(self, title: str, images: Tensor, labels: Tensor, numbers: Tensor | None = None):
        if len(images) != len(labels):
            raise ValueError(f"{title}: {len(images)} pictures but {len(labels)} labels")
        self.title = title
        self.images = images
        self.labels = labels.to(torch.int64)
        self.numbers = torch.arange(len(labels)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.images[i], self.labels[i].item()

    def name(self, i: int) -> str:
        return f"{self.title} {self.numbers[i].item()}"

    def subset(self, indices: Tensor) -> TensorPictures:
        return TensorPictures(
            self.title, self.images[indices], self.labels[indices], self.numbers[indices]
        )

    def fingerprint(self) -> str:
        digest = hashlib.sha256(str(tuple(self.images.shape)).encode())
        digest.update(self.images.contiguous().numpy())
        digest.update(self.labels.numpy())
        return digest.hexdigest()


class FilePictures(Pictures):
    """Picture files below `root`, each with a class."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int] | Tensor):
        if len(names) != len(labels):
            raise ValueError(f"{root}: {len(names)} pictures but {len(labels)} labels")
        self.root = Path(root)
        self.names = list(names)
        self.labels = torch.as_tensor(labels, dtype=torch.int64)
        self.held: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.held[i] if self.held else self.load(i), self.labels[i].item()

    def load(self, i: int) -> Tensor:
        return decode.picture(self.root / self.names[i])

    def name(self, i: int) -> str:
        return str(self.root / self.names[i])

    def subset(self, indices: Tensor) -> FilePictures:
        chosen = copy.copy(self)
        places = torch.as_tensor(indices).tolist()
        for field in ("names", "held"):
            values = getattr(self, field)
            setattr(chosen, field, values and [values[i] for i in places])
        chosen.labels = self.labels[places]
        return chosen

    def fingerprint(self) -> str:
        digest = hashlib.sha256(b"" if self.held is None else f"side {CACHED_SIDE}".encode())
        for name, label in zip(self.names, self.labels.tolist(), strict=True):
            digest.update(os.fsencode(f"{name}\0{label}\0{stamp(self.root / name)}\0"))
        return digest.hexdigest()

    def cached(self) -> FilePictures:
        """All pictures decoded now and kept, none with a short side above `CACHED_SIDE`."""
        kept = copy.copy(self)
        kept.held = in_threads(lambda i: decode.shrink(self.load(i), CACHED_SIDE), len(self))
        return kept


class MaskedPictures(Pictures):
    """Picture files below `root`, each with a mask file of the same size.

    `values` says what the bytes of a mask file mean: {byte in the file: class}. Any other byte is
    refused when the mask is read.
    """

    def __init__(
        self, root: Path, names: Sequence[str], masks: Sequence[str], values: dict[int, int]
    ):
        if len(names) != len(masks):
            raise ValueError(f"{root}: {len(names)} pictures but {len(masks)} masks")
        self.root = Path(root)
        self.names = list(names)
        self.masks = list(masks)
        self.values = values
        self.held: list[tuple[Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.held[i] if self.held else self.load(i)

    def load(self, i: int) -> tuple[Tensor, Tensor]:
        image = decode.picture(self.root / self.names[i])
        mask = decode.mask(self.root / self.masks[i], self.values)
        if image.shape[1:] != mask.shape:
            raise BadPicture(
                f"{self.root / self.masks[i]}: a mask of {size_of(mask)} pixels for a picture of "
                f"{size_of(image)} ({self.root / self.names[i]})"
            )
        return image, mask

    def name(self, i: int) -> str:
        return str(self.root / self.names[i])

    def subset(self, indices: Tensor) -> MaskedPictures:
        chosen = copy.copy(self)
        places = torch.as_tensor(indices).tolist()
        for field in ("names", "masks", "held"):
            values = getattr(self, field)
            setattr(chosen, field, values and [values[i] for i in places])
        return chosen

    def fingerprint(self) -> str:
        digest = hashlib.sha256(str(sorted(self.values.items())).encode())
        for name in (name for pair in zip(self.names, self.masks, strict=True) for name in pair):
            digest.update(os.fsencode(f"{name}\0{stamp(self.root / name)}\0"))
        return digest.hexdigest()

    def cached(self) -> MaskedPictures:
        """All pictures and masks decoded now and kept, at their own size."""
        kept = copy.copy(self)
        kept.held = in_threads(self.load, len(self))
        return kept


def stamp(path: Path) -> str:
    """Size and time of a file: what tells that it was replaced without reading it."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise BadPicture(f"{path}: {error.strerror}") from error
    return f"{info.st_size} {info.st_mtime_ns}"


def in_threads(load, count: int) -> list:
    """load(0), ..., load(count - 1); the decoders leave Python's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(load, range(count)))


def size_of(image: Tensor) -> str:
    return f"{image.shape[-1]}x{image.shape[-2]}"

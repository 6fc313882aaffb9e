"""What the frozen front part of a network makes of each picture, stored once and trained from.

Stored in 16 bits, memory-mapped, under a fingerprint of the front's weights, the pictures and how
they are seen. Equality: a run from stored features takes the same steps as one that computes the
front anew each time and rounds its output to 16 bits, but for the order of summation where the
front sees other batches. From a run that is not cut it differs by that rounding, 2**-11 of a value.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gradfilter.order import evaluating
from gradfilter.recipes.checkpoint import NotWritten, write
from gradfilter.recipes.cut import Cut
from gradfilter.recipes.datasets import Pictures
from gradfilter.recipes.loading import Batch, InTurn, Key, loader
from gradfilter.recipes.parallel import World
from gradfilter.recipes.trainer import Trainer

FORMAT = 1
INDEX = "features.json"  # written last: a folder without it is not whole


class Stored:
    """Gives a trainer stored features instead of pictures; stores them where they are not yet.

    `bar(text, batches)` is a context that gives a function to call after every batch.
    """

    def __init__(self, trainer: Trainer, folder: Path, bar: Callable):
        self.trainer, self.folder, self.bar = trainer, folder, bar
        example = trainer.network.prepare(trainer.noise(2))
        self.cut = Cut(trainer.model, example, trainer.settings.engine == "auto")
        self.known: dict[tuple[int, bool], Features] = {}
        trainer.stored = self

    def source(self, pictures: Pictures, training: bool) -> Features:
        """The features of these pictures; the first process stores them, the others wait."""
        key = id(pictures), training
        if key not in self.known:
            mark = self.fingerprint(pictures, training)
            if self.trainer.world.first and open_features(self.folder, mark) is None:
                self._store(pictures, training, mark)
            self.trainer.world.wait()
            self.known[key] = open_features(self.folder, mark)
        return self.known[key]

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The output of the network from stored maps."""
        return self.cut.back(*(_widened(t) for t in inputs))

    def front(self, images: Tensor) -> tuple[Tensor, ...]:
        """What is stored of pictures of bytes, before it is rounded to 16 bits."""
        t = self.trainer
        with torch.no_grad(), evaluating(t.model), t.autocast():
            return self.cut.front(t.network.prepare(images.to(t.device)))

    def fingerprint(self, pictures: Pictures, training: bool) -> str:
        t = self.trainer
        seen = t.change[training], t.network.mean, t.network.std, t.settings.amp, t.device.type
        graph = str(self.cut.front.graph)
        return fingerprint(self.cut.front.state_dict().items(), pictures.fingerprint(), seen, graph)

    def _store(self, pictures: Pictures, training: bool, mark: str) -> None:
        t = self.trainer
        alone = World(t.device)
        order = InTurn(len(pictures), t.settings.batch, alone)
        batches = loader(t.changed(pictures, training), order, alone, t.settings.workers)
        about = f"storing features of {len(pictures):,} pictures"
        with one_at_a_time(self.folder, mark), self.bar(about, len(order)) as advance:
            if open_features(self.folder, mark) is None:  # which another run may have stored now
                store(self.folder, mark, batches, len(pictures), self.front, advance)


class Features(Dataset):
    """Stored maps and targets by picture; read as batches of what a network's back part reads."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = json.loads((folder / INDEX).read_text())
        self.arrays = [
            np.memmap(folder / name, np.dtype(kind), "r", shape=tuple(shape))
            for name, kind, shape in index["files"]
        ]

    def __reduce__(self):
        return Features, (self.folder,)  # mapped anew in another process, not copied to it

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, key: Key):
        return self.__getitems__([key])

    def __getitems__(self, keys: list[Key]) -> Batch:
        if not keys:
            return None
        places = [i for _, i in keys]
        *maps, targets = (torch.from_numpy(a[places]) for a in self.arrays)
        return tuple(maps), targets


def open_features(folder: Path, fingerprint: str) -> Features | None:
    """The features stored under this fingerprint, if they are there and whole."""
    place = _place(folder, fingerprint)
    try:
        index = json.loads((place / INDEX).read_text())
    except (OSError, ValueError):
        return None
    whole = all(
        (place / name).is_file()
        and (place / name).stat().st_size == math.prod(shape) * np.dtype(kind).itemsize
        for name, kind, shape in index["files"]
    )
    return Features(place) if whole and index["fingerprint"] == fingerprint else None


def store(
    folder: Path,
    fingerprint: str,
    batches: Iterable[Batch],
    count: int,
    front: Callable[[Tensor], tuple[Tensor, ...]],
    advance: Callable[[], None] = lambda: None,
) -> Features:
    """Run the front over all pictures, in order, and keep what it gives and the targets."""
    place = _place(folder, fingerprint)
    try:
        place.mkdir(parents=True, exist_ok=True)
        files = _fill(place, batches, count, front, advance)
        index = {"fingerprint": fingerprint, "files": files}
        write(place / INDEX, json.dumps(index).encode())
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise NotWritten(f"cannot store features in {folder}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return Features(place)


def _fill(place: Path, batches, count: int, front, advance) -> list[list]:
    """Write every batch to one file per map, and its targets; the files, kinds and shapes."""
    files: list[list] = []
    with ExitStack() as opened:
        handles = []
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            (images,), targets = batch
            parts = [*map(_halved, front(images)), targets.numpy()]
            if not files:
                names = [f"map{i}.f16" for i in range(len(parts) - 1)] + ["targets"]
                shapes = [[count, *p.shape[1:]] for p in parts]
                files = [[n, p.dtype.str, s] for n, p, s in zip(names, parts, shapes, strict=True)]
                _check_room(place, sum(math.prod(p.shape[1:]) * p.itemsize for p in parts) * count)
                handles = [opened.enter_context(open(place / name, "wb")) for name in names]
            for handle, part in zip(handles, parts, strict=True):
                handle.write(np.ascontiguousarray(part))  # not through the map: a full disk raises
            advance()
    return files


def _halved(t: Tensor) -> np.ndarray:
    half = t.to(torch.float16).cpu()
    if not half.isfinite().all():
        raise ValueError(
            "cache_features: the frozen part gives values beyond 16 bits "
            f"(up to {t.abs().max().item():.3g}, and 65504 is the most)"
        )
    return half.numpy()


def _widened(t: Tensor) -> Tensor:
    order = torch.channels_last if t.ndim == 4 else torch.preserve_format
    return t.to(torch.float32, memory_format=order)


def _check_room(place: Path, needed: int) -> None:
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"stored features take {needed / 2**30:.2f} GiB and {place} has "
            f"{free / 2**30:.2f} GiB free: give another --cache-dir"
        )


def fingerprint(tensors: Iterable[tuple[str, Tensor]], *about: object) -> str:
    """A hash of weights, by name, and of whatever else decides what is stored."""
    digest = hashlib.sha256(repr((FORMAT, *about)).encode())
    for name, t in tensors:
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def one_at_a_time(folder: Path, fingerprint: str) -> Iterator[None]:
    """Wait for other runs that store the same features; a killed one is not waited for.

    Two that write the same files would each read what the other has cut off.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    place = _place(folder, fingerprint)
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle = os.open(place, os.O_RDONLY)
    except OSError as error:
        raise NotWritten(f"cannot store features in {folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _place(folder: Path, fingerprint: str) -> Path:
    return folder / fingerprint[:24]

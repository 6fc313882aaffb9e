"""Batches of pictures in an order and with random changes that follow from the seed alone.

The order of an epoch follows from (seed, epoch), the changes to a picture from (seed, epoch,
picture): the number of worker processes, of training processes and of restarts changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gradfilter.recipes.parallel import World

Key = tuple[int, int]  # epoch, picture
Batch = tuple[tuple[Tensor, ...], Tensor] | Exception | None  # what the network reads; targets

MOST_WORKERS = 16


def mixed(*what: int | str) -> int:
    """A seed of 63 bits, another one for anything else."""
    told = ",".join(map(str, what)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(*what: int | str) -> Iterator[None]:
    """torch's CPU generator at a place that follows from this alone, for a while."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(mixed(*what))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


class Changed(Dataset):
    """Pictures after their random or fixed changes; a user's mistake is handed on, not raised.

    (A data loader would bury it in the report of a worker.)
    """

    def __init__(self, pictures: Dataset, change: Callable, seed: int):
        self.pictures, self.change, self.seed = pictures, change, seed

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, key: Key):
        epoch, i = key
        try:
            with seeded("picture", self.seed, epoch, i):
                image, target = self.change(*self.pictures[i])
        except (ValueError, OSError) as error:
            return error
        return image, torch.as_tensor(target)

    def __getitems__(self, keys: list[Key]) -> Batch:
        found = [self[key] for key in keys]
        for one in found:
            if isinstance(one, Exception):
                return one
        if not found:
            return None
        images, targets = zip(*found, strict=True)
        return (torch.stack(images),), torch.stack(targets)


def per_epoch(pictures: int, batch: int, fewest: int = 1) -> int:
    """Steps in an epoch; the last batch may be short, and with less than `fewest` is none."""
    whole, rest = divmod(pictures, batch)
    return whole + (rest >= fewest)


def order(pictures: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(mixed("order", seed, epoch))
    return torch.randperm(pictures, generator=generator)


class Shuffled:
    """For each step, the keys of this process's share of the batch; `fewest` as in `per_epoch`."""

    def __init__(
        self, pictures: int, batch: int, seed: int, steps: range, world: World, fewest: int = 1
    ):
        self.pictures, self.batch, self.seed = pictures, batch, seed
        self.steps, self.world, self.fewest = steps, world, fewest

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[Key]]:
        now, places = -1, None
        length = per_epoch(self.pictures, self.batch, self.fewest)
        for step in self.steps:
            epoch, within = divmod(step, length)
            if epoch != now:
                now, places = epoch, order(self.pictures, self.seed, epoch)
            batch = places[within * self.batch : (within + 1) * self.batch]
            yield [(epoch, i) for i in batch[self.world.rank :: self.world.size].tolist()]


class InTurn:
    """All pictures in their order, this process's share of every batch."""

    def __init__(self, pictures: int, batch: int, world: World):
        self.pictures, self.batch, self.world = pictures, batch, world

    def __len__(self) -> int:
        return per_epoch(self.pictures, self.batch)

    def __iter__(self) -> Iterator[list[Key]]:
        everything = range(self.pictures)
        for start in range(0, self.pictures, self.batch):
            batch = everything[start : start + self.batch]
            yield [(0, i) for i in batch[self.world.rank :: self.world.size]]


def loader(dataset: Dataset, batches, world: World, workers: int | None = None) -> DataLoader:
    """Batches of a dataset that knows `__getitems__`, loaded ahead by worker processes."""
    workers = default_workers(world) if workers is None else workers
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=world.device.type == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_leave_signals if workers else None,
    )


def loaded(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches of a loader; says what may help where a worker process dies."""
    try:
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"a process that loads pictures died ({first}); with little shared memory, try fewer "
            "--workers, or 0"
        ) from error


def default_workers(world: World) -> int:
    """On a GPU machine enough to keep it busy; on the CPU none, for the network needs the cores."""
    if world.device.type == "cpu":
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST_WORKERS, cores // here))


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _leave_signals(worker: int) -> None:
    """Ctrl-C is for the training process, which ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

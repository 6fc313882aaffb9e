"""The processes of a run: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist

PATIENCE = timedelta(hours=12)  # while the first process stores features, the others wait


@dataclass(frozen=True)
class World:
    """This process among `size`; all of them call the same methods in the same order."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, *tensors: Tensor) -> None:
        """Each tensor becomes its sum over the processes, in place."""
        if self.size > 1:
            for t in tensors:
                dist.all_reduce(t)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients become their sums over the processes.

        One that has none, for want of pictures, counts as zero; where none has one, it stays None.
        """
        if self.size == 1:
            return
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in parameters:
            kinds.setdefault(p.dtype, []).append(p)
        for group in kinds.values():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
            there = torch.tensor([p.grad is not None for p in group]).to(grads[0])
            flat = torch.cat([*(g.flatten() for g in grads), there])
            dist.all_reduce(flat)
            *sums, there = flat.split([*(g.numel() for g in grads), len(group)])
            for p, s, found in zip(group, sums, there.tolist(), strict=True):
                p.grad = s.view_as(p) if found else None

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.size == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def share(self, value):
        """The first process's value."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value) -> list:
        """Every process's value, in order."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Go on when all processes are here."""
        self.most(0)

    def in_turn(self, make: Callable):
        """What `make` gives; the first process calls it before the others, for its downloads."""
        made = make() if self.first else None
        self.wait()
        return made if self.first else make()


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """The processes that torchrun started, or this one alone; joined for a while."""
    size, local = (int(os.environ.get(k, d)) for k, d in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    here = choose(device, local)
    if dist.is_initialized():
        yield World(here, dist.get_rank(), dist.get_world_size())
        return
    if size == 1:
        yield World(here)
        return
    if here.type == "cuda":
        torch.cuda.set_device(here)
    backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield (joined := World(here, dist.get_rank(), size))
        joined.wait()  # a process that leaves while another still talks can take it down
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ValueError("another process of this run has stopped") from error
        raise
    finally:
        dist.destroy_process_group()


def choose(device: str, local: int = 0) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"no device is called {device!r}: auto, cpu, cuda, cuda:1") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = torch.device("cuda", local if found.index is None else found.index)
        if found.index >= count:
            raise ValueError(f"there is no {found} here: {count} CUDA devices")
    elif found.type != "cpu" and not _works(found):
        raise ValueError(f"there is no {found} here that computes: auto, cpu, cuda, cuda:1")
    return found


def _works(device: torch.device) -> bool:
    """Whether numbers can be had from a device; torch knows names of many that are not there."""
    try:
        return torch.ones((), device=device).item() == 1
    except (RuntimeError, AssertionError):
        return False


@contextmanager
def deterministic(device: torch.device, on: bool) -> Iterator[None]:
    """The same bits each time on the same machine, for a while; a CPU gives them anyway."""
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    cudnn, memory = torch.backends.cudnn, torch.utils.deterministic
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(on, warn_only=True)
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = on, not on, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
        torch.set_deterministic_debug_mode(mode)

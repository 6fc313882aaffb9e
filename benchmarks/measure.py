"""What the benchmarks share: calls timed in turns, kept and peak bytes, the machine, tables."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

from gradfilter import kept

Samples = dict[str, list[float]]  # clock -> seconds of each call
Clock = Callable[[Callable[[], object]], dict[str, float]]

CALLS = 2  # calls of one turn: the first may find the caches full of another variant's data
EVENT_CALLS = 5  # steps between two CUDA events


def use_cpu(threads: int) -> None:
    """Run on so many threads; a single one stays on the last core that this process may use."""
    torch.set_num_threads(threads)
    if threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def use_cuda() -> None:
    """TF32 for float32, and cuDNN's choice by trial, for every variant."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True


@contextmanager
def full_float32():
    """Products of float32 maps in float32, whatever `use_cuda` allows."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def cpu_clock(call: Callable[[], object]) -> dict[str, float]:
    """Seconds on the wall, and seconds that this process had a core."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def cuda_clock(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of one call among several in a row, by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(EVENT_CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return {"cuda": start.elapsed_time(end) / 1e3 / EVENT_CALLS}


def in_turns(
    calls: dict[str, Callable[[], object]], repeats: int, clock: Clock = cpu_clock
) -> dict[str, Samples]:
    """Time every call `CALLS` times a turn, `repeats` turns; each turn starts with another one."""
    names = list(calls)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name] += [clock(calls[name]) for _ in range(CALLS)]
        progress(f"turn {turn + 1} of {repeats}")
    progress("")
    return {name: _by_clock(samples) for name, samples in found.items()}


def _by_clock(samples: list[dict[str, float]]) -> Samples:
    return {clock: [sample[clock] for sample in samples] for clock in samples[0]}


STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "best": min,
    "median": statistics.median,
}


def ratios(above: Samples, below: Samples) -> dict[str, float]:
    """above / below by every clock and statistic: {"cpu best": 1.6, ...}."""
    return {
        f"{clock} {name}": statistic(above[clock]) / statistic(below[clock])
        for clock in above
        for name, statistic in STATISTICS.items()
    }


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def kept_bytes(forward: Callable[[], Tensor], model: nn.Module) -> dict[str, int]:
    """Bytes that autograd keeps from `forward` for the backward pass, weights not counted.

    Every saved tensor counts its own bytes, once for each (storage, offset, size). Tensors that a
    Python autograd function holds as attributes of its context escape the hooks; they are found
    by walking the graph, and counted as "hidden".
    """
    weights = {_where(t)[0] for t in (*model.parameters(), *model.buffers())}
    saved: dict[tuple, Tensor] = {}  # holds the tensors, so that no address is used twice

    def pack(t: Tensor) -> Tensor:
        if _where(t)[0] not in weights:
            saved.setdefault(_where(t), t.detach())
        return t.detach()  # an output that its own node holds on to would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = forward()
    contexts = [list(vars(node).values()) for node in kept.functions(loss)]
    hidden = {_where(t): t for t in kept.attributes(contexts) if _where(t)[0] not in weights}
    hidden = {key: t for key, t in hidden.items() if key not in saved}
    return {"saved": _own_bytes(saved), "hidden": _own_bytes(hidden)}


def _own_bytes(tensors: dict[tuple, Tensor]) -> int:
    """An expanded tensor is not larger than its storage."""
    return sum(min(nbytes([t]), t.untyped_storage().nbytes()) for t in tensors.values())


def _where(t: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape)


class ResidentPeak:
    """Growth of this process's resident memory since the start, and its peak since a reset."""

    def __init__(self):
        gc.collect()
        if hasattr(ctypes.CDLL(None), "malloc_trim"):  # what warm-up freed must not lie in wait
            ctypes.CDLL(None).malloc_trim(0)
        self.start = self._status("VmRSS")

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        return self._status("VmHWM") - self.start

    @staticmethod
    def _status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(s for s in lines if s.startswith(field))
        return int(line.split()[1]) * 1024


class CudaPeak:
    """The same of PyTorch's allocator on the GPU."""

    def __init__(self):
        gc.collect()
        torch.cuda.synchronize()
        self.start = torch.cuda.memory_allocated()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def read(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.start


def about(script: str, argv: list[str]) -> dict:
    """What a result must say beside its numbers: the command, the versions, the machine."""
    from gradfilter import kernels

    packages = ("torch", "torchvision", "timm", "triton", "numpy")
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *map(_name, argv)]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in packages},
        "kernels": {key: _name(value) for key, value in kernels.status().items()},
        "machine": {
            "cpu": _cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def _name(text: str) -> str:
    """An absolute path by its last part: where it lay on this machine tells nobody anything."""
    return Path(text).name if text.startswith("/") else text


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown")


def write(path: Path, result: dict) -> None:
    """The result as JSON; written whole or not at all, since a suite takes a file as done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns, the first one to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        others = (cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        return f"| {' | '.join([row[0].ljust(widths[0]), *others])} |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def progress(text: str) -> None:
    """What is being done now, on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

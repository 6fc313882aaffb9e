"""Steps timed in turns: seconds by phase, the peak of the memory, joules."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from gradfilter import energy, trial
from gradfilter.order import call
from gradfilter.trial import Target

TURNS = 3  # in which peak memory and energy are measured
WINDOW = 0.5  # seconds between two readings of an energy counter


class Step:
    """One training step, or one inference, that says how long each phase took."""

    def __init__(
        self,
        model: nn.Module,
        example,
        target: Target,
        device,
        trains: bool,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model, self.example, self.target = model, example, target
        self.device, self.trains, self.clock = device, trains, clock
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.0) if trains else None

    def __call__(self) -> dict[str, float]:
        begin = self._now()
        if not self.trains:
            with torch.inference_mode():
                call(self.model, self.example)
            taken = self._now() - begin
            return {"forward": taken, "step": taken}
        with torch.enable_grad():
            loss = trial.loss_of(call(self.model, self.example), self.target)
        forward = self._now()
        loss.backward()
        backward = self._now()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        end = self._now()
        return {
            "forward": forward - begin,
            "backward": backward - forward,
            "update": end - backward,
            "step": end - begin,
        }

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()


def in_turns(steps: dict[str, Step], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by phase of every step; each turn starts with another one, the first warms up."""
    names = list(steps)
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for turn in range(1 + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for phase, seconds in steps[name]().items():
                if turn:
                    taken[name].setdefault(phase, []).append(seconds)
    return taken


def peaks(
    steps: dict[str, Callable], device: torch.device
) -> tuple[dict[str, list[float]], list[str]]:
    """Bytes over the weights at the highest point of a step, a few times in turns."""
    if device.type == "cuda":
        peak = lambda step: cuda_peak(step, device)  # noqa: E731
    elif device.type != "cpu":
        return {}, [f"no peak memory: we know no way to measure it on {device.type}"]
    else:
        peak = resident_peak
    found: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    try:
        for _ in range(TURNS):
            for name, step in steps.items():
                found[name].append(peak(step))
    except OSError as error:
        first = str(error).partition("\n")[0]
        return {}, [f"no peak memory: this system does not reset it ({first})"]
    return found, []


def resident_peak(step: Callable) -> float:
    """Growth of the resident memory of this process during a step."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what earlier steps freed must not lie in wait
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    start = _status("VmRSS")
    step()
    return max(0, _status("VmHWM") - start)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def cuda_peak(step: Callable, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def joules_of(steps: dict[str, Callable], device) -> tuple[dict[str, list[float]], str]:
    """Joules a step, where the machine counts them: steps for a while between two readings."""
    joules, told = energy.counter(device)
    found: dict[str, list[float]] = {name: [] for name in steps}
    if joules is None:
        return {}, told
    for _ in range(TURNS):
        for name, step in steps.items():
            before, begin, count = joules(), time.perf_counter(), 0
            while count == 0 or time.perf_counter() - begin < WINDOW:
                step()
                count += 1
            found[name].append((joules() - before) / count)
    return found, told

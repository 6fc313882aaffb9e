"""Teach an ImageNet network to read handwriting, once per method, side by side."""

from __future__ import annotations

import copy
import json
import statistics
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import gradfilter as gf
from gradfilter.recipes.datasets.digits import digits
from gradfilter.recipes.lite0 import efficientnet_lite0, lite0_input

CLIP = 2.0  # gradient norm, as in the CVPR 2023 paper


@dataclass
class Run:
    """One method's network, and what was measured on it."""

    method: gf.Method
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    kept: int = 0  # bytes, from forward to backward
    seconds: list[float] = field(default_factory=list)  # per step
    losses: list[float] = field(default_factory=list)
    accuracy: dict[int, float] = field(default_factory=dict)  # after step -> share of test images

    @property
    def title(self) -> str:
        """`GalerkinFilter(grid=7)`: the method with its numbers, and what is not as usual."""
        knobs = [(f, getattr(self.method, f.name)) for f in fields(self.method) if f.repr]
        shown = [f"{f.name}={v}" for f, v in knobs if isinstance(v, int | float) or v != f.default]
        return type(self.method).__name__ + (f"({', '.join(shown)})" if shown else "")

    @property
    def final(self) -> float:
        return list(self.accuracy.values())[-1]

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    @property
    def kept_mib(self) -> float:
        return self.kept / 2**20

    def note(self) -> str:
        tested = f"{self.final:6.1%}" if self.accuracy else "      "
        return f"loss {self.losses[-1]:4.2f}  test {tested}"


def demo(
    methods: list[gf.Method],
    *,
    steps: int,
    size: int,
    batch: int,
    lr: float,
    seed: int,
    out: Path,
) -> list[Run]:
    """Train one network per method, print a table, write `demo.png` and `demo.json` to `out`."""
    from rich.console import Console

    out.mkdir(parents=True, exist_ok=True)  # before the work, in case it cannot be made
    console = Console()
    (images, classes), test = digits(size)
    torch.manual_seed(seed)
    start = efficientnet_lite0(num_classes=10).to(memory_format=torch.channels_last)
    example = network_input(images[:batch])
    runs = [prepare(start, method, example, lr, steps) for method in methods]
    order = torch.randint(len(classes), (steps, batch))
    console.print(
        f"EfficientNet-Lite0 (ImageNet) learns handwritten digits: all layers, {steps} steps of "
        f"{batch} images of {size}x{size} px, {torch.get_num_threads()} CPU threads"
    )
    for run in runs:
        run.kept = kept_bytes(run.model, example)
    with bars(console) as progress:
        tasks = [progress.add_task(run.title, total=steps, note="") for run in runs]
        for step, chosen in enumerate(order, start=1):
            x, t = network_input(images[chosen]), classes[chosen]
            for run, task in zip(runs, tasks, strict=True):  # the same batch for every method
                train_step(run, x, t)
                if step % max(1, steps // 6) == 0 or step == steps:
                    run.accuracy[step] = accuracy(run.model, *test)
                progress.update(task, advance=1, note=run.note())
    console.print(table(runs))
    (out / "demo.json").write_text(json.dumps(summary(runs), indent=1) + "\n")
    plot(runs, batch, out / "demo.png")
    console.print(f"plot: {out / 'demo.png'}   numbers: {out / 'demo.json'}")
    return runs


def prepare(start: nn.Module, method: gf.Method, example: Tensor, lr: float, steps: int) -> Run:
    """A copy of the network with the method on its layers, and an optimizer for all of them."""
    model = copy.deepcopy(start)
    gf.convert(model, method, example=example)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return Run(method, model.train(), optimizer, CosineAnnealingLR(optimizer, steps))


def train_step(run: Run, x: Tensor, t: Tensor) -> None:
    """One step of ordinary training."""
    begin = time.perf_counter()
    loss = F.cross_entropy(run.model(x), t)
    run.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
    run.optimizer.step()
    run.schedule.step()
    run.seconds.append(time.perf_counter() - begin)
    run.losses.append(loss.item())


def network_input(images: Tensor) -> Tensor:
    return lite0_input(images).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    """Share of the images whose class comes out on top."""
    right = sum(
        (model(network_input(x)).argmax(1) == t).sum().item()
        for x, t in zip(images.split(60), classes.split(60), strict=True)
    )
    return right / len(classes)


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass.

    Every storage counts once, the model's own parameters and buffers not at all.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # an output that its own node holds on to would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)  # while y lives so does what was saved, each at an address of its own
    del y
    return sum(size for address, size in kept.items() if address not in own)


def bars(console):
    """Progress bars; silent where the output is not a terminal."""
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[note]}"),
        progress.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def table(runs: list[Run]):
    """What was measured, with the ratio to the first row."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD)
    for column in ("", "accuracy", "time per step", "kept memory"):
        result.add_column(column, justify="right" if column else "left", no_wrap=True)
    for run in runs:
        result.add_row(
            run.title,
            f"{run.final:.1%}",
            f"{run.step_ms:.0f} ms {run.step_ms / runs[0].step_ms:5.2f}x",
            f"{run.kept_mib:.1f} MiB {run.kept_mib / runs[0].kept_mib:5.2f}x",
        )
    return result


def summary(runs: list[Run]) -> list[dict]:
    """What was measured, for a file."""
    return [
        {
            "method": run.title,
            "test_accuracy": run.accuracy,
            "step_ms_median": run.step_ms,
            "kept_bytes": run.kept,
            "losses": run.losses,
        }
        for run in runs
    ]


def plot(runs: list[Run], batch: int, path: Path) -> None:
    """Learning curves beside kept memory and time per step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), dpi=150, layout="constrained")
    curves, memory, clock = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    colours = [f"C{i}" for i in range(len(runs))]
    for run, colour in zip(runs, colours, strict=True):
        steps, shares = zip(*run.accuracy.items(), strict=True)
        curves.plot(steps, [100 * s for s in shares], "o-", color=colour, markersize=4)
        curves.plot([], [], "s", color=colour, label=f"{run.title}  {run.final:.1%}")
    curves.set(xlabel="training step", ylabel="test accuracy, %", xlim=(0, None), ylim=(0, 102))
    curves.set_title("Learning to read digits, all layers trained")
    curves.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False)
    memory.set_title("Kept for the backward pass, MiB")
    memory.set_xlabel(f"{batch} images")
    bar_chart(memory, [run.kept_mib for run in runs], colours)
    clock.set_title("Time per step, ms")
    clock.set_xlabel(f"median, {torch.get_num_threads()} CPU threads")
    bar_chart(clock, [run.step_ms for run in runs], colours)
    figure.savefig(path)


def bar_chart(axes, values: list[float], colours: list[str]) -> None:
    """Bars that say their value and their ratio to the first."""
    drawn = axes.barh(range(len(values)), values, 0.6, color=colours)
    axes.bar_label(drawn, [f"{v:.0f}  ({v / values[0]:.2f}x)" for v in values], padding=4)
    axes.invert_yaxis()
    axes.set(yticks=[], xlim=(0, 1.45 * max(values)))
    axes.spines[["top", "right"]].set_visible(False)

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
from gradfilter.recipes import data, models

CLIP = 2.0  # gradient norm, as in the CVPR 2023 paper


@dataclass
class Run:
    """One method's network, and what was measured on it."""

    method: gf.Method
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    kept_convolutions: int = 0  # bytes
    kept: int = 0
    seconds: list[float] = field(default_factory=list)  # per step
    losses: list[float] = field(default_factory=list)
    accuracy: dict[int, float] = field(default_factory=dict)  # after step -> share of test images

    @property
    def title(self) -> str:
        """`GalerkinFilter(grid=7)`: the method with its numbers, and what is not as usual."""
        knobs = [(f, getattr(self.method, f.name)) for f in fields(self.method) if f.repr]
        shown = [f"{f.name}={v}" for f, v in knobs if isinstance(v, int | float) or v != f.default]
        return type(self.method).__name__ + (f"({', '.join(shown)})" if shown else "")


def demo(
    methods: list[gf.Method],
    steps: int = 80,
    size: int = 96,
    batch: int = 32,
    lr: float = 0.03,
    seed: int = 0,
    out: Path = Path("demo"),
) -> list[Run]:
    """Train one network per method, print a table, write `demo.png` and `demo.json` to `out`."""
    from rich.console import Console

    console = Console()
    (images, classes), test = data.digits(size)
    torch.manual_seed(seed)
    start = models.efficientnet_lite0(num_classes=10).to(memory_format=torch.channels_last)
    runs = [prepare(start, method, lr, steps) for method in methods]
    order = torch.randint(len(classes), (steps, batch))
    console.print(
        f"EfficientNet-Lite0 (ImageNet) learns handwritten digits: all layers, {steps} steps of "
        f"{batch} images of {size}x{size} px, {torch.get_num_threads()} CPU threads"
    )
    for run in runs:
        run.kept_convolutions, run.kept = kept_bytes(run.model, network_input(images[:batch]))
    with bars(console) as progress:
        tasks = [progress.add_task(run.title, total=steps, note="") for run in runs]
        for step, chosen in enumerate(order, start=1):
            x, t = network_input(images[chosen]), classes[chosen]
            for run, task in zip(runs, tasks, strict=True):  # the same batch for every method
                train_step(run, x, t)
                if step % max(1, steps // 8) == 0 or step == steps:
                    run.accuracy[step] = accuracy(run.model, *test)
                progress.update(task, advance=1, note=note(run))
    console.print(table(runs))
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").write_text(json.dumps(summary(runs), indent=1) + "\n")
    plot(runs, out / "demo.png")
    console.print(f"plot: {out / 'demo.png'}   numbers: {out / 'demo.json'}")
    return runs


def prepare(start: nn.Module, method: gf.Method, lr: float, steps: int) -> Run:
    """A copy of the network with the method on its layers, and an optimizer for all of them."""
    model = copy.deepcopy(start)
    gf.convert(model, method)
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
    return models.lite0_input(images).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    """Share of the images whose class comes out on top."""
    right = sum(
        (model(network_input(x)).argmax(1) == t).sum().item()
        for x, t in zip(images.split(60), classes.split(60), strict=True)
    )
    return right / len(classes)


def kept_bytes(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes that autograd keeps for the backward pass: by the convolutions, and by all modules.

    Every storage counts once, the model's own parameters and buffers not at all.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    by_convolutions: dict[int, int] = {}
    by_all: dict[int, int] = {}
    inside = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            by_all[storage.data_ptr()] = storage.nbytes()
            if inside:
                by_convolutions[storage.data_ptr()] = storage.nbytes()
        return t

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_pre_hook(lambda *_: inside.append(True)))
            hooks.append(module.register_forward_hook(lambda *_: inside.clear()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)  # alive until here, so no storage is counted under another's address
    for hook in hooks:
        hook.remove()
    del y
    return sum(by_convolutions.values()), sum(by_all.values())


def note(run: Run) -> str:
    known = f"{list(run.accuracy.values())[-1]:6.1%}" if run.accuracy else "   ... "
    return f"loss {run.losses[-1]:5.2f}  test {known}"


def bars(console):
    """Progress bars; silent where the output is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def summary(runs: list[Run]) -> list[dict]:
    """What was measured, one row a method."""
    return [
        {
            "method": run.title,
            "test_accuracy": run.accuracy,
            "step_seconds_median": statistics.median(run.seconds),
            "kept_bytes": run.kept,
            "kept_bytes_convolutions": run.kept_convolutions,
            "losses": run.losses,
        }
        for run in runs
    ]


def table(runs: list[Run]):
    """The final table; ratios are to the first row."""
    from rich.table import Table

    result = Table(title="After the last step, on 360 test images nobody trained on")
    result.add_column("method")
    for column in ("accuracy", "time per step", "kept memory", "of it by convolutions"):
        result.add_column(column, justify="right")
    first = runs[0]
    for run in runs:
        result.add_row(
            run.title,
            f"{list(run.accuracy.values())[-1]:.1%}",
            ratio(run, first, lambda r: statistics.median(r.seconds) * 1e3, "{:.0f} ms"),
            ratio(run, first, lambda r: r.kept / 2**20, "{:.1f} MiB"),
            ratio(run, first, lambda r: r.kept_convolutions / 2**20, "{:.1f} MiB"),
        )
    return result


def ratio(run: Run, first: Run, measure, form: str) -> str:
    own, base = measure(run), measure(first)
    return form.format(own) + ("        " if run is first else f"  {own / base:4.2f}x")


def plot(runs: list[Run], path: Path) -> None:
    """Learning curves beside kept memory and time per step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), dpi=150, layout="constrained")
    curves, memory, clock = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    colours = [f"C{i}" for i in range(len(runs))]
    for run, colour in zip(runs, colours, strict=True):
        steps, shares = zip(*run.accuracy.items(), strict=True)
        label = f"{run.title}: {shares[-1]:.1%}"
        curves.plot(steps, [100 * s for s in shares], "o-", color=colour, label=label, markersize=4)
    curves.set(xlabel="training step", ylabel="test accuracy, %", ylim=(0, 103))
    curves.set_title("Reading digits, all layers trained")
    curves.grid(alpha=0.3)
    curves.legend(frameon=False)
    bar_chart(memory, [run.kept / 2**20 for run in runs], colours, "kept for the backward pass, MiB")
    bar_chart(clock, [1e3 * statistics.median(r.seconds) for r in runs], colours, "time per step, ms")
    figure.savefig(path)


def bar_chart(axes, values: list[float], colours: list[str], title: str) -> None:
    bars = axes.barh(range(len(values)), values, color=colours, height=0.6)
    labels = [f"{v:.0f}" if v == values[0] else f"{v:.0f}  ({v / values[0]:.2f}x)" for v in values]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.set(title=title, yticks=[], xlim=(0, 1.35 * max(values)))
    axes.spines[["top", "right"]].set_visible(False)

"""The files of a run beside its checkpoints: metrics, curves, TensorBoard events."""

from __future__ import annotations

import csv
import io
import math
import os
from contextlib import suppress
from pathlib import Path

from gradfilter.recipes.checkpoint import NotWritten, write

CONFIG, METRICS, CURVES, SPLIT, PLAN = (
    "config.yaml",
    "metrics.csv",
    "curves.png",
    "split.json",
    "plan.yaml",
)
Row = dict[str, float]


def new_folder(data: str, model: str) -> Path:
    """A folder in `runs/` that is not there yet."""
    title = f"{Path(data).resolve().name}-{model}"
    for number in range(1, 10**6):
        folder = Path("runs", title if number == 1 else f"{title}-{number}")
        if not os.path.lexists(folder):
            return folder
    raise ValueError(f"runs/ has too many runs of {title}")


class Events:
    """TensorBoard events of a run, or nothing; events after `step` give way to new ones."""

    def __init__(self, folder: Path, step: int, on: bool):
        self.writer = None
        if on:
            from torch.utils.tensorboard import SummaryWriter

            purge = {"purge_step": step + 1} if step else {}
            self.writer = SummaryWriter(folder / "tensorboard", **purge)

    def add(self, row: Row) -> None:
        if self.writer is None:
            return
        try:
            for name, value in row.items():
                if name != "step" and not math.isnan(value):
                    self.writer.add_scalar(name, value, int(row["step"]))
            self.writer.flush()
        except OSError as error:
            raise NotWritten(f"cannot write TensorBoard events: {error.strerror}") from error

    def close(self) -> None:
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()


def write_metrics(folder: Path, rows: list[Row]) -> None:
    """Every row, one an evaluation, as CSV."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(
        {name: "" if math.isnan(value) else f"{value:.8g}" for name, value in row.items()}
        for row in rows
    )
    write(folder / METRICS, text.getvalue().encode())


def read_metrics(folder: Path) -> list[Row]:
    """The rows that `write_metrics` wrote; none where there is no such file."""
    try:
        text = (folder / METRICS).read_text()
    except FileNotFoundError:
        return []
    return [
        {name: float(value) if value else math.nan for name, value in row.items()}
        for row in csv.DictReader(io.StringIO(text))
    ]


def draw_curves(folder: Path, rows: list[Row], headline: str) -> Path:
    """Losses, and the number that counts, over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.6), dpi=130, layout="constrained")
    losses, score = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in rows]
    for name, label in (("train_loss", "training"), ("test_loss", "test")):
        losses.plot(epochs, [row.get(name, math.nan) for row in rows], "o-", ms=3, label=label)
    losses.set(xlabel="epoch", title="loss")
    losses.legend(frameon=False)
    score.plot(epochs, [100 * row[f"test_{headline}"] for row in rows], "o-", ms=3, color="C2")
    score.set(xlabel="epoch", title=f"test {headline}, %")
    for axes in (losses, score):
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write(folder / CURVES, buffer.getbuffer())
    return folder / CURVES

"""The folder of a federated run: tables, log, plot, progress, result."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradfilter.recipes.checkpoint import write
from gradfilter.recipes.claim import locked
from gradfilter.recipes.screen import Screen

ROUNDS, CLIENTS, LOG, PROGRESS, RESULT, CURVES = (
    "rounds.csv",
    "clients.csv",
    "log.txt",
    "progress.json",
    "result.json",
    "curves.png",
)
Row = dict[str, float | str]
MIB = 2**20
PATIENCE = 60.0  # seconds that a server waits for another one to let go of the folder


class Folder:
    """Where a run writes, and says, what it does."""

    def __init__(self, path: Path, screen: Screen):
        self.path, self.screen = path, screen

    def say(self, text: str) -> None:
        """A line on the screen and in the log."""
        self.screen.say(text)
        with open(self.path / LOG, "a", encoding="utf-8") as log:
            log.write(f"{text}\n")

    def progress(self, round: int, answered: int, asked: int) -> None:
        """How far a round is, for whoever watches from another process."""
        told = {"round": round, "answered": answered, "asked": asked}
        write(self.path / PROGRESS, json.dumps(told).encode())

    def tables(self, rounds: list[Row], clients: list[Row]) -> None:
        write(self.path / ROUNDS, table(rounds).encode())
        write(self.path / CLIENTS, table(clients).encode())

    def result(self, **content) -> None:
        """The last thing a run writes: whether it finished, and what came of it."""
        write(self.path / RESULT, (json.dumps(content, indent=1) + "\n").encode())

    def draw(self, rounds: list[Row], headline: str) -> None:
        """The number that counts, the losses and the traffic, over the rounds."""
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:  # a run is not to fail at its last step
            self.say("no plot: matplotlib is not installed")
            return
        figure = Figure((12, 3.6), dpi=130, layout="constrained")
        score, losses, traffic = figure.subplots(1, 3)
        x = [row["round"] for row in rounds]
        score.plot(x, [100 * row[f"test_{headline}"] for row in rounds], "o-", ms=3, color="C2")
        score.set(xlabel="round", title=f"test {headline}, %")
        for name, label in (("train_loss", "clients, training"), ("test_loss", "test")):
            losses.plot(x, [row.get(name, math.nan) for row in rounds], "o-", ms=3, label=label)
        losses.set(xlabel="round", title="loss")
        for name, label in (("bytes", "sent"), ("full_bytes", "whole networks")):
            traffic.plot(x[1:], _cumulated(rounds, name), "o-", ms=3, label=label)
        traffic.set(xlabel="round", title="both ways, all clients, MiB in all", ylim=(0, None))
        for axes in (losses, traffic):
            axes.legend(frameon=False)
        for axes in (score, losses, traffic):
            axes.grid(alpha=0.3)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        write(self.path / CURVES, buffer.getbuffer())


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a folder for a while; after a crash the old server may still be about to notice."""
    path.mkdir(parents=True, exist_ok=True)
    with locked(path, PATIENCE, f"another server is at work in {path}"):
        yield


def _cumulated(rounds: list[Row], name: str) -> list[float]:
    total, found = 0.0, []
    for row in rounds[1:]:
        total += row[name] / MIB
        found.append(total)
    return found


def table(rows: list[Row]) -> str:
    """Rows as CSV; a NaN is an empty cell."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = csv.DictWriter(text, names, lineterminator="\n")
    lines.writeheader()
    lines.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else f"{value:.10g}"

"""What a run says while it goes: lines, and bars with rate and time left on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Screen:
    """Prints lines and draws bars; says nothing where `quiet`, draws nothing off a terminal."""

    def __init__(self, quiet: bool = False):
        from rich.console import Console

        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.bars = self._bars()
        self.depth = 0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, text: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        """A bar for a while; call what it gives after each of `total`, with a `note` to show."""
        task = self.bars.add_task(text, total=total, completed=done, note="")
        with self._shown():
            try:
                yield lambda n=1, **fields: self.bars.update(task, advance=n, **fields)
            finally:
                self.bars.remove_task(task)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """The bars, live while any is there."""
        if self.depth == 0:
            self.bars.start()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self.bars.stop()

    def _bars(self):
        from rich import progress
        from rich.text import Text

        class Rate(progress.ProgressColumn):
            """How many a second."""

            def render(self, task) -> Text:
                speed = task.finished_speed or task.speed
                return Text("" if speed is None else f"{speed:.2f}/s")

        return progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            Rate(),
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

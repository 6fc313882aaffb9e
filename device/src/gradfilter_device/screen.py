"""A progress line: rewritten on a terminal, now and then a new one elsewhere."""

from __future__ import annotations

import sys
import time

EVERY = 30.0  # seconds between lines where there is no terminal


class Line:
    def __init__(self, what: str, total: int):
        self.what, self.total, self.begin = what, total, time.monotonic()
        self.first: int | None = None
        self.told, self.open = self.begin, False

    def show(self, done: int, note: str) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if self.first is None:
            self.first = done - 1
        if now - self.told < (0.2 if terminal else EVERY):
            return
        self.told = now
        left = (now - self.begin) / (done - self.first) * (self.total - done)
        text = f"{self.what} {done}/{self.total}, {note}, {left / 60:.0f} min left"
        print(
            f"\r\033[K{text}" if terminal else text,
            end="" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )
        self.open = terminal

    def end(self) -> None:
        if self.open:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self.open = False

"""Ctrl-C and SIGTERM as a wish, to be heard at a moment that suits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds after which a second Ctrl-C is meant as such; torchrun sends two at once


@contextmanager
def interrupts() -> Iterator[list[float]]:
    """Ctrl-C and SIGTERM only add to a list for a while; a second Ctrl-C, later, gets through."""
    asked: list[float] = []

    def note(number, frame):
        now = time.monotonic()
        if number == signal.SIGINT and asked and now - asked[0] > PATIENCE:
            raise KeyboardInterrupt
        asked.append(now)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

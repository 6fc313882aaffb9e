"""Ctrl-C, SIGTERM and a lost connection as a wish, to be heard at a moment that suits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds after which a second Ctrl-C is meant as such; torchrun sends two at once


@contextmanager
def interrupts() -> Iterator[list[float]]:
    """Such signals only add to a list for a while; a second Ctrl-C, later, gets through."""
    asked: list[float] = []

    def note(number, frame):
        now = time.monotonic()
        if number == signal.SIGINT and asked and now - asked[0] > PATIENCE:
            raise KeyboardInterrupt
        asked.append(now)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, note) for number in endings()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def endings() -> list[int]:
    """The signals that ask to end; of a lost connection only where nohup has it not ignored."""
    lost = getattr(signal, "SIGHUP", None)  # Windows has none
    ignored = lost is None or signal.getsignal(lost) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [lost])]

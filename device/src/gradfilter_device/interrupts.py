"""Ctrl-C, SIGTERM and a lost connection as a wish, heard between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """The signals that came; a second one of a kind gets through at once.

    In the middle of a step half of the tensors are old: nothing could be saved there.
    """
    asked: list[int] = []

    def note(number, frame):
        if number in asked:
            raise KeyboardInterrupt
        asked.append(number)

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

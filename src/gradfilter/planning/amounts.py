"""Amounts of memory and time, as people write them."""

from __future__ import annotations

import math
import re

Amount = int | float | str
BYTES = {"": 1, "b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
WRITTEN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def bytes_of(amount: Amount) -> float:
    """Bytes, from a number or from "64MB"; a KB is 1,024 bytes, and KiB is the same."""
    return _read(amount, BYTES, "memory", "64MB, 512KB or 1.5GB")


def seconds_of(amount: Amount) -> float:
    """Seconds, from a number or from "200ms"."""
    return _read(amount, SECONDS, "time", "200ms or 1.5s")


def _read(amount: Amount, units: dict[str, float], what: str, like: str) -> float:
    value = amount
    if isinstance(amount, str):
        found = WRITTEN.fullmatch(amount)
        unit = found[2].lower().replace("ib", "b") if found else None
        if unit not in units:
            raise ValueError(f"{what} {amount!r} is not an amount like {like}")
        value = float(found[1]) * units[unit]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number or text like {like}, got {amount!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what} must be above 0, got {amount!r}")
    return float(value)


def told_bytes(size: float) -> str:
    """Bytes for people, rounded up, so that what is enough stays enough."""
    unit = next((u for u in ("GB", "MB", "KB") if size >= BYTES[u.lower()]), "B")
    return f"{_up(size / BYTES[unit.lower()])} {unit}"


def told_seconds(taken: float) -> str:
    """Milliseconds, rounded up."""
    return f"{_up(1e3 * taken)} ms"


def _up(value: float) -> str:
    return f"{math.ceil(100 * value) / 100:.2f}".rstrip("0").rstrip(".")


TOLD = {"memory": told_bytes, "time": told_seconds}

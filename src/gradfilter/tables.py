"""Plain text and plain values, as the instruments print and save them."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass


def aligned(rows: list[tuple[str, ...]], left: int = 1) -> str:
    """Columns of equal width: the first `left` of them to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def plain(value):
    """A result as dicts, lists and values that JSON has; an infinite number is "inf"."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value

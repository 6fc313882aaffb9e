"""Which sizes of a trace depend on the number of images: two traces compared."""

from __future__ import annotations

from torch import Tensor

from gradfilter.export.graph import Batch
from gradfilter.export.trace import Call, Result, Trace

OTHER = "export: the step is another one for another number of images; fix it with batch"


def align(trace: Trace, other: Trace, counts: tuple[int, int]) -> None:
    """Put sizes that hold for any number of images into a trace.

    `other` is of the same step on another number of images; `counts` are both numbers.
    """
    if len(trace.calls) != len(other.calls):
        raise ValueError(OTHER)
    for a, b in zip((*trace.inputs, *trace.calls), (*other.inputs, *other.calls), strict=True):
        if a.target is not b.target:
            raise ValueError(OTHER)
        found: list[Batch] = []
        a.args = _sizes(a.args, b.args, counts, found)
        a.kwargs = _sizes(a.kwargs, b.kwargs, counts, found)
        a.shapes = _sizes(a.shapes, b.shapes, counts, found)
        a.fixed = not found


def _sizes(a, b, counts: tuple[int, int], found: list[Batch]):
    """Two trees of arguments as one; a whole number that differs is a multiple of the images."""
    if isinstance(a, Result | Tensor | Call) or a is b:
        return a
    if isinstance(a, dict):
        return {key: _sizes(a[key], b[key], counts, found) for key in a}
    if isinstance(a, list | tuple):
        parts = [_sizes(x, y, counts, found) for x, y in zip(a, b, strict=True)]
        return tuple(parts) if isinstance(a, tuple) else parts
    if a == b:
        return a
    if isinstance(a, int) and a % counts[0] == 0 and a * counts[1] == b * counts[0]:
        found.append(Batch(a // counts[0]))
        return found[-1]
    raise ValueError(f"export: {a!r} depends on the number of images; fix it with batch")

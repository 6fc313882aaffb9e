"""The resident memory of this process, and the largest batch that fits a limit."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gradfilter_device.exported import Unusable

MIB = 2**20


def peak() -> int:
    """Most bytes that this process was ever resident with."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fitting(limit: int, asked: int, fixed: bool, step: Callable[[int], None]) -> int:
    """The largest batch of at most `asked` images whose step stays below the limit.

    `step(n)` takes a trial step of n images. What an image adds is measured between 1 and 2, and
    the answer tried out; a limit that not even the smallest step keeps is refused.
    """
    smallest = asked if fixed else 1
    step(smallest)
    one = peak()
    if one > limit:
        raise Unusable(
            f"a step of {smallest} images takes {one / MIB:.0f} MB, and the limit is "
            f"{limit / MIB:.0f} MB" + ("; export with a smaller batch" if fixed else "")
        )
    if fixed or asked == 1:
        return asked
    step(2)
    each = max(peak() - one, 1)
    return max(1, min(asked, 1 + int((limit - one) * MARGIN / each)))


MARGIN = 0.9  # of what is left, for what does not grow evenly

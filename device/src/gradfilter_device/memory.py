"""The resident memory of this process, and the largest batch that fits a limit."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from gradfilter_device.exported import Unusable

MIB = 2**20
SHARE = 0.95  # of a limit that a batch is chosen for; the rest is for larger pictures
MMAP_MAX, TRIM_THRESHOLD, NEVER = -4, -1, 2**31 - 1  # of glibc's mallopt


def keep() -> None:
    """Keep memory that is free for the next step; only glibc can.

    By default it gives every large map back, and takes it anew page by page at every step.
    """
    if (mallopt := _of_glibc("mallopt")) is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, NEVER)


def release() -> None:
    """Give memory that is free back."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str):
    """A function of the C library, where it is glibc."""
    try:
        library = ctypes.CDLL(None)
        return getattr(library, name) if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # Windows
        return None


def peak() -> int:
    """Most bytes that this process was resident with, since `forget` where that works."""
    if (found := _status("VmHWM")) is not None:
        return found
    try:
        import resource
    except ImportError as error:  # Windows
        raise Unusable("the memory of a process cannot be measured on this system") from error
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def told() -> str:
    """The peak in words."""
    try:
        return f"{peak() / MIB:.0f} MB resident at most"
    except Unusable as error:  # which is no reason to fail
        return str(error)


def resident() -> int:
    """Bytes that this process is resident with now; where nothing tells, the most it ever was."""
    found = _status("VmRSS")
    return peak() if found is None else found


def forget() -> None:
    """Let `peak` begin anew; only Linux can."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def _status(name: str) -> int | None:
    """A size that Linux tells; unlike getrusage's it is not that of the process that forked."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            for line in file:
                if line.startswith(f"{name}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def fitting(limit: int, asked: int, fixed: bool, step: Callable[[int], None]) -> int:
    """The largest batch of at most `asked` images whose step stays below the limit.

    `step(n)` takes a trial step of n images. From 1 on the number is doubled at most, as far as
    what the last images added lets expect to fit; a batch that was not tried out is not given. A
    limit that not even the smallest step keeps is refused.
    """
    loaded, before = peak(), resident()
    count = asked if fixed else 1
    used = _used(step, count)
    if (most := max(loaded, used)) > limit:
        raise Unusable(
            f"a step of {count} images takes {most / MIB:.0f} MB, and the limit is "
            f"{limit / MIB:.0f} MB" + ("; smaller batches cannot be had here" if count > 1 else "")
        )
    # the first step also takes what does not grow with the images: gradients, libraries' own
    each = (used - before) / 2
    while count < asked:
        more = min(count, asked - count, int((SHARE * limit - used) / max(each, 1)))
        if more < 1:
            break
        now = _used(step, count + more)
        if now > SHARE * limit:
            break
        each = (now - used) / more
        count, used = count + more, now
    release()
    return count


def _used(step: Callable[[int], None], count: int) -> int:
    release()
    forget()
    step(count)
    return peak()

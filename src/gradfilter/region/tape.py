"""Tapes: the C calls of several steps, written down once and made by one call from Python.

A tape is written for one size of images and any number of them. Its calls say by slots where they
read and write (`struct playing` in cpu_tape.c); their addresses are filled in when it is played:

- maps that live within the tape share two arenas, in which each has a place while it is needed;
- everything else, parameters and the maps that come in, go out or are kept, has its own slot.

A forward pass takes a few images at a time through calls on large maps, so that those stay in the
cache and need little memory; calls on small maps take more images, for the sake of the weights.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradfilter.kernels.cpu_library import FLOATS, library

# The kernels of cpu_tape.c's enum, in its order.
KERNELS = ["patch_mean", "pointwise", "depthwise", "add", "pointwise_backward", "slope_backward"]
KERNELS += ["grid_backward", "row_dots", "weigh", "convolve", "windows"]
CODES = {name: code for code, name in enumerate(KERNELS)}
# Bytes of maps that a call on several images at once should read and write.
AT_ONCE = 4 << 20
ALIGNED = 16  # floats
ALL = 1 << 40  # images at once
LOCAL, WHOLE, FREE = 0, 1, 2  # slots: both arenas, the first of the others

Shape = tuple[int, int, int]  # of one image's map: channels, height, width


class Spot(NamedTuple):
    """A place in a slot; `image` floats further for every image before."""

    slot: int
    offset: int = 0
    image: int = 0


NOWHERE = Spot(-1)


@dataclass(eq=False)
class Map:
    """A map that a tape writes or is given; `slot` is set where it lies outside the arenas.

    Where its slot holds several maps, it has those before it `offset` floats of every image.
    """

    shape: Shape
    slot: int | None = None
    offset: int = 0
    spot: Spot = NOWHERE

    @property
    def size(self) -> int:
        """Floats of one image."""
        return self.shape[0] * self.shape[1] * self.shape[2]


@dataclass
class Call:
    kernel: str
    places: Sequence[Map | Spot | None]
    numbers: Sequence[int | float]
    at_once: int = ALL  # images

    def maps(self) -> Iterable[Map]:
        return (p for p in self.places if isinstance(p, Map))


@dataclass
class Group:
    """Calls that follow one another for the same few images."""

    at_once: int
    calls: list[Call]
    words: ctypes.Array | None = None
    local: int = 0  # floats of its arena, an image


@dataclass
class Tape:
    """Calls, first listed and then, by `finish`, put into words."""

    calls: list[Call] = field(default_factory=list)
    slots: list[bool] = field(default_factory=lambda: [False] * FREE)  # whether of several maps
    groups: list[Group] = field(default_factory=list)
    whole: int = 0  # floats an image of the arena that all images of a batch have a place in

    def slot(self, several: bool = False) -> int:
        """A slot for something outside, or several maps; `play` is told where it is."""
        self.slots.append(several)
        return len(self.slots) - 1

    def call(self, kernel: str, places: Sequence[Map | Spot | None], *numbers: int | float) -> None:
        self.calls.append(Call(kernel, places, numbers))

    def finish(self, in_turns: bool) -> None:
        """Give every map its place; in turns, large ones are for a few images at a time."""
        if in_turns:
            _portions(self.calls)
        self.groups = _grouped(self.calls)
        group_of = [i for i, group in enumerate(self.groups) for _ in group.calls]
        lives: dict[Map, tuple[int, int]] = {}
        for i, call in enumerate(self.calls):
            for m in call.maps():
                lives[m] = lives.get(m, (i,))[0], i
        crossing, within = {}, [{} for _ in self.groups]
        for m, (first, last) in lives.items():
            if m.slot is not None:
                m.spot = Spot(m.slot, m.offset, m.size)
            elif group_of[first] == group_of[last]:
                within[group_of[first]][m] = first, last
            else:  # a group is done with a map only when all its images are
                crossing[m] = group_of[first], group_of[last]
        self.whole = _arranged(crossing, WHOLE)
        for group, own in zip(self.groups, within, strict=True):
            group.local = _arranged(own, LOCAL)
            group.words = _words(group.calls)

    def play(self, outside: list[Tensor], images: int) -> None:
        """Make the calls; `outside` has a tensor for every slot of its own."""
        arena = torch.empty(self.whole * images, **FLOATS)
        addresses = [0, arena.data_ptr(), *[t.data_ptr() for t in outside]]
        bases = (ctypes.c_void_p * len(self.slots))(*addresses)
        scales = (ctypes.c_int64 * len(self.slots))(*[images if s else 1 for s in self.slots])
        scales[WHOLE] = images
        for group in self.groups:
            at_once = min(group.at_once, images)
            local = torch.empty(group.local * at_once, **FLOATS)
            bases[LOCAL], scales[LOCAL] = local.data_ptr(), at_once
            failed = library().gf_play(
                group.words, len(group.words), bases, scales, images, at_once,
                torch.get_num_threads(),
            )  # fmt: skip
            if failed:
                raise MemoryError("no memory for a kernel's scratch space")


def _aligned(floats: int) -> int:
    return -(-floats // ALIGNED) * ALIGNED


def _portions(calls: list[Call]) -> None:
    """How many images each call takes at once: never fewer than the calls before it."""
    least = ALL
    for call in reversed(calls):
        floats = sum({m: m.size for m in call.maps()}.values())
        least = min(least, max(1, AT_ONCE // (4 * floats)))
        call.at_once = least


def _grouped(calls: list[Call]) -> list[Group]:
    groups: list[Group] = []
    for call in calls:
        if not groups or groups[-1].at_once != call.at_once:
            groups.append(Group(call.at_once, []))
        groups[-1].calls.append(call)
    return groups


def _arranged(lives: dict[Map, tuple[int, int]], slot: int) -> int:
    """Give maps places in an arena, where those whose lives overlap do not.

    The largest are placed first, each as low as it can be. Returns the arena's floats an image.
    """
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first and last of its life
    for m, (first, last) in sorted(lives.items(), key=lambda item: -item[0].size):
        begin = 0
        for low, high, since, until in sorted(placed):
            if since <= last and first <= until and low < begin + _aligned(m.size):
                begin = max(begin, high)
        placed.append((begin, begin + _aligned(m.size), first, last))
        m.spot = Spot(slot, begin, m.size if slot == WHOLE else 0)
    return max((high for _, high, _, _ in placed), default=0)


def _words(calls: list[Call]) -> ctypes.Array:
    words: list[int] = []
    for call in calls:
        spots = [NOWHERE if p is None else p.spot if isinstance(p, Map) else p for p in call.places]
        own = [word for spot in spots for word in spot]
        own += [n if isinstance(n, int) else _bits(n) for n in call.numbers]
        words += [CODES[call.kernel], 2 + len(own), *own]
    return (ctypes.c_int64 * len(words))(*words)


def _bits(value: float) -> int:
    """The bits of a float32, as cpu_tape.c's `real` reads them."""
    return struct.unpack("<i", struct.pack("<f", value))[0]

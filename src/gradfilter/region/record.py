"""Steps onto tapes: what a run of convolutions does in either direction, as calls of the C kernels.

A tape is written from where a pass has come to, as far as it can be; played, it does what the steps
would do one by one (`Step.forward`, `Step.backward`), which remain for all other steps and wherever
the C kernels cannot run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradfilter.kernels.cpu_library import FLOATS
from gradfilter.region.kept import Block
from gradfilter.region.tape import Shape, Spot, Tape

SHORTEST = 2  # steps that are worth a tape
Find = Callable[[object], Tensor]  # the tensor of a slot, from the pass that plays the tape


class Recorded:
    """A tape, the tensors of its slots, and the steps it does: all before or after `end`."""

    def __init__(self, c):
        self.c = c  # the pass it is written in, let go when that is done
        self.tape = Tape()
        self.slots: dict[object, int] = {}
        self.finds: list[Find] = []
        self.parameters: list[int] = []  # the positions of those it reads
        self.by_taps: list[int] = []  # and of those it reads in channels-last order
        self.blocks: set[Block] = set()  # of kept maps, that must be there
        self.steps = 0

    def slot(self, name: object, find: Find, several: bool = False) -> int:
        if name not in self.slots:
            self.slots[name] = self.tape.slot(several)
            self.finds.append(find)
        return self.slots[name]

    def block(self, block: Block) -> int:
        return self.slot(block, lambda c: c.saved.blocks[block], several=True)

    def parameter(self, module: nn.Module, name: str) -> Spot:
        position = self.c.runner.position[id(module), name]
        self.parameters.append(position)
        return Spot(self.slot(("parameter", position), lambda c: c.tensors[position]))

    def taps(self, module: nn.Module) -> Spot:
        """The weight of a convolution, [O, kh, kw, C] in memory; a copy where it is not."""
        position = self.c.runner.position[id(module), "weight"]
        self.by_taps.append(position)
        return Spot(self.slot(("taps", position), lambda c: channels_last(c.tensors[position])))

    def constant(self, name: object, t: Tensor) -> Spot:
        return Spot(self.slot(name, lambda c: t))

    def finish(self, in_turns: bool) -> None:
        self.tape.finish(in_turns)
        del self.c

    def readable(self, c) -> bool:
        """Whether the kernels can read the parameters, and what was kept lies where it did."""
        parameters = [c.tensors[position] for position in self.parameters]
        by_taps = [c.tensors[position] for position in self.by_taps]
        return (
            all([plain(t) and t.is_contiguous() for t in parameters])
            and all([plain(t) for t in by_taps])
            and self.blocks <= c.saved.blocks.keys()
        )

    def run(self, c) -> list[Tensor]:
        """Play the tape; the tensors of the slots."""
        tensors = [find(c) for find in self.finds]
        self.tape.play(tensors, c.images)
        return tensors


def plain(t: Tensor) -> bool:
    return t.dtype is torch.float32 and t.is_cpu


def light(weight: Tensor) -> bool:
    """Of so few channels, as an image has, and so few taps that it stays in the cache."""
    return weight.shape[1] <= 4 and weight.numel() <= 8192


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def new(images: int, shape: Shape) -> Tensor:
    c, h, w = shape
    return torch.empty_strided((images, c, h, w), (c * h * w, 1, w * c, c), **FLOATS)

"""What a forward pass keeps for the backward pass.

A tape keeps many small maps. As tensors of their own they would take longer to make, to save and to
find again than to compute: they lie together in a few blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradfilter.kernels.cpu_library import FLOATS
from gradfilter.region.tape import ALIGNED, Map, Shape

Key = tuple[int, str]  # a value, and what is kept of it
# Floats of one image in a block, unless a single map has more. In larger ones glibc's heap would
# have to ask the system for memory at every step, which then is filled with zeros first.
LARGEST = 1 << 18


@dataclass(eq=False)
class Block:
    """Maps in one piece of memory, each with all its images: where each begins, and its shape."""

    size: int = 0  # floats of an image
    places: dict[Key, tuple[int, Shape]] = field(default_factory=dict)

    def add(self, key: Key, m: Map) -> None:
        m.offset, self.places[key] = self.size, (self.size, m.shape)
        self.size += m.size

    def new(self, images: int) -> Tensor:
        return torch.empty(self.size * images, **FLOATS)

    def shares(self) -> dict[Key, float]:
        """What part of the block each map takes."""
        sizes = {key: c * h * w for key, (_, (c, h, w)) in self.places.items()}
        return {key: size / self.size for key, size in sizes.items()}

    def view(self, memory: Tensor, key: Key) -> Tensor:
        """One of the maps, [N, C, H, W] in channels-last order."""
        begin, (c, h, w) = self.places[key]
        images = len(memory) // self.size
        shape, strides = (images, c, h, w), (c * h * w, 1, w * c, c)
        return memory.as_strided(shape, strides, begin * images)


def blocks_of(maps: dict[Key, Map]) -> list[Block]:
    """Blocks with a place for each of these maps; those that fill up vectors come first."""
    blocks = [Block()]
    for key, m in sorted(maps.items(), key=lambda item: item[1].size % ALIGNED != 0):
        if blocks[-1].places and blocks[-1].size + m.size > LARGEST:
            blocks.append(Block())
        blocks[-1].add(key, m)
    return [block for block in blocks if block.places]


class Kept:
    """Tensors by value and name, some of them in blocks."""

    def __init__(self, tensors: dict[Key, Tensor], blocks: dict[Block, Tensor]):
        self.tensors, self.blocks = tensors, blocks

    def __setitem__(self, key: Key, x: Tensor) -> None:
        self.tensors[key] = x

    def __getitem__(self, key: Key) -> Tensor:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: Key) -> Tensor | None:
        found = self.tensors.get(key)
        if found is None and (block := self.block_of(key)) is not None:
            found = block.view(self.blocks[block], key)
        return found

    def block_of(self, key: Key) -> Block | None:
        """The block that a map lies in."""
        return next((block for block in self.blocks if key in block.places), None)

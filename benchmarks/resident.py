"""Pictures as a trainer's loader would show them, held on the device.

What a picture looks like in an epoch follows from the seed alone, so it is the same for every
method and network of one image size: cut once, it serves all their runs.
"""

from __future__ import annotations

from torch import Tensor

from gradfilter.recipes.datasets import Pictures
from gradfilter.recipes.loading import Batch, Key, loader, order, per_epoch
from gradfilter.recipes.trainer import Trainer

CHUNK = 64  # pictures that a loading process hands over at once


class Resident:
    """All epochs of the training pictures, and the test pictures."""

    def __init__(self, trainer: Trainer, train: Pictures, test: Pictures, epochs: int):
        self.seed, self.count = trainer.settings.seed, len(train)
        keys = [(epoch, i) for epoch in range(epochs) for i in range(len(train))]
        self.images, self.targets = _shown(trainer, train, keys, training=True)
        self.test = _shown(trainer, test, [(0, i) for i in range(len(test))], training=False)

    def batch(self, number: int, size: int) -> Batch:
        """The batch of a step."""
        epoch, within = divmod(number, per_epoch(self.count, size))
        places = order(self.count, self.seed, epoch)[within * size : (within + 1) * size]
        places = (places + epoch * self.count).to(self.images.device)
        return (self.images[places],), self.targets[places]

    def tests(self, size: int) -> list[Batch]:
        """The test pictures in their order, in batches."""
        images, targets = self.test
        pairs = zip(images.split(size), targets.split(size), strict=True)
        return [((some,), target) for some, target in pairs]


def _shown(
    trainer: Trainer, pictures: Pictures, keys: list[Key], training: bool
) -> tuple[Tensor, Tensor]:
    """The pictures and targets of these keys, on the device."""
    dataset = trainer.changed(pictures, training)
    chunks = [keys[i : i + CHUNK] for i in range(0, len(keys), CHUNK)]
    images, targets, place = None, None, 0
    for batch in loader(dataset, chunks, trainer.world, trainer.settings.workers):
        (some,), target = trainer.here(batch)
        if images is None:
            images = some.new_empty(len(keys), *some.shape[1:])
            targets = target.new_empty(len(keys), *target.shape[1:])
        images[place : place + len(some)], targets[place : place + len(some)] = some, target
        place += len(some)
    return images, targets

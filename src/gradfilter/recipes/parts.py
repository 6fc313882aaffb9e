"""The part of a data set that a run trains on and tests on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradfilter.recipes.datasets import Data
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.split import SPLITS

Places = dict[str, list[int]]  # of the pictures chosen, to train on and to test on


def choose(settings: Settings, data: Data) -> tuple[Data, Places | None]:
    """The data of the part that is asked for, and which pictures of the whole they are.

    A part is tested on its own classes, unless the settings ask for all.
    """
    if settings.split is None:
        return data, None
    labels = data.train.labels
    if labels is None:
        if settings.split != "iid":
            raise ValueError(
                f"--split {settings.split} goes by classes, and pictures with masks have none; "
                "--split iid works"
            )
        labels = torch.zeros(len(data.train), dtype=torch.int64)
    extra = {"non-iid": {"per_part": settings.per_part}, "dirichlet": {"alpha": settings.alpha}}
    parts = SPLITS[settings.split](
        labels, settings.parts, seed=settings.split_seed, **extra.get(settings.split, {})
    )
    train = parts[settings.part]
    test = _tested(settings, data, labels[train])
    chosen = replace(data, train=data.train.subset(train), test=data.test.subset(test))
    return chosen, {"train": train.tolist(), "test": test.tolist()}


def _tested(settings: Settings, data: Data, labels: Tensor) -> Tensor:
    """The test pictures of these classes, or all of them."""
    if settings.test == "all" or data.test.labels is None:
        return torch.arange(len(data.test))
    own = torch.isin(data.test.labels, labels.unique()).nonzero().flatten()
    if not len(own):
        raise ValueError(f"part {settings.part} has no class with test pictures: --test all")
    return own

"""Data sets by name or folder: what they are called, where they lie, how they are read."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

from gradfilter.recipes.datasets.decode import BadPicture
from gradfilter.recipes.datasets.pictures import Data, Pictures

__all__ = ["BadPicture", "Data", "Pictures", "names", "open_data"]


def open_data(
    where: str,
    *,
    root: Path | None = None,
    download: bool = True,
    cache: bool = False,
    fewest: int = 2,
) -> Data:
    """The data set of that name, or in that folder.

    A name of `names()` is looked for under `root` (by default in the user's cache folder) and
    fetched there if `download` and it can be. Anything else is a folder; write `./cifar10` for a
    folder that has the name of a data set. With `cache` all pictures are decoded at once and kept
    in memory, photographs with a short side of at most 256 pixels. A folder has the `fewest`
    classes or more.
    """
    from gradfilter.recipes.datasets import named

    if where in named.SOURCES:
        data = named.open_named(where, root, download)
    elif (path := Path(where).expanduser()).is_dir():
        data = open_folder(path, fewest)
    else:
        near = difflib.get_close_matches(str(where), named.SOURCES, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"{where!r} is no folder and no data set; {hint}names: {', '.join(named.SOURCES)}"
        )
    if cache:
        data = replace(data, train=data.train.cached(), test=data.test.cached())
    return data


def open_folder(path: Path, fewest: int = 2) -> Data:
    """The data set in that folder, its layout recognised by its files."""
    from gradfilter.recipes.datasets import compact, cub, folder

    for layout in (compact.cifar10, compact.pets, compact.camvid, cub.cub200):
        if data := layout(path):
            return data
    return folder.image_folder(path, fewest)


def names() -> list[str]:
    """The data sets that `open_data` knows by name."""
    from gradfilter.recipes.datasets import named

    return list(named.SOURCES)

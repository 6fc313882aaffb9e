"""Caltech-UCSD Birds-200-2011, which torchvision does not know."""

from __future__ import annotations

from pathlib import Path

from gradfilter.recipes.datasets.pictures import Data, FilePictures

FOLDER = "CUB_200_2011"
URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz"
MD5 = "97eceeb196236b17998738112f37df78"
LISTS = ("images", "image_class_labels", "train_test_split", "classes")


def cub200(path: Path) -> Data | None:
    """The birds in their own layout, `path` being `CUB_200_2011` or the folder that holds it.

    Four lists say what is where: number and value a line, classes from 1.
    """
    here = next((p for p in (path, path / FOLDER) if (p / "train_test_split.txt").is_file()), None)
    if here is None:
        return None
    images, labels, trains, birds = (numbered(here / f"{name}.txt") for name in LISTS)
    if not images.keys() == labels.keys() == trains.keys():
        raise ValueError(f"{here}: its lists number different pictures")
    # 001.Black_footed_Albatross
    classes = tuple(name.partition(".")[2].replace("_", " ") for name in birds.values())
    train, test = (
        FilePictures(
            here / "images",
            [images[i] for i, side in trains.items() if side == wanted],
            [int(labels[i]) - 1 for i, side in trains.items() if side == wanted],
        )
        for wanted in ("1", "0")
    )
    return Data("cub200", "classification", classes, train, test)


def fetch(root: Path, download: bool) -> Data:
    """Download and unpack the birds below `root`."""
    from torchvision.datasets.utils import download_and_extract_archive

    if not download:
        raise RuntimeError("not found")
    download_and_extract_archive(URL, str(root), md5=MD5)
    return cub200(root)


def numbered(path: Path) -> dict[str, str]:
    """{number: value} of a list with `number value` a line, in its order."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return dict(line.split(maxsplit=1) for line in lines if line.strip())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: should have 'number value' a line ({error})") from error

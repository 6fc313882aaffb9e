"""Data sets by name: what torchvision reads and can download, and forms that it does not know."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import URLError

import torch

from gradfilter.recipes.datasets import compact, cub, digits, folder
from gradfilter.recipes.datasets.pictures import (
    Data,
    FilePictures,
    MaskedPictures,
    TensorPictures,
)


@dataclass(frozen=True)
class Source:
    """Where a data set comes from.

    `local` reads a form of it that torchvision does not know, from a folder, or gives None;
    `fetch` reads what lies under a root as torchvision keeps it, or downloads it there. It fails
    with an OSError or a RuntimeError. `needs` tells the user what to put under the root.
    """

    needs: str
    fetch: Callable[[Path, bool], Data] | None = None
    local: Callable[[Path], Data | None] = lambda path: None


def open_named(name: str, root: Path | None, download: bool) -> Data:
    """The data set of that name: a local form in `root` or `root`/`name`, or torchvision's."""
    source = SOURCES[name]
    root = cache_folder() if root is None else Path(root).expanduser()
    for path in (root, root / name):
        if path.is_dir() and (data := source.local(path)):
            return replace(data, name=name)
    try:
        if source.fetch is None:
            raise RuntimeError("not found, and not to be had by download")
        return source.fetch(root, download)
    except (OSError, RuntimeError) as error:
        failed = isinstance(error, URLError)
        why = f"the download failed ({error.reason})" if failed else first_line(error)
        raise ValueError(f"{name}: {why}; put {source.needs} under {root}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def cache_folder() -> Path:
    """Where data sets are kept when no root is given."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gradfilter" / "data"


def present_or_downloaded(kind: Callable, root: Path, download: bool, **options):
    """torchvision's data set as it lies under `root`; downloaded only where it is not there.

    Asking for a download at once would unpack some archives again at every start.
    """
    try:
        return kind(str(root), download=False, **options)
    except (OSError, RuntimeError):
        if not download:
            raise
    root.mkdir(parents=True, exist_ok=True)
    return kind(str(root), download=True, **options)


def cifar(name: str, kind: str) -> Callable[[Path, bool], Data]:
    def fetch(root: Path, download: bool) -> Data:
        from torchvision import datasets

        parts = {}
        for part in ("train", "test"):
            stored = present_or_downloaded(
                getattr(datasets, kind), root, download, train=part == "train"
            )
            images = torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous()
            parts[part] = TensorPictures(f"{name} {part}", images, torch.tensor(stored.targets))
        return Data(name, "classification", tuple(stored.classes), **parts)

    return fetch


def flowers102(root: Path, download: bool) -> Data:
    """Trains on the official training and validation pictures, 2,040, as is usual."""
    from torchvision.datasets import Flowers102

    train, val, test = (
        labelled(root, present_or_downloaded(Flowers102, root, download, split=part))
        for part in ("train", "val", "test")
    )
    both = FilePictures(root, train.names + val.names, torch.cat([train.labels, val.labels]))
    classes = getattr(Flowers102, "classes", range(1, 103))  # older torchvisions know no names
    return Data("flowers102", "classification", tuple(map(str, classes)), both, test)


def flowers102_folder(path: Path) -> Data | None:
    """Class folders below `train/`, with the flowers' names beside them."""
    return folder.image_folder(path) if (path / "cat_to_name.json").is_file() else None


def oxford_pets(root: Path, download: bool) -> Data:
    from torchvision.datasets import OxfordIIITPet

    stored = [
        present_or_downloaded(OxfordIIITPet, root, download, split=part)
        for part in ("trainval", "test")
    ]
    train, test = (labelled(root, part, files="_images") for part in stored)
    return Data("oxford-pets", "classification", tuple(stored[0].classes), train, test)


def pets_trimaps(root: Path, download: bool) -> Data:
    from torchvision.datasets import OxfordIIITPet

    train, test = (
        masked(root, part._images, part._segs, compact.TRIMAP)
        for split in ("trainval", "test")
        for part in [present_or_downloaded(OxfordIIITPet, root, download, split=split)]
    )
    return Data("pets-trimaps", "segmentation", compact.TRIMAP_CLASSES, train, test)


def food101(root: Path, download: bool) -> Data:
    from torchvision.datasets import Food101

    stored = [
        present_or_downloaded(Food101, root, download, split=part) for part in ("train", "test")
    ]
    classes = tuple(name.replace("_", " ") for name in stored[0].classes)
    train, test = (labelled(root, part) for part in stored)
    return Data("food101", "classification", classes, train, test)


def imagenet(root: Path, download: bool) -> Data:
    """torchvision unpacks the archives, which nobody may hand on; then it is an image folder."""
    from torchvision.datasets import ImageNet

    for split in ("train", "val"):
        ImageNet(str(root), split=split)
    return imagenet_folder(root)


def imagenet_folder(path: Path) -> Data | None:
    """`train/` and `val/` with a folder per class, n01440764 and so on."""
    from torchvision.models import MobileNet_V2_Weights

    if not ((path / "train").is_dir() and (path / "val").is_dir()):
        return None
    data = folder.image_folder(path)
    names = MobileNet_V2_Weights.IMAGENET1K_V1.meta["categories"]
    classes = tuple(names) if len(names) == len(data.classes) else data.classes
    return replace(data, name="imagenet", classes=classes)


def voc(root: Path, download: bool) -> Data:
    """Pascal VOC 2012: trains on its 1,464 training pictures, tests on its validation part."""
    from torchvision.datasets import VOCSegmentation

    values = {value: value for value in (*range(len(VOC)), 255)}
    train, test = (
        masked(root, part.images, part.masks, values)
        for split in ("train", "val")
        for part in [present_or_downloaded(VOCSegmentation, root, download, image_set=split)]
    )
    return Data("voc", "segmentation", VOC, train, test, ignore=255)


def cityscapes(root: Path, download: bool) -> Data:
    """The 19 classes that count, from the fine annotation; tests on the validation part."""
    from torchvision.datasets import Cityscapes

    counting = [kind for kind in Cityscapes.classes if 0 <= kind.train_id < 255]
    values = {kind.id: kind.train_id for kind in Cityscapes.classes if kind.id >= 0}
    train, test = (
        masked(root, part.images, [files[0] for files in part.targets], values)
        for split in ("train", "val")
        for part in [Cityscapes(str(root), split=split, target_type="semantic")]
    )
    names = tuple(kind.name for kind in sorted(counting, key=lambda kind: kind.train_id))
    return Data("cityscapes", "segmentation", names, train, test, ignore=255)


def labelled(root: Path, stored, files: str = "_image_files") -> FilePictures:
    """The files and classes that a data set of torchvision lists."""
    names = [os.path.relpath(path, root) for path in getattr(stored, files)]
    return FilePictures(root, names, stored._labels)


def masked(root: Path, images, masks, values: dict[int, int]) -> MaskedPictures:
    """Pictures with their masks, in the order of their names."""
    pairs = sorted(
        (os.path.relpath(image, root), os.path.relpath(mask, root))
        for image, mask in zip(images, masks, strict=True)
    )
    return MaskedPictures(root, [image for image, _ in pairs], [mask for _, mask in pairs], values)


VOC = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "dining table",
    "dog",
    "horse",
    "motorbike",
    "person",
    "potted plant",
    "sheep",
    "sofa",
    "train",
    "tv monitor",
)

PETS = "oxford-iiit-pet/images/ and oxford-iiit-pet/annotations/"

SOURCES = {
    "cifar10": Source("cifar-10-batches-py/", cifar("cifar10", "CIFAR10"), compact.cifar10),
    "cifar100": Source("cifar-100-python/", cifar("cifar100", "CIFAR100")),
    "flowers102": Source(
        "flowers-102/jpg/, flowers-102/imagelabels.mat and flowers-102/setid.mat",
        flowers102,
        flowers102_folder,
    ),
    "oxford-pets": Source(PETS, oxford_pets, compact.pets),
    "food101": Source("food-101/images/ and food-101/meta/", food101),
    "cub200": Source(f"{cub.FOLDER}/", cub.fetch, cub.cub200),
    "imagenet": Source(
        "train/ and val/ with a folder per class, or ILSVRC2012_devkit_t12.tar.gz, "
        "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar",
        imagenet,
        imagenet_folder,
    ),
    "voc": Source("VOCdevkit/VOC2012/", voc),
    "cityscapes": Source("leftImg8bit/ and gtFine/", cityscapes),
    "camvid": Source(
        "train/ with masks in trainannot/ and test/ with masks in testannot/", local=compact.camvid
    ),
    "pets-trimaps": Source(PETS, pets_trimaps, compact.pet_trimaps),
    "digits": Source("nothing", lambda root, download: digits.open_digits()),
}

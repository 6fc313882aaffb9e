"""Data sets by name, on small trees of the layouts that torchvision reads."""

import json
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
from PIL import Image  # noqa: E402
from torchvision import datasets as tv  # noqa: E402

from gradfilter.recipes.datasets import cub, named, names, open_data  # noqa: E402


def save(path, grey=0, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, grey).save(path)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_unknown_names_get_near_ones_and_the_list():
    with pytest.raises(ValueError, match="did you mean cifar10") as caught:
        open_data("cifar-10")
    assert all(name in str(caught.value) for name in names())
    with pytest.raises(ValueError, match="'nowhere/at/all' is no folder and no data set; names"):
        open_data("nowhere/at/all")


def test_digits_need_no_download(tmp_path):
    pytest.importorskip("sklearn")
    data = open_data("digits", root=tmp_path, download=False)
    assert (len(data.train), len(data.test), len(data.classes)) == (1437, 360, 10)
    image, label = data.test[0]
    assert image.shape == (3, 8, 8) and image.dtype == torch.uint8 and label == 6
    assert data.augment == "light"
    assert data.train.fingerprint() != data.test.fingerprint()


OFFLINE = [name for name in named.SOURCES if name != "digits"]
DOWNLOADED = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "flowers102": "Flowers102",
    "oxford-pets": "OxfordIIITPet",
    "food101": "Food101",
    "voc": "VOCSegmentation",
    "pets-trimaps": "OxfordIIITPet",
}


@pytest.mark.parametrize("name", OFFLINE)
def test_what_is_not_there_says_what_to_put_where(tmp_path, name):
    root = tmp_path / "root"
    with pytest.raises(ValueError, match="put ") as caught:
        open_data(name, root=root, download=False)
    assert str(caught.value).startswith(f"{name}: ") and str(caught.value).endswith(str(root))
    assert named.SOURCES[name].needs in str(caught.value)
    assert not root.exists()


@pytest.mark.parametrize("name", [*DOWNLOADED, "cub200"])
def test_a_failed_download_says_what_to_put_where(tmp_path, name, monkeypatch):
    asked = []

    def offline(*args, **options):
        asked.append(args)
        raise URLError("no network")

    for module in ("utils", "cifar", "flowers102", "oxford_iiit_pet", "food101", "voc"):
        for function in ("download_url", "download_and_extract_archive"):
            monkeypatch.setattr(f"torchvision.datasets.{module}.{function}", offline, raising=False)
    with pytest.raises(
        ValueError, match=rf"{name}: the download failed \(no network\); put "
    ) as caught:
        open_data(name, root=tmp_path)
    assert named.SOURCES[name].needs in str(caught.value)
    assert len(asked) == 1


@pytest.mark.parametrize("name, kind", DOWNLOADED.items())
def test_downloads_happen_where_nothing_lies(tmp_path, name, kind, monkeypatch):
    calls = []

    class Absent:
        def __init__(self, root, download, **options):
            calls.append((root, download))
            raise RuntimeError("Dataset not found.\nYou can use download=True to download it")

    monkeypatch.setattr(tv, kind, Absent)
    with pytest.raises(ValueError, match=f"{name}: Dataset not found; put"):
        open_data(name, root=tmp_path / "new")
    assert calls == [(str(tmp_path / "new"), False), (str(tmp_path / "new"), True)]
    assert (tmp_path / "new").is_dir()


def test_the_cache_folder_is_the_default_root(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=f"under {tmp_path}/gradfilter/data"):
        open_data("camvid")


@pytest.mark.parametrize("kind, key, files", [("10", "labels", 6), ("100", "fine_labels", 2)])
def test_cifar(tmp_path, monkeypatch, kind, key, files):
    dataset = getattr(tv, f"CIFAR{kind}")
    listed = dataset.train_list + dataset.test_list
    assert len(listed) == files
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    folder = tmp_path / dataset.base_folder
    folder.mkdir()
    for name, _ in listed:
        batch = {"data": images.reshape(3, -1), key: [0, 1, 2]}
        (folder / name).write_bytes(pickle.dumps(batch))
    meta = {dataset.meta["key"]: [f"thing {i}" for i in range(int(kind))]}
    (folder / dataset.meta["filename"]).write_bytes(pickle.dumps(meta))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a: True)

    data = open_data(f"cifar{kind}", root=tmp_path)
    assert len(data.train) == 3 * (files - 1) and len(data.test) == 3
    assert len(data.classes) == int(kind) and data.classes[2] == "thing 2"
    image, label = data.test[1]
    assert image.numpy().tolist() == images[1].tolist() and label == 1
    assert data.test.name(1) == f"cifar{kind} test 1"


def test_flowers102(tmp_path, monkeypatch):
    from scipy.io import savemat

    base = tmp_path / "flowers-102"
    for i in range(1, 7):
        save(base / "jpg" / f"image_{i:05d}.jpg", 40 * i)
    savemat(base / "imagelabels.mat", {"labels": [[1, 102, 3, 4, 5, 6]]})
    ids = {"trnid": [[5, 2]], "valid": [[1, 3]], "tstid": [[4, 6]]}
    savemat(base / "setid.mat", ids)
    monkeypatch.setattr(tv.Flowers102, "_check_integrity", lambda self: True)

    data = open_data("flowers102", root=tmp_path)
    assert data.train.labels.tolist() == [4, 101, 0, 2] and data.test.labels.tolist() == [3, 5]
    assert data.train.name(1) == str(base / "jpg" / "image_00002.jpg")
    assert abs(int(data.train[1][0][0, 0, 0]) - 80) < 3
    assert len(data.classes) == 102


@pytest.fixture
def pets(tmp_path):
    base = tmp_path / "oxford-iiit-pet"
    lists = {"trainval": [("pug_1", 2), ("Sphynx_7", 1)], "test": [("Sphynx_3", 1)]}
    for part, animals in lists.items():
        lines = [f"{name} {number} 1 1\n" for name, number in animals]
        write(base / "annotations" / f"{part}.txt", "".join(lines))
        for name, number in animals:
            save(base / "images" / f"{name}.jpg", 100)
            save(base / "annotations" / "trimaps" / f"{name}.png", number)
    return tmp_path


def test_oxford_pets(pets):
    data = open_data("oxford-pets", root=pets)
    assert data.classes == ("Sphynx", "Pug")
    assert data.train.labels.tolist() == [1, 0] and data.test.labels.tolist() == [0]
    assert data.train.name(0).endswith("images/pug_1.jpg")
    assert data.train[0][0].shape == (3, 4, 6)


def test_pets_trimaps(pets):
    data = open_data("pets-trimaps", root=pets)
    assert data.task == "segmentation" and data.train.labels is None
    values = {data.train.name(i).split("/")[-1]: data.train[i][1].unique().tolist() for i in (0, 1)}
    assert values == {"pug_1.jpg": [1], "Sphynx_7.jpg": [0]}


def test_food101(tmp_path):
    base = tmp_path / "food-101"
    lists = {"train": {"waffles": ["waffles/1"], "apple_pie": ["apple_pie/2"]}}
    lists["test"] = {"apple_pie": ["apple_pie/3"], "waffles": []}
    for part, files in lists.items():
        write(base / "meta" / f"{part}.json", json.dumps(files))
        for name in sum(files.values(), []):
            save(base / "images" / f"{name}.jpg")
    data = open_data("food101", root=tmp_path)
    assert data.classes == ("apple pie", "waffles")
    assert data.train.labels.tolist() == [1, 0]
    assert data.test.name(0).endswith("images/apple_pie/3.jpg")
    assert data.train[0][0].shape == (3, 4, 6)


@pytest.fixture
def birds(tmp_path):
    base = tmp_path / "CUB_200_2011"
    files = ["001.Laysan_Albatross/a.jpg", "001.Laysan_Albatross/b.jpg", "002.Crow/c.jpg"]
    for file in files:
        save(base / "images" / file)
    write(base / "images.txt", "".join(f"{i} {file}\n" for i, file in enumerate(files, 1)))
    write(base / "image_class_labels.txt", "1 1\n2 1\n3 2\n")
    write(base / "train_test_split.txt", "1 1\n2 0\n3 1\n")
    write(base / "classes.txt", "1 001.Laysan_Albatross\n2 002.Crow\n")
    return tmp_path


@pytest.mark.parametrize("where", ["cub200", "{}", "{}/CUB_200_2011"])
def test_cub200(birds, where):
    data = open_data(where.format(birds), root=birds)
    assert data.classes == ("Laysan Albatross", "Crow")
    assert data.train.labels.tolist() == [0, 1] and data.test.labels.tolist() == [0]
    assert data.test.name(0).endswith("images/001.Laysan_Albatross/b.jpg")
    assert data.test[0][0].shape == (3, 4, 6)


def test_cub200_with_mistakes(birds):
    base = birds / "CUB_200_2011"
    write(base / "image_class_labels.txt", "1 1\n2 1\n3 5\n")
    with pytest.raises(ValueError, match=r"c\.jpg: class 4 is outside 0\.\.1"):
        open_data("cub200", root=birds)
    write(base / "image_class_labels.txt", "1 1\n2 1\n")
    with pytest.raises(ValueError, match="its lists number different pictures"):
        open_data("cub200", root=birds)
    (base / "classes.txt").unlink()
    with pytest.raises(ValueError, match="classes.txt"):
        open_data("cub200", root=birds)


def test_cub200_is_downloaded_and_unpacked(birds, tmp_path, monkeypatch):
    def unpack(url, root, md5):
        assert (url, md5) == (cub.URL, cub.MD5)
        (birds / "CUB_200_2011").rename(f"{root}/CUB_200_2011")

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", unpack)
    root = tmp_path / "elsewhere"
    root.mkdir()
    assert len(open_data("cub200", root=root).train) == 2


def test_imagenet_folders(tmp_path):
    for wnid in ("n01440764", "n01443537"):
        save(tmp_path / "train" / wnid / "1.JPEG")
        save(tmp_path / "val" / wnid / "2.JPEG")
    data = open_data("imagenet", root=tmp_path)
    assert data.name == "imagenet" and data.classes == ("n01440764", "n01443537")
    for i in range(998):
        save(tmp_path / "train" / f"n1{i:07d}" / "1.JPEG", size=(1, 1))
    assert open_data("imagenet", root=tmp_path).classes[:2] == ("tench", "goldfish")


def test_imagenet_archives_are_unpacked_by_torchvision(tmp_path, monkeypatch):
    def unpack(root, split):
        for wnid in ("n01440764", "n01443537"):
            save(tmp_path / split / wnid / "1.JPEG")

    monkeypatch.setattr(tv, "ImageNet", unpack)
    assert len(open_data("imagenet", root=tmp_path).test) == 2


def test_voc(tmp_path):
    base = tmp_path / "VOCdevkit" / "VOC2012"
    for part, files in {"train": ["b", "a"], "val": ["c"]}.items():
        write(base / "ImageSets" / "Segmentation" / f"{part}.txt", "\n".join(files) + "\n")
        for name in files:
            save(base / "JPEGImages" / f"{name}.jpg")
            mask = Image.new("P", (6, 4), 255)
            mask.putpalette([50, 60, 70] * 256)
            mask.putpixel((0, 0), 20)
            (base / "SegmentationClass").mkdir(exist_ok=True)
            mask.save(base / "SegmentationClass" / f"{name}.png")
    data = open_data("voc", root=tmp_path)
    assert (len(data.classes), data.ignore, len(data.train), len(data.test)) == (21, 255, 2, 1)
    assert data.classes[20] == "tv monitor"
    assert data.train[0][1].unique().tolist() == [20, 255]
    assert data.train.name(0).endswith("JPEGImages/a.jpg")


def test_cityscapes(tmp_path):
    names = {"train": ["ulm_2", "aachen_1"], "val": ["bonn_1"]}
    for part, files in names.items():
        for name in files:
            city = name.partition("_")[0]
            save(tmp_path / "leftImg8bit" / part / city / f"{name}_leftImg8bit.png")
            label = {"ulm_2": 33, "aachen_1": 7, "bonn_1": 0}[name]
            save(tmp_path / "gtFine" / part / city / f"{name}_gtFine_labelIds.png", label)
    data = open_data("cityscapes", root=tmp_path)
    assert (data.classes[0], data.classes[18], data.ignore) == ("road", "bicycle", 255)
    assert len(data.classes) == 19
    assert [data.train[i][1].unique().tolist() for i in (0, 1)] == [[0], [18]]
    assert data.test[0][1].unique().tolist() == [255]


@pytest.mark.parametrize("below", [".", "camvid"])
def test_local_forms_lie_in_the_root_or_under_their_name(tmp_path, below):
    for part in ("train", "test"):
        save(tmp_path / below / part / "1.png")
        save(tmp_path / below / f"{part}annot" / "1.png", 3)
    data = open_data("camvid", root=tmp_path, download=False)
    assert data.classes[3] == "road" and data.test[0][1].unique().tolist() == [3]


def test_flowers_in_class_folders_with_their_names(tmp_path):
    for part in ("train", "test"):
        for kind in ("001", "002"):
            save(tmp_path / part / kind / "1.jpg")
    write(tmp_path / "cat_to_name.json", '{"1": "pink primrose", "2": "orchid"}')
    data = open_data("flowers102", root=tmp_path, download=False)
    assert (data.name, data.classes) == ("flowers102", ("pink primrose", "orchid"))

"""Data sets that are no class folders: mosaics, lists of files, pictures with masks."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
from painted import save, save_mask  # noqa: E402
from PIL import Image  # noqa: E402

from gradfilter.recipes.datasets import BadPicture, open_data  # noqa: E402


def write_mosaic(path, tiles):
    """Tiles [N, side, side, 3] in rows of 100."""
    side = tiles.shape[1]
    rows = -(-len(tiles) // 100)
    padded = np.zeros((rows * 100, side, side, 3), np.uint8)
    padded[: len(tiles)] = tiles
    mosaic = padded.reshape(rows, 100, side, side, 3).transpose(0, 2, 1, 3, 4)
    Image.fromarray(mosaic.reshape(rows * side, 100 * side, 3)).save(path, lossless=True)


@pytest.fixture
def mosaics(tmp_path):
    random = np.random.default_rng(0)
    tiles = random.integers(0, 256, (150, 4, 4, 3), dtype=np.uint8)
    labels = random.integers(0, 10, 150)
    write_mosaic(tmp_path / "train_150.webp", tiles)
    write_mosaic(tmp_path / "test_50.webp", tiles[:50])
    np.savez(tmp_path / "labels.npz", train=labels, test=labels[:50])
    return tmp_path, tiles, labels


def test_mosaics_become_tensors(mosaics):
    path, tiles, labels = mosaics
    data = open_data(str(path))
    assert (data.name, len(data.train), len(data.test)) == ("cifar10", 150, 50)
    assert data.classes[6] == "frog"
    for i in (0, 99, 100, 149):
        image, label = data.train[i]
        assert image.permute(1, 2, 0).numpy().tolist() == tiles[i].tolist() and label == labels[i]
    assert data.train.labels.tolist() == labels.tolist()
    assert data.train.subset(torch.tensor([7, 149])).name(1) == "cifar10 train 149"


def test_mosaics_that_do_not_fit_their_labels(mosaics):
    path, _, labels = mosaics
    np.savez(path / "labels.npz", train=labels, test=np.zeros(101))
    with pytest.raises(ValueError, match="test_50.webp: 400x4 pixels are not 101 tiles"):
        open_data(str(path))
    labels[17] = 10
    np.savez(path / "labels.npz", train=labels, test=labels[:9])
    with pytest.raises(ValueError, match=r"cifar10 train 17: class 10 is outside 0\.\.9"):
        open_data(str(path))
    np.savez(path / "labels.npz", train=labels)
    with pytest.raises(ValueError, match="labels.npz"):
        open_data(str(path))


def test_fingerprints_of_tensors(mosaics):
    path, _, _ = mosaics
    train = open_data(str(path)).train
    first = train.fingerprint()
    assert open_data(str(path)).train.fingerprint() == first
    assert train.subset(torch.arange(149, -1, -1)).fingerprint() != first
    train.labels[3] = (train.labels[3] + 1) % 10
    assert train.fingerprint() != first
    train = open_data(str(path)).train
    train.images[5, 0, 0, 0] += 1
    assert train.fingerprint() != first


@pytest.fixture
def pets(tmp_path):
    lists = {"trainval": [("Bengal_1", 1), ("pug_3", 2), ("Bengal_2", 1)], "test": [("pug_9", 2)]}
    for part, animals in lists.items():
        for name, _ in animals:
            save(tmp_path / part / "images" / f"{name}.jpg")
            save_mask(tmp_path / part / "trimaps" / f"{name}.png", [[1, 2, 3, 3, 2, 2]] * 4)
        lines = [f"{name} {number} 1\n" for name, number in animals]
        (tmp_path / f"{part}.txt").write_text("".join(lines))
    return tmp_path


def test_pets_from_lists(pets):
    data = open_data(str(pets))
    assert (data.name, data.classes) == ("oxford-pets", ("Bengal", "Pug"))
    assert data.train.labels.tolist() == [0, 1, 0] and data.test.labels.tolist() == [1]
    assert data.train.name(1).endswith("trainval/images/pug_3.jpg")
    assert data.train[1][0].shape == (3, 4, 6)


def test_trimaps_from_lists(pets):
    data = open_data("pets-trimaps", root=pets, cache=True)
    assert data.task == "segmentation" and data.classes == ("pet", "background", "border")
    assert data.train.labels is None and len(data.test) == 1
    image, mask = data.train.subset(torch.tensor([2]))[0]
    assert image.shape == (3, 4, 6) and mask.dtype == torch.uint8
    assert mask.tolist() == [[0, 1, 2, 2, 1, 1]] * 4


def test_pet_lists_with_mistakes(pets):
    with (pets / "test.txt").open("a") as file:
        file.write("pug_9 38 2\nBengal_2 1 1\npug_9 2 2\n")
    with pytest.raises(ValueError, match=r"pug_9.jpg: class 37 is outside 0\.\.1"):
        open_data(str(pets))
    (pets / "test.txt").write_text("pug_9\n")
    with pytest.raises(ValueError, match="test.txt: every line should be"):
        open_data(str(pets))


@pytest.fixture
def scenes(tmp_path):
    for part, count in (("train", 3), ("val", 1), ("test", 2)):
        for i in range(count):
            save(tmp_path / part / f"{i}.jpg", (20 * i, 0, 0))
            save_mask(tmp_path / f"{part}annot" / f"{i}.png", [[i, 10, 11, 0, 0, 0]] * 4)
    return tmp_path


def test_scenes_with_masks(scenes):
    data = open_data(str(scenes))
    assert (data.name, len(data.classes), data.ignore) == ("camvid", 11, 11)
    assert (len(data.train), len(data.test)) == (3, 2)
    image, mask = data.train[2]
    assert image.shape == (3, 4, 6) and mask[0].tolist() == [2, 10, 11, 0, 0, 0]
    part = data.train.subset(torch.tensor([2, 0]))
    assert part[0][1][0, 0] == 2 and part[1][1][0, 0] == 0 and part.name(0) == data.train.name(2)
    cached = open_data(str(scenes), cache=True).train.subset(torch.tensor([2, 0]))
    assert torch.equal(cached[0][1], part[0][1]) and torch.equal(cached[1][0], part[1][0])
    assert part.fingerprint() != data.train.subset(torch.tensor([0, 2])).fingerprint()
    first = data.train.fingerprint()
    os.utime(scenes / "trainannot" / "1.png", ns=(5, 5))
    assert data.train.fingerprint() != first


def test_scenes_with_classes_of_their_own(scenes):
    (scenes / "classes.txt").write_text("field\nforest\n")
    data = open_data(str(scenes))
    assert (data.name, data.classes, data.ignore) == (scenes.name, ("field", "forest"), 255)
    with pytest.raises(BadPicture, match=r"trainannot.*label 10 is outside 0\.\.1, 255"):
        data.train[0]


def test_scenes_with_more_classes_than_a_byte_tells(scenes):
    (scenes / "classes.txt").write_text("".join(f"class {i}\n" for i in range(255)))
    with pytest.raises(ValueError, match=r"classes\.txt: 255 classes, and masks have 254"):
        open_data(str(scenes))


def test_scenes_with_mistakes(scenes):
    save_mask(scenes / "trainannot" / "1.png", [[1]])
    with pytest.raises(BadPicture, match=r"1\.png: a mask of 1x1 pixels for a picture of 6x4"):
        open_data(str(scenes)).train[1]
    (scenes / "testannot" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"1\.jpg: has no mask in testannot"):
        open_data(str(scenes))

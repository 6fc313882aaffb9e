"""Pictures from files and tensors: folders, compact forms, decoding, fingerprints."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("torchvision")
from PIL import Image  # noqa: E402

from gradfilter.recipes.datasets import BadPicture, decode, folder, open_data  # noqa: E402
from gradfilter.recipes.datasets import pictures as pictures_module  # noqa: E402

RED = (255, 0, 0)


def save(path, colour=RED, size=(6, 4), **options):
    """A picture of one colour, its right half black."""
    image = Image.new("RGB", size, colour)
    image.paste((0, 0, 0), (size[0] // 2, 0, *size))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def save_mask(path, values, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.fromarray(np.array(values, np.uint8))
    if palette:
        mask.putpalette([7, 70, 170] * 256)
    mask.save(path)


@pytest.fixture
def photos(tmp_path):
    """Two classes, 5 pictures to train on and 3 to test on, and things that are no pictures."""
    for part, count in (("train", 5), ("test", 3)):
        for i in range(count):
            kind = "cat" if i % 2 else "dog"
            save(tmp_path / part / kind / f"{i}.png", (20 * i, 0, 0))
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / "readme.txt").write_text("stray")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("stray")
    (tmp_path / "train" / "cat" / "._1.png").write_bytes(b"left by another system")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_importing_loads_neither_torchvision_nor_pillow():
    code = "import sys, gradfilter.recipes.datasets, gradfilter.recipes.augment;"
    code += "print([m for m in ('torchvision', 'PIL', 'sklearn') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "[]", done.stderr


STORED = {
    "grey.png": lambda im: im.convert("L"),
    "bits.png": lambda im: im.convert("1"),
    "palette.gif": lambda im: im.convert("P"),
    "alpha.png": lambda im: im.convert("RGBA"),
    "grey_alpha.png": lambda im: im.convert("LA"),
    "cmyk.tif": lambda im: im.convert("CMYK"),
    "deep.png": lambda im: Image.fromarray(np.asarray(im.convert("L")).astype(np.uint16) * 257),
    "rgb.bmp": lambda im: im,
    "rgb.webp": lambda im: im,
}


@pytest.mark.parametrize("file", STORED)
def test_every_way_of_storing_colours_is_read(tmp_path, file):
    image = Image.new("RGB", (6, 4), "white")
    image.paste((0, 0, 0), (3, 0, 6, 4))
    STORED[file](image).save(tmp_path / file, lossless=True)
    read = decode.picture(tmp_path / file)
    assert read.shape == (3, 4, 6) and read.dtype == torch.uint8
    assert (read[:, :, :3] == 255).all() and (read[:, :, 3:] == 0).all()


def test_sixteen_bits_of_grey_are_scaled(tmp_path):
    Image.fromarray(np.array([[0, 0x1234], [0x8000, 0xFFFF]], np.uint16)).save(tmp_path / "a.png")
    assert decode.picture(tmp_path / "a.png")[1].tolist() == [[0, 0x12], [0x80, 0xFF]]


def test_transparent_parts_are_white(tmp_path):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    image.save(tmp_path / "a.png")
    assert decode.picture(tmp_path / "a.png")[:, 0].T.tolist() == [[255] * 3, [10, 20, 30]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "p.png", transparency=0)
    assert decode.picture(tmp_path / "p.png")[:, 0].T.tolist() == [[255] * 3, [10, 20, 30]]


def test_pictures_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the left side of the file is the top
    path = save(tmp_path / "a.jpg", size=(32, 16), exif=exif, quality=95)
    read = decode.picture(path)
    assert read.shape == (3, 32, 16)
    assert read[0, :12].min() > 200 and read[0, 20:].max() < 50


def test_unreadable_pictures_are_named(tmp_path):
    whole = save(tmp_path / "whole.jpg", size=(64, 64)).read_bytes()
    for name, content in [("cut.jpg", whole[:-200]), ("empty.png", b""), ("text.gif", b"hello")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadPicture, match=rf"{name}: cannot be read as a picture") as caught:
            decode.picture(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(BadPicture, match="gone.jpg: no such file"):
        decode.picture(tmp_path / "gone.jpg")


def test_a_worker_s_error_is_one_line_that_names_the_file(photos):
    (photos / "train" / "cat" / "1.png").write_bytes(b"broken")
    loader = torch.utils.data.DataLoader(open_data(str(photos)).train, num_workers=1)
    with pytest.raises(BadPicture) as caught:
        next(iter(loader))
    assert str(caught.value).startswith(f"{photos}/train/cat/1.png: cannot be read as a picture")
    assert "\n" not in str(caught.value)


def test_masks_hold_classes_not_colours(tmp_path):
    save_mask(tmp_path / "m.png", [[0, 1], [2, 255]], palette=True)
    values = {0: 0, 1: 5, 2: 6, 255: 255}
    assert decode.mask(tmp_path / "m.png", values).tolist() == [[0, 5], [6, 255]]
    save_mask(tmp_path / "m.png", [[0, 1], [9, 255]])
    with pytest.raises(BadPicture, match=r"m\.png: label 9 is outside 0\.\.2, 255"):
        decode.mask(tmp_path / "m.png", values)
    save(tmp_path / "m.png")
    with pytest.raises(BadPicture, match="m.png: a mask has one byte per pixel"):
        decode.mask(tmp_path / "m.png", values)


def test_a_folder_of_classes(photos):
    data = open_data(str(photos))
    assert (data.task, data.classes, data.ignore) == ("classification", ("cat", "dog"), None)
    assert data.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert [os.path.basename(data.test.name(i)) for i in range(3)] == ["1.png", "0.png", "2.png"]
    image, label = data.train[1]
    assert label == 0 and image.dtype == torch.uint8
    assert image[:, 0, 0].tolist() == [60, 0, 0]


@pytest.mark.parametrize("other", ["val", "valid"])
def test_other_names_of_the_test_part(photos, other):
    (photos / "test").rename(photos / other)
    assert len(open_data(str(photos)).test) == 3
    save(photos / "test" / "cat" / "1.png")
    assert len(open_data(str(photos)).test) == 1  # test/ comes first


def test_a_folder_without_a_test_part_is_split_by_name(tmp_path):
    for i in range(150):
        save(tmp_path / f"class{i % 3}" / f"{i}.JPG", size=(2, 2))
    data = open_data(str(tmp_path))
    train, test = ({p.name(i) for i in range(len(p))} for p in (data.train, data.test))
    assert len(train | test) == 150 and not train & test
    assert 18 <= len(test) <= 42
    for i in range(150, 200):
        save(tmp_path / "class1" / f"{i}.JPG", size=(2, 2))
    more = open_data(str(tmp_path))
    assert test <= {more.test.name(i) for i in range(len(more.test))}
    assert train <= {more.train.name(i) for i in range(len(more.train))}
    assert more.train.labels.bincount().tolist()[1] > data.train.labels.bincount().tolist()[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_classes_keep_a_picture_to_train_on_and_to_test_on(count):
    for kind in "abcdefghij":  # whatever the hashes say
        files = [f"{kind}/{i}.jpg" for i in range(count)]
        kept, held = folder.hold_out({kind: files})
        assert len(kept[kind]) >= 1 and sorted(kept[kind] + held.get(kind, [])) == files
        assert (kind in held) == (count > 1)


def test_a_class_may_be_called_train(tmp_path):
    for kind in ("bus", "train"):
        for i in range(2):
            save(tmp_path / kind / f"{i}.png")
    assert open_data(str(tmp_path)).classes == ("bus", "train")


def test_pictures_lie_at_any_depth_of_a_class(tmp_path):
    for name in ("cat/2024/may/1.png", "cat/2.png", "dog/1.png", "dog/2.png"):
        save(tmp_path / "train" / name)
    data = open_data(str(tmp_path))  # and a train/ alone is split
    assert len(data.train) + len(data.test) == 4


def test_class_names_come_from_a_table_if_there_is_one(tmp_path):
    for kind in ("007", "12"):
        save(tmp_path / "train" / kind / "1.png")
        save(tmp_path / "test" / kind / "1.png")
    (tmp_path / "cat_to_name.json").write_text('{"7": "moon orchid"}')
    assert open_data(str(tmp_path)).classes == ("moon orchid", "12")
    (tmp_path / "cat_to_name.json").write_text("{")
    with pytest.raises(ValueError, match="cat_to_name.json"):
        open_data(str(tmp_path))


def test_folders_that_cannot_be_trained_on(tmp_path, photos):
    save(photos / "test" / "bird" / "8.png")
    with pytest.raises(ValueError, match="8.png: class 'bird' has no pictures to train on"):
        open_data(str(photos))
    empty = tmp_path / "nothing"
    (empty / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="nothing: needs two folders .* found none"):
        open_data(str(empty))
    save(empty / "a" / "1.png")
    with pytest.raises(ValueError, match="found only 'a'"):
        open_data(str(empty))


def test_labels_need_no_decoding(photos):
    for file in photos.rglob("*.png"):
        file.write_bytes(b"broken")
    data = open_data(str(photos))
    assert data.train.labels.tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(BadPicture, match="1.png"):
        data.train[0]
    with pytest.raises(BadPicture, match="png"):
        open_data(str(photos), cache=True)


def test_subsets_keep_order_names_and_classes(photos):
    train = open_data(str(photos)).train
    part = train.subset(torch.tensor([4, 1]))
    assert len(part) == 2 and part.labels.tolist() == [1, 0]
    assert [part.name(0), part.name(1)] == [train.name(4), train.name(1)]
    assert torch.equal(part[0][0], train[4][0]) and part[1][1] == 0
    assert part.subset([1]).name(0) == train.name(1)
    assert len(train) == 5


def test_fingerprints_of_files(photos):
    def fresh():
        return open_data(str(photos)).train

    first = fresh().fingerprint()
    assert fresh().fingerprint() == first
    assert fresh().subset(torch.tensor([1, 0, 2, 3, 4])).fingerprint() != first
    other = fresh()
    other.labels[0] = 1
    assert other.fingerprint() != first
    path = photos / "train" / "cat" / "1.png"
    info = os.stat(path)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    assert fresh().fingerprint() != first
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert fresh().fingerprint() == first
    path.write_bytes(path.read_bytes() + b"more")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert fresh().fingerprint() != first


def test_a_cache_holds_what_the_files_hold(photos, monkeypatch):
    plain, cached = open_data(str(photos)), open_data(str(photos), cache=True)
    wanted = [plain.train[i] for i in range(5)]
    monkeypatch.setattr(decode, "picture", None)  # from now on no file is read
    part = cached.train.subset(torch.tensor([3, 0]))
    for got, i in [(cached.train[2], 2), (part[0], 3), (part[1], 0)]:
        assert torch.equal(got[0], wanted[i][0]) and got[1] == wanted[i][1]


def test_a_cache_limits_photographs_and_its_fingerprint_says_so(photos, monkeypatch):
    monkeypatch.setattr(pictures_module, "CACHED_SIDE", 8)
    save(photos / "train" / "cat" / "1.png", size=(40, 20))
    plain, cached = open_data(str(photos)).train, open_data(str(photos), cache=True).train
    assert cached[0][0].shape == (3, 8, 16) and cached[1][0].shape == (3, 4, 6)
    assert cached[0][0].dtype == torch.uint8
    assert cached.fingerprint() != plain.fingerprint()


def test_pictures_travel_to_other_processes(photos):
    train = open_data(str(photos)).train
    assert torch.equal(pickle.loads(pickle.dumps(train))[3][0], train[3][0])


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


def test_scenes_with_mistakes(scenes):
    save_mask(scenes / "trainannot" / "1.png", [[1]])
    with pytest.raises(BadPicture, match=r"1\.png: a mask of 1x1 pixels for a picture of 6x4"):
        open_data(str(scenes)).train[1]
    (scenes / "testannot" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"1\.jpg: has no mask in testannot"):
        open_data(str(scenes))

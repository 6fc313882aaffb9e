"""gradfilter-device: picture files of every kind, folders of every layout."""

import csv
import json
import shutil

import numpy as np
import on_device
import pytest
import tiny
import torch
from on_device import exported, module, refused, run
from PIL import Image

from gradfilter.recipes.datasets import compact, decode
from gradfilter.recipes.segmentation import Segmentation


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return tiny.photographs(tmp_path_factory.mktemp("device") / "photos", each=3)


def colours() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (20, 30, 3)).astype(np.uint8)


def rotated(path):
    image = Image.fromarray(colours())
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    image.save(path, exif=exif)


def transparent(path):
    image = Image.fromarray(colours()).convert("RGBA")
    image.putalpha(Image.fromarray(colours()[..., 1]))
    image.save(path)


KINDS = {
    "exif.jpg": rotated,
    "exif.png": rotated,
    "palette.png": lambda path: Image.fromarray(colours()).quantize(16).save(path, transparency=3),
    "alpha.png": transparent,
    "16-bit.png": lambda path: Image.fromarray(colours()[..., 0] * np.uint16(257)).save(path),
    "16-bit.tif": lambda path: Image.fromarray(colours()[..., 0] * np.uint16(257)).save(path),
    "cmyk.jpg": lambda path: Image.fromarray(colours()).convert("CMYK").save(path),
    "grey.png": lambda path: Image.fromarray(colours()).convert("L").save(path),
    "bits.png": lambda path: Image.fromarray(colours()).convert("1").save(path),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_looks_as_in_gradfilter_train(name, tmp_path):
    KINDS[name](tmp_path / name)
    found = np.asarray(module("photos").picture(tmp_path / name).image).transpose(2, 0, 1)
    assert found.shape == ((3, 30, 20) if "exif" in name else (3, 20, 30))
    assert found.max() > 200 and found.min() < 60  # neither clipped nor dark
    assert np.array_equal(found, decode.picture(tmp_path / name).numpy())


def test_what_gradfilter_train_cannot_read_is_broken(tmp_path):
    Image.fromarray(colours()[..., 0].astype(np.float32)).save(tmp_path / "fractions.tif")
    (tmp_path / "empty.png").write_bytes(b"")
    rotated(tmp_path / "whole.jpg")
    (tmp_path / "torn.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:400])
    device = module("photos")
    for name in ("fractions.tif", "empty.png", "torn.jpg"):
        with pytest.raises(device.Broken):
            device.picture(tmp_path / name)
        with pytest.raises(decode.BadPicture):
            decode.picture(tmp_path / name)


def test_a_broken_picture_to_test_on_is_told_once_and_listed(folder, photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    first = sorted((data / "test").rglob("*.*"))[0]
    first.write_bytes(b"no picture")
    out = tmp_path / "run"
    done = run("train", data, "--model", folder, "--run", out, "--epochs", 3)
    assert done.returncode == 0 and done.stderr.count(str(first)) == 1
    assert "1 broken" in done.stdout
    told = run("status", "--model", folder, "--run", out).stdout
    assert f"skipped, broken: {first.relative_to(data)}\n" in told


@pytest.mark.parametrize("earlier", [False, True], ids=["now", "earlier version"])
def test_a_broken_picture_is_listed_once_wherever_the_folder_lies(
    folder, photos, earlier, tmp_path
):
    data, out = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "run"
    first = sorted((data / "train").rglob("*.*"))[0]
    first.write_bytes(b"no picture")
    line = ["--model", folder, "--run", out, "--epochs", 1, "--threads", 1]
    assert run("train", data, *line).returncode == 0
    checkpoint = module("checkpoint")
    values, about = checkpoint.load(out / checkpoint.LAST)
    about |= {"step": 0, "rows": []}  # all is to be read again
    if earlier:
        about["skipped"] = [str(first)]
    checkpoint.save(out / checkpoint.LAST, values, about)
    to = data if earlier else shutil.move(data, tmp_path / "moved")
    again = run("train", to, *line)
    assert again.returncode == 0 and "1 broken" in again.stdout
    assert "skipped" not in again.stderr


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_folder_of_broken_pictures_is_no_run(folder, photos, part, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    for path in (data / part).rglob("*.*"):
        path.write_bytes(b"no picture")
    done = run("train", data, "--model", folder, "--run", tmp_path / "run")
    assert done.returncode == 2 and f"none of the pictures to {part} on" in done.stderr
    assert "accuracy" not in done.stdout


def test_one_class_and_fewer_pictures_than_a_batch(folder, photos, tmp_path):
    for i in range(2):
        (tmp_path / "photos" / "class1").mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / "train" / "class1" / f"{i}.png", tmp_path / "photos" / "class1")
    data, out = tmp_path / "photos", tmp_path / "run"
    done = run("train", data, "--model", folder, "--run", out, "--batch", 16, "--epochs", 2)
    assert done.returncode == 0 and "epoch 2" in done.stdout, done.stderr
    (data / "class1" / "1.png").unlink()
    alone = run("train", data, "--model", folder, "--run", tmp_path / "other")
    assert refused(alone, "no picture to test on")


def test_folders_may_have_other_names_than_classes(folder, photos, tmp_path):
    """As for `gradfilter train`, whose export has the names of the table."""
    data = shutil.copytree(photos, tmp_path / "photos")
    for part in ("train", "test"):
        for i in range(3):
            (data / part / f"class{i}").rename(data / part / f"00{i + 1}")
    strange = run("train", data, "--model", folder, "--run", tmp_path / "run")
    assert refused(strange, "'001' is none of")
    table = {f"{i + 1}": f"class{i}" for i in range(3)}
    (data / "cat_to_name.json").write_text(json.dumps(table))
    train, _ = module("folders").open_folder(data, ["class0", "class1", "class2"], False)
    assert {(path.parent.name, label) for path, label in train} == {
        ("001", 0), ("002", 1), ("003", 2),
    }  # fmt: skip


def masked(scenes, to):
    """The layout `images/` and `masks/` of what is to train on in `scenes`."""
    shutil.copytree(scenes / "train", to / "images")
    shutil.copytree(scenes / "trainannot", to / "masks")
    return to


def test_masks_are_trained_on(scenes, tmp_path):
    model = exported(tmp_path / "exported", scenes, masks=True, epochs=8)
    out = tmp_path / "run"
    done = run("train", scenes, "--model", model, "--run", out, "--threads", 1)
    assert done.returncode == 0, done.stderr
    with open(out / "log.csv") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    assert [*rows[-1]] == ["epoch", "step", "loss", "miou", "pixel_accuracy"]
    assert rows[-1]["pixel_accuracy"] > 0.85, done.stdout
    best = max(row["miou"] for row in rows)
    assert 0.7 < best < max(row["pixel_accuracy"] for row in rows)
    assert f"done: miou {best:.1%} at epoch" in done.stdout
    status = run("status", "--model", model, "--run", out).stdout
    assert f"miou {rows[-1]['miou']:.1%}, pixel_accuracy" in status
    picture = sorted((scenes / "test").iterdir())[0]
    masks = tmp_path / "masks"
    found = run("predict", picture, "--model", model, "--run", out, "--masks", masks)
    assert found.returncode == 0, found.stderr
    truth = np.asarray(Image.open(scenes / "testannot" / picture.name))
    share = (np.asarray(Image.open(masks / picture.name)) == truth)[truth != 255].mean()
    assert share > 0.85
    (tmp_path / "file").write_bytes(b"")
    nowhere = run("predict", picture, "--model", model, "--run", out, "--masks", tmp_path / "file")
    assert refused(nowhere, "cannot write")


def test_masks_are_judged_as_by_gradfilter_train():
    """Class 3 is neither there nor found, class 4 found but not there; some pixels are ignored."""
    random, metrics = np.random.RandomState(0), module("metrics")
    judge = Segmentation(("a", "b", "c", "d", "e"), ignore=255)
    tally, counted = judge.tally(), 0
    for _ in range(3):
        truth, scores = random.randint(3, size=(2, 6, 7)), random.rand(2, 5, 6, 7)
        scores[:, 3] = -1.0
        ignored = random.rand(*truth.shape) < 0.2
        target = torch.from_numpy(np.where(ignored, 255, truth))
        judge.add(tally, torch.from_numpy(scores), target)
        known = np.where(ignored, module("photos").NOTHING, truth)
        counted = counted + metrics.counts(known, scores.argmax(1), 5)
    expected, found = judge.metrics(tally), metrics.metrics(counted, masks=True)
    assert [*found] == ["miou", "pixel_accuracy"]
    assert found == pytest.approx({name: expected[name] for name in found})
    assert metrics.metrics(counted, masks=False) == {"accuracy": found["pixel_accuracy"]}


def test_a_run_of_masks_begun_before_miou_was_measured(scenes, tmp_path):
    model = exported(tmp_path / "exported", scenes, masks=True, epochs=1)
    line = ["train", scenes, "--model", model, "--run", tmp_path / "run", "--threads", 1]
    assert run(*line).returncode == 0
    checkpoint = module("checkpoint")
    values, about = checkpoint.load(tmp_path / "run" / checkpoint.LAST)
    about["rows"] = [{"epoch": 1.0, "step": 2, "loss": 0.5, "accuracy": 0.8}]
    checkpoint.save(tmp_path / "run" / checkpoint.LAST, values, about)
    assert refused(run(*line), "did not measure miou; give another --run")
    assert "accuracy 80.0%" in run("status", *line[2:-2]).stdout


def test_folders_of_masks_are_those_of_gradfilter_train(scenes, tmp_path):
    device = module("photos")
    train, test = module("folders").open_folder(scenes, list(on_device.CLASSES), True)
    data = compact.camvid(scenes)
    assert [(p.name, m.parent.name) for p, m in train] == [
        (name.rpartition("/")[2], "trainannot") for name in data.train.names
    ]
    assert len(test) == len(data.test)
    path, target = train[1]
    mask = device.mask(target, device.picture(path), (tiny.SIZE, tiny.SIZE), 2, 255)
    stored = np.asarray(Image.open(target)).astype(int)
    assert np.array_equal(mask, np.where(stored == 255, device.NOTHING, stored))


def test_held_out_masks_do_not_depend_on_where_the_folder_lies(scenes, tmp_path):
    parts = [
        [[path.name for path, _ in part] for part in module("folders").open_folder(place, [], True)]
        for place in (masked(scenes, tmp_path / "a"), masked(scenes, tmp_path / "b" / "c"))
    ]
    assert parts[0] == parts[1] and all(parts[0])


def test_a_mask_that_means_nothing_is_broken(tmp_path):
    device = module("photos")
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "picture.png")
    photo = device.picture(tmp_path / "picture.png")
    Image.fromarray(np.full((4, 4), 2, np.uint8)).save(tmp_path / "other.png")
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "colours.png")
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "words.png")
    for name in ("other.png", "colours.png", "words.png"):
        with pytest.raises(device.Broken, match=name):
            device.mask(tmp_path / name, photo, (4, 4), 2, 255)

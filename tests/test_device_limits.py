"""gradfilter-device: what is read before a run begins, to keep a limit and to waste no time."""

import shutil

import numpy as np
import pytest
import tiny
from on_device import exported, module, run
from PIL import Image

MIB = 2**20


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return tiny.photographs(tmp_path_factory.mktemp("device") / "photos", each=4)


def opened(folder, data, out, **options):
    """A run that is about to begin."""
    training, model = module("training"), module("exported").Exported(folder)
    chosen = training.Options.of(model.manifest["recipe"] | options)
    return training.Run(model, data, out, chosen, 1)


@pytest.mark.parametrize("broken", [1, 11])
def test_a_limit_is_kept_with_broken_pictures(folder, photos, broken, tmp_path):
    """Their heads say that they are the largest."""
    data = shutil.copytree(photos, tmp_path / "photos")
    for path in sorted((data / "train").rglob("*.png"))[:broken]:
        Image.effect_noise((90, 90), 50).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    line = ("train", data, "--model", folder, "--run", tmp_path / "run", "--memory-limit", 4000)
    done = run(*line)
    assert done.returncode == 0, done.stderr
    assert "instead of" not in done.stdout and f"{broken} broken" in done.stdout


def test_a_limit_without_a_picture_that_can_be_read(folder, photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    for path in data.rglob("*.png"):
        path.write_bytes(b"no picture")
    line = ("train", data, "--model", folder, "--run", tmp_path / "run", "--memory-limit", 4000)
    done = run(*line)
    assert done.returncode == 2 and "none of the pictures to train on" in done.stderr


def test_steps_are_tried_with_the_largest_pictures(folder, photos, tmp_path, monkeypatch):
    data = shutil.copytree(photos, tmp_path / "photos")
    for name, side in (("train/class2/3.png", 300), ("test/class1/2.png", 400)):
        Image.new("RGB", (side, side), "red").save(data / name)
    own, read = opened(folder, data, tmp_path / "run"), []
    device, picture = module("photos"), module("photos").picture
    monkeypatch.setattr(
        device, "picture", lambda path, side: read.append(path) or picture(path, side)
    )
    own._trial()(3)
    assert read[:2] == [data / "test/class1/2.png", data / "train/class2/3.png"] and len(read) == 3


def test_smaller_batches_tell_their_learning_rate(folder, photos, tmp_path, monkeypatch, capsys):
    own = opened(folder, photos, tmp_path, batch=32, lr=0.4)
    monkeypatch.setattr(module("memory"), "fitting", lambda *_: 2)
    own.limit(500 * MIB)
    assert capsys.readouterr().out == (
        "batches of 2 instead of 32, for 500 MB in all; "
        "the highest learning rate is 0.00625 instead of 0.1\n"
    )
    assert max(own.options.rate(step, 100) for step in range(100)) == pytest.approx(0.00625)


def unreadable(part):
    for path in part.rglob("*.png"):
        path.write_bytes(b"no picture")


def refused_before_a_step(own, part, monkeypatch) -> None:
    monkeypatch.setattr(own.stepper, "step", lambda *_: pytest.fail("a step was taken"))
    why = f"none of the pictures to {part} on can be read"
    with pytest.raises(module("exported").Unusable, match=why):
        own.go(5.0)


@pytest.mark.parametrize("part", ["train", "test"])
def test_broken_pictures_are_found_before_the_first_step(
    folder, photos, part, tmp_path, monkeypatch
):
    data = shutil.copytree(photos, tmp_path / "photos")
    unreadable(data / part)
    refused_before_a_step(opened(folder, data, tmp_path / "run"), part, monkeypatch)


def test_masks_of_which_nothing_counts_are_found_before_the_first_step(
    scenes, tmp_path, monkeypatch
):
    data = shutil.copytree(scenes, tmp_path / "scenes")
    for path in (data / "testannot").iterdir():
        size = Image.open(path).size
        Image.fromarray(np.full(size[::-1], 255, np.uint8)).save(path)
    model = exported(tmp_path / "exported", scenes, masks=True, epochs=1)
    refused_before_a_step(opened(model, data, tmp_path / "run"), "test", monkeypatch)


def test_masks_go_to_new_files_in_the_run(scenes, tmp_path):
    """A folder called masks may be where the masks to train on are."""
    model = exported(tmp_path / "exported", scenes, masks=True, epochs=1)
    one, other = scenes / "test" / "0.png", scenes / "train" / "0.png"
    work = tmp_path / "work"
    shutil.copytree(scenes / "trainannot", work / "masks")
    before = {path.name: path.read_bytes() for path in (work / "masks").iterdir()}
    written = []
    for _ in range(2):
        done = run("predict", one, other, "--model", model, cwd=work)
        assert done.returncode == 0, done.stderr
        written += [line.partition(": ")[2] for line in done.stdout.splitlines()]
    folder = model / "run" / "predictions"
    assert written == [str(folder / f"0{more}.png") for more in ("", "-1", "-2", "-3")]
    assert all(Image.open(path).size == Image.open(one).size for path in written)
    assert {path.name: path.read_bytes() for path in (work / "masks").iterdir()} == before
    asked = run("predict", one, "--model", model, "--masks", work / "masks")
    assert asked.returncode == 0 and asked.stdout.endswith("0-1.png\n")
    assert before["0.png"] == (work / "masks" / "0.png").read_bytes()


def test_a_mask_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    def failing(self, file, kind):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", failing)
    with pytest.raises(module("exported").Unusable, match="No space left on device"):
        module("cli").save_mask(np.zeros((4, 4), np.uint8), (8, 8), "a", tmp_path / "masks")
    assert not list((tmp_path / "masks").iterdir())

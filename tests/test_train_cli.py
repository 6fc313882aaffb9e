"""train, pretrain, evaluate and predict, as a user meets them."""

import json
import os
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("torchvision")
pytest.importorskip("rich")

import tiny  # noqa: E402
from commands import gradfilter, mistake  # noqa: E402
from PIL import Image  # noqa: E402

from gradfilter.recipes import checkpoint, training  # noqa: E402
from gradfilter.recipes.classification import Classification  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402
from gradfilter.recipes.training import Run  # noqa: E402

DRAW = Run._draw  # which the fixture of tiny networks leaves out

pytestmark = pytest.mark.usefixtures("tiny_networks")

QUICK = ["--model", "tiny", "--batch", 6, "--epochs", 2, "--no-tensorboard", "--no-compare"]


def train(*arguments) -> int:
    return gradfilter("train", *QUICK, *arguments)


@pytest.fixture
def run(photos, tmp_path, capsys):
    assert train("--data", photos, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    return tmp_path / "run"


def test_one_option_is_enough(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "ENOUGH", 10)
    for _ in range(2):
        assert gradfilter("train", "--data", photos) == 0
    out = capsys.readouterr().out
    assert re.search(r"top1 \d+\.\d% -> \d+\.\d% .* ms each", out)
    assert "exact" in out and "kept for the backward pass" in out
    runs = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert runs == ["photos-tf_efficientnet_lite0", "photos-tf_efficientnet_lite0-2"]


def test_what_is_said_where_there_is_no_terminal(photos, tmp_path, capsys):
    train("--data", photos, "--out", tmp_path / "run")
    out, err = capsys.readouterr()
    assert "\x1b" not in out and "\r" not in out and err == ""
    assert [line.split(":")[0] for line in out.splitlines()[3:6]] == [
        "before training",
        "epoch 1/2",
        "epoch 2/2",
    ]


def test_pictures_that_are_passed_over_are_told(tmp_path, capsys):
    photos = tiny.photographs(tmp_path / "photos", each=3)
    (photos / "train" / "class0" / "new.heic").touch()
    assert train("--data", photos, "--out", tmp_path / "run") == 0
    assert "kinds that are not read: 1 .heic" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_said_of_letters_and_sizes_that_do_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)  # of 256: larger than Pillow likes
    monkeypatch.setattr(Run, "_draw", DRAW)
    photos = tiny.photographs(tmp_path / "photos", each=3)
    for part in ("train", "test"):
        (photos / part / "class0").rename(photos / part / "花")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert train("--data", photos, "--out", tmp_path / "run") == 0
    assert not said and (tmp_path / "run" / "confusion.png").is_file()


def test_bars_on_a_terminal(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    train("--data", photos, "--out", tmp_path / "run")
    out = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"training .*10/10 .*/s loss \d\.\d+ 0:00:00", out)


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_options_before_the_file_before_the_defaults(photos, tmp_path, kind):
    path = tmp_path / f"config.{kind}"
    options = {"data": str(photos), "epochs": 1, "batch": 9, "weight-decay": 0.01, "grid": 3}
    path.write_text(json.dumps(options))  # which is YAML too
    out = tmp_path / "run"
    line = ["--config", path, "--model", "tiny", "--batch", 5, "--out", out, "--no-tensorboard"]
    assert gradfilter("train", *line) == 0
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["batch"], written["epochs"], written["grid"]) == (5, 1, 3)
    assert (written["weight_decay"], written["clip"]) == (0.01, 2.0)


def test_epochs_take_the_place_of_the_steps_in_a_file(photos, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"data": str(photos), "steps": 1, "epochs": 7}))
    for given, steps in (["--epochs", 1], 5), (["--steps", 2], 2), ([], 1):
        line = ["--config", path, "--model", "tiny", "--batch", 6, "--no-tensorboard", *given]
        assert gradfilter("train", *line, "--out", tmp_path / f"run{steps}") == 0
        rows = (tmp_path / f"run{steps}" / "metrics.csv").read_text().splitlines()
        assert rows[-1].split(",")[1] == str(steps)


def test_a_runs_own_config_repeats_it(run, tmp_path):
    line = ["--config", run / "config.yaml", "--out", tmp_path / "again"]
    assert gradfilter("train", *line) == 0
    assert tiny.same(tiny.weights(run), tiny.weights(tmp_path / "again"))


def test_stop_and_resume(photos, tmp_path, monkeypatch, capsys):
    assert train("--data", photos, "--out", tmp_path / "whole") == 0
    step = Trainer.step

    def interrupted(self, batch, number, rate):
        step(self, batch, number, rate)
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert train("--data", photos, "--out", tmp_path / "run") == 130
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    _, resume = told.strip().split("gradfilter ")
    monkeypatch.setattr(Trainer, "step", step)
    assert gradfilter(*resume.split()) == 0
    assert tiny.same(tiny.weights(tmp_path / "whole"), tiny.weights(tmp_path / "run"))
    assert gradfilter("train", "--out", tmp_path / "run", "--resume") == 0


def test_pretrain_on_one_part_and_train_on_another(photos, tmp_path):
    split = ["--data", photos, "--parts", 3, "--per-part", 1]
    assert gradfilter("pretrain", *QUICK, *split, "--out", tmp_path / "a") == 0
    first = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert (first["method"], first["split"], first["part"]) == ("exact", "non-iid", 0)
    line = [*split, "--split", "non-iid", "--part", 1, "--weights", tmp_path / "a" / "best.pt"]
    assert train(*line, "--out", tmp_path / "b", "--seed", 4) == 0
    a, b = (json.loads((tmp_path / r / "split.json").read_text()) for r in ("a", "b"))
    assert not set(a["train"]) & set(b["train"]) and not set(a["test"]) & set(b["test"])


def test_evaluate(run, capsys):
    assert gradfilter("evaluate", run) == 0
    assert "top1" in capsys.readouterr().out
    found = json.loads((run / "evaluation.json").read_text())
    best = torch.load(run / "best.pt", weights_only=True)["metrics"]
    assert found["top1"] == pytest.approx(best["test_top1"]) and found["pictures"] == 27
    assert found["loss"] == pytest.approx(best["test_loss"], rel=1e-5)
    assert gradfilter("evaluate", run, "--which", "last") == 0


def test_a_run_among_the_pictures_is_no_class(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tiny.photographs(tmp_path / "photos") / "train")
    assert train("--data", ".") == 0
    assert gradfilter("evaluate", "runs/train-tiny") == 0
    assert train("--data", ".") == 0
    assert "4 classes" not in capsys.readouterr().out


def test_evaluate_tells_what_it_cannot_write(run, monkeypatch, capsys):
    def full(*args):
        raise checkpoint.NotWritten("no room")

    monkeypatch.setattr(checkpoint, "write", full)
    assert gradfilter("evaluate", run) == 2
    said = capsys.readouterr()
    assert "top1" in said.out and "no room" in said.err


def test_a_score_that_is_no_number_is_none_in_the_file(run, monkeypatch, capsys):
    scores = {"miou": 0.5, "iou nowhere": float("nan")}  # a class neither there nor found
    monkeypatch.setattr(Classification, "metrics", lambda task, tally: scores)
    assert gradfilter("evaluate", run) == 0
    assert re.search("iou nowhere +-\n", capsys.readouterr().out)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = json.loads((run / "evaluation.json").read_text(), parse_constant=refuse)
    assert found["iou nowhere"] is None and found["miou"] == 0.5


def test_evaluate_finds_pictures_that_were_moved(tmp_path, capsys):
    photos = tiny.photographs(tmp_path / "here")
    assert train("--data", photos, "--out", tmp_path / "run") == 0
    moved = photos.rename(tmp_path / "there")
    assert gradfilter("evaluate", tmp_path / "run") == 2
    assert "give --data, where the pictures" in capsys.readouterr().err
    assert gradfilter("train", "--resume", tmp_path / "run", "--data", moved) == 0
    assert gradfilter("evaluate", tmp_path / "run") == 0


def test_evaluate_on_other_data(run, tmp_path, capsys):
    other = tiny.photographs(tmp_path / "other", each=2)
    assert gradfilter("evaluate", run, "--data", other) == 0
    assert json.loads((run / "evaluation.json").read_text())["pictures"] == 6
    assert "hold out" not in capsys.readouterr().out
    assert gradfilter("evaluate", run, "--data", other / "test") == 0  # has no part to test on
    assert "tested on 3 of 6 pictures" in " ".join(capsys.readouterr().out.split())
    fewer = tiny.photographs(tmp_path / "fewer", each=2, classes=2)
    assert gradfilter("evaluate", run, "--data", fewer) == 2
    assert "other classes" in capsys.readouterr().err


def test_predict_classes(run, photos, tmp_path, capsys):
    Image.new("RGB", (70, 30), "red").save(tmp_path / "new.jpg")
    picture = photos / "test" / "class2" / "0.png"
    assert gradfilter("predict", run, tmp_path / "new.jpg", picture) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'new.jpg'}: class")
    shares = [float(s) for s in re.findall(r"([\d.]+)%", lines[1])]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=0.2)


def test_predict_goes_on_after_a_file_that_is_no_picture(run, photos, tmp_path, capsys):
    picture = photos / "test" / "class2" / "0.png"
    (tmp_path / "note.txt").write_text("no picture")
    asked = [tmp_path / "note.txt", picture, tmp_path / "nowhere.jpg"]
    assert gradfilter("predict", run, *asked) == 2
    said = capsys.readouterr()
    assert said.out.startswith(f"{picture}: ") and len(said.out.splitlines()) == 1
    assert "note.txt" in said.err and said.err.endswith("(and 1 more)\n")


def test_predict_masks(scenes, tmp_path, capsys):
    out = tmp_path / "run"
    assert train("--data", scenes, "--out", out) == 0
    Image.new("RGB", (50, 20), "white").save(tmp_path / "new.png")
    assert gradfilter("predict", out, tmp_path / "new.png") == 0
    assert str(out / "predictions" / "new.png") in capsys.readouterr().out
    with Image.open(out / "predictions" / "new.png") as mask:
        assert mask.size == (50, 20) and mask.mode == "RGB"


def test_predict_masks_of_class_numbers(scenes, tmp_path):
    """As the truth beside the pictures is."""
    out, masks = tmp_path / "run", tmp_path / "masks"
    assert train("--data", scenes, "--out", out) == 0
    pictures = scenes / "test"
    assert gradfilter("predict", out, pictures, "--numbers", "--masks", masks) == 0
    for picture in pictures.iterdir():
        with Image.open(masks / picture.name) as mask, Image.open(picture) as seen:
            assert mask.mode == "L" and mask.size == seen.size
            assert mask.getextrema()[1] < 2


def test_predict_a_folder(run, photos, capsys):
    assert gradfilter("predict", run, photos / "test") == 0
    found = {line.split(": ")[0] for line in capsys.readouterr().out.splitlines()}
    assert found == {str(path) for path in (photos / "test").rglob("*.png")}


def test_masks_take_the_place_of_no_picture_and_of_no_other_mask(scenes, tmp_path, capsys):
    out, places = tmp_path / "run", [tmp_path / "a", tmp_path / "b"]
    assert train("--data", scenes, "--out", out) == 0
    for place, size in zip(places, [(50, 20), (20, 50)], strict=True):
        place.mkdir()
        Image.new("RGB", size, "white").save(place / "new.png")
    asked, before = [p / "new.png" for p in places], (places[0] / "new.png").read_bytes()
    capsys.readouterr()
    assert gradfilter("predict", out, *asked, "--masks", places[0]) == 0
    assert asked[0].read_bytes() == before
    masks = [Path(line.split(": ")[1]) for line in capsys.readouterr().out.splitlines()]
    assert [Image.open(mask).size for mask in masks] == [(50, 20), (20, 50)]


MISTAKES = [
    ("train", "--data FOLDER"),
    ("train --data nowhere", "nowhere"),
    ("train --data {photos} --epochs 0", "whole number"),
    ("train --data {photos} --batch x", "not a whole number"),
    ("train --data {photos} --lr -1", "not a number >= 0"),
    ("train --data {photos} --method galerkn", "did you mean galerkin"),
    ("train --data {photos} --energy 0.5", "galerkin has no energy"),
    ("train --data {photos} --parts 2 --part 2", "part must be 0 to 1"),
    ("train --data {photos} --split odd", "invalid choice"),
    ("train --data {photos} --part 1", "part: 1 changes nothing without split"),
    ("train --data {photos} --cache-dir x", "cache_dir: x changes nothing without cache_features"),
    ("compare --data {photos} --alpha 3", "alpha: 3.0 changes nothing without split"),
    ("train --data {photos} --std 0", "std must be above 0"),
    ("train --data {photos} --last 99", "last=99"),
    ("train --data {photos} --device tpu9", "tpu9"),
    ("train --data {photos} --device cuda:7", "cuda:7"),
    ("train --data {photos} --device meta", "no meta here"),
    ("train --data {photos} --cache-features --augment light", "needs augment: none"),
    ("train --data {photos} --cache-features", "0 reads the picture itself and is trained"),
    ("train --data {photos} --plan {photos}/none.yaml", "none.yaml: No such file"),
    ("train --data {photos} --plan p.yaml --method exact", "leave --method out"),
    ("train --data {photos} --config {photos}/none.yaml", "none.yaml: No such file"),
    ("train --data {photos} --out /dev/null/x", "/dev/null/x"),
    ("train --resume", "--resume RUN"),
    ("train --resume {photos}", "holds no run"),
    ("evaluate {photos}", "holds no run"),
    ("predict {photos} x.jpg", "holds no run"),
    ("predict {run} x.jpg", "x.jpg: no such file"),
    ("predict {run} {run}", "there are no pictures in it"),
    ("predict {run} x.jpg --numbers", "makes no masks"),
    ("predict {run} {run}/config.yaml", "cannot be read as a picture"),
    ("train --resume {run} --seed 5", "this run has seed: 0"),
    ("train --data {photos} --out {run}", "holds a run"),
]


@pytest.mark.parametrize("asked, says", MISTAKES)
def test_mistakes_get_one_line_and_exit_code_2(
    asked, says, request, photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run = request.getfixturevalue("run") if "{run}" in asked else ""
    assert says in mistake(capsys, *asked.format(photos=photos, run=run).split())
    assert not (tmp_path / "runs").exists()


def test_config_files_with_mistakes(photos, tmp_path, capsys):
    for text, says in [
        ("epoch: 3", "there is no option 'epoch'; did you mean epochs?"),
        ("epochs: many", "epochs: 'many' is not a whole number"),
        ("amp: 3", "amp: 3 is neither true nor false"),
        ("augment: heavy", "augment: 'heavy' is none of none, light, standard"),
        ("- 3", "name: value"),
        ("{", "not readable"),
    ]:
        (tmp_path / "c.yaml").write_text(text)
        assert gradfilter("train", "--data", photos, "--config", tmp_path / "c.yaml") == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1


def test_help_names_every_option_and_its_default(capsys):
    from dataclasses import fields

    from gradfilter.recipes.settings import Settings

    assert gradfilter("train", "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    for f in fields(Settings):
        assert "--" + f.name.replace("_", "-") in told
    assert "(default: tf_efficientnet_lite0)" in told and "(default: 0.05)" in told

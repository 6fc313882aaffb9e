"""Nothing is lost: killed, stopped or out of room, a run goes on to the same bits."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("rich")

import tiny  # noqa: E402
from PIL import Image  # noqa: E402

from gradfilter.recipes import checkpoint, training  # noqa: E402
from gradfilter.recipes.datasets import BadPicture  # noqa: E402
from gradfilter.recipes.features import Stored  # noqa: E402
from gradfilter.recipes.trainer import Diverged, Trainer  # noqa: E402
from gradfilter.recipes.training import Run, Stopped, train  # noqa: E402

DRAW = Run._draw
pytestmark = pytest.mark.usefixtures("tiny_networks")


MOMENTS = ["step 1", "step 7", "step 15", "file 1", "file 3", "rename 3", "rename 8", "rename 12"]


@pytest.mark.parametrize("method", ["galerkin", "asi"])
def test_killed_at_any_moment_a_run_resumes_to_the_same_bits(photos, tmp_path, method):
    options = {"method": method, "save_every": 0.0, "rank": 2 if method == "asi" else None}
    whole = tiny.go(photos, tmp_path / "whole", **options)
    for moment in MOMENTS if method == "galerkin" else MOMENTS[1:5]:
        out = tmp_path / moment

        def die(rank, moment=moment, out=out):
            what, number = moment.split()
            tiny.arm(what, int(number))
            tiny.go(photos, out, **options)

        assert tiny.forked(die) == [-signal.SIGKILL], moment
        result = tiny.go_on(out)
        assert tiny.same(tiny.weights(out), tiny.weights(tmp_path / "whole")), moment
        for name in ("last.pt", "best.pt"):
            kept, other = (torch.load(r / name, weights_only=True) for r in (out, whole.out))
            assert kept["step"] == other["step"]
        assert [r["test_loss"] for r in result.rows] == [r["test_loss"] for r in whole.rows]
        assert [r["train_loss"] for r in result.rows[1:]] == [
            r["train_loss"] for r in whole.rows[1:]
        ]
        with open(out / "metrics.csv") as file:
            assert len(file.readlines()) == 5
        assert not list(out.glob("*.new"))


def test_a_run_that_leaves_pictures_out_resumes_to_the_same_bits(photos, tmp_path):
    options = {"norm": "batch", "batch": 13, "save_every": 0.0}  # 27 pictures: two steps an epoch
    options["backbone_lr"] = 0.5  # two groups of parameters
    tiny.go(photos, tmp_path / "whole", **options)

    def die(rank):
        tiny.arm("step", 4)
        tiny.go(photos, tmp_path / "killed", **options)

    assert tiny.forked(die) == [-signal.SIGKILL]
    assert [r["step"] for r in tiny.go_on(tmp_path / "killed").rows] == [0, 2, 4, 6]
    assert tiny.same(*(tiny.weights(tmp_path / name) for name in ("whole", "killed")))


@pytest.mark.slow
def test_killed_from_outside_at_random_moments(photos, tmp_path):
    line = ["--model", "tiny", "--batch", 2, "--epochs", 12, "--save-every", 0, "--no-tensorboard"]
    arguments = ["train", "--data", photos, "--no-compare", *line]
    assert tiny.run(*arguments, "--out", tmp_path / "whole").returncode == 0
    out, kills = tmp_path / "killed", 0
    for attempt in range(4):
        last = ["--resume", out] if (out / "config.yaml").exists() else ["--out", out]
        command, env = tiny.command(*arguments, *last)
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not (out / "last.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(random.Random(attempt).uniform(0.05, 4))
        if process.poll() is None:
            process.kill()
            kills += 1
        process.wait()
    assert kills
    assert tiny.run("train", "--resume", out).returncode == 0
    assert tiny.same(tiny.weights(out), tiny.weights(tmp_path / "whole"))


def test_a_lost_connection_saves(photos, tmp_path, monkeypatch):
    """The signal that a terminal sends when it goes, as one of ssh does."""
    out, step = tmp_path / "stopped", Trainer.step
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def interrupted(self, batch, number, rate):
        step(self, batch, number, rate)
        if number + 1 == 7:
            os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(Stopped, match="after step 7"):
        tiny.go(photos, out)
    signal.signal(signal.SIGHUP, before)
    assert torch.load(out / "last.pt", weights_only=True)["step"] == 7


@pytest.mark.parametrize("moment", [1, 7, 15])
def test_ctrl_c_saves_and_says_how_to_go_on(photos, tmp_path, monkeypatch, moment):
    tiny.go(photos, tmp_path / "whole")
    out, step, before = tmp_path / "stopped", Trainer.step, signal.getsignal(signal.SIGINT)

    def interrupted(self, batch, number, rate):
        step(self, batch, number, rate)
        if number + 1 == moment:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(
        Stopped, match=f"after step {moment} of 15: go on with: gradfilter train --resume {out}"
    ):
        tiny.go(photos, out)
    monkeypatch.setattr(Trainer, "step", step)
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(out / "last.pt", weights_only=True)["step"] == moment
    tiny.go_on(out)
    assert tiny.same(tiny.weights(out), tiny.weights(tmp_path / "whole"))


def test_ctrl_c_while_testing(photos, tmp_path, monkeypatch):
    whole = tiny.go(photos, tmp_path / "whole")
    out, evaluate, calls = tmp_path / "stopped", Trainer.evaluate, []

    def interrupted(self, pictures, advance):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, pictures, advance)

    monkeypatch.setattr(Trainer, "evaluate", interrupted)
    with pytest.raises(Stopped, match="after step 5"):
        tiny.go(photos, out)
    result = tiny.go_on(out)
    assert tiny.same(tiny.weights(out), tiny.weights(tmp_path / "whole"))
    assert [r["train_loss"] for r in result.rows[1:]] == [r["train_loss"] for r in whole.rows[1:]]


@pytest.fixture
def heard():
    """Ctrl-C raises, also where whoever started the tests has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_features_are_stored(photos, tmp_path, monkeypatch):
    tiny.go(photos, tmp_path / "whole", cache_features=True, last=2)
    out, front = tmp_path / "stopped", Stored.front

    def interrupted(self, images):
        os.kill(os.getpid(), signal.SIGINT)
        return front(self, images)

    monkeypatch.setattr(Stored, "front", interrupted)
    with pytest.raises(Stopped, match=f"go on with: gradfilter train --resume {out}"):
        tiny.go(photos, out, cache_features=True, last=2)
    monkeypatch.setattr(Stored, "front", front)
    tiny.go_on(out)
    assert tiny.same(tiny.weights(out), tiny.weights(tmp_path / "whole"))


def test_an_unreadable_picture_while_features_are_stored(tmp_path):
    photos = tiny.photographs(tmp_path / "photos")
    (photos / "train" / "class1" / "4.png").write_bytes(b"")
    with pytest.raises(BadPicture, match=r"class1/4\.png: .*; then go on with: .* --resume"):
        tiny.go(photos, tmp_path / "run", cache_features=True, last=2)


def test_a_loss_that_is_no_number_stops_with_advice(photos, tmp_path):
    with pytest.raises(Diverged, match="at step [23]; try a smaller --lr .* --resume .* --lr"):
        tiny.go(photos, tmp_path / "run", lr=1e30, clip=0, epochs=6)
    kept = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert all(t.isfinite().all() for t in kept["model"].values())
    assert tiny.go_on(tmp_path / "run", lr=0.1).rows[-1]["step"] == 30


def test_a_finished_run_resumes_to_itself_and_says_so(photos, tmp_path, capsys):
    first = tiny.go(photos, tmp_path / "run")
    before = tiny.weights(tmp_path / "run")
    again = training.train(training.resumed(tmp_path / "run"), resume=True)
    told = "going on after step 15 of 15: it is done; to train on, --epochs N"
    assert told in " ".join(capsys.readouterr().out.split())
    assert repr(again.rows) == repr(first.rows)
    assert tiny.same(before, tiny.weights(tmp_path / "run"))


def test_resuming_longer(photos, tmp_path):
    tiny.go(photos, tmp_path / "run", epochs=1)
    result = tiny.go_on(tmp_path / "run", epochs=2)
    assert [row["step"] for row in result.rows] == [0, 5, 10]


def test_a_run_of_so_many_steps_resumes_longer_either_way(photos, tmp_path, capsys):
    tiny.go(photos, tmp_path / "run", steps=2)
    training.train(training.resumed(tmp_path / "run"), resume=True)
    assert "it is done; to train on, --steps N" in " ".join(capsys.readouterr().out.split())
    assert tiny.go_on(tmp_path / "run", steps=4).rows[-1]["step"] == 4
    assert tiny.go_on(tmp_path / "run", epochs=2).rows[-1]["step"] == 10


def test_what_was_changed_on_the_way_stays_changed(photos, tmp_path):
    tiny.go(photos, tmp_path / "run", epochs=1)

    def die(rank):
        tiny.arm("step", 3)
        tiny.go_on(tmp_path / "run", epochs=3, lr=0.5)

    assert tiny.forked(die) == [-signal.SIGKILL]
    kept = training.resumed(tmp_path / "run")
    assert (kept.epochs, kept.lr) == (3, 0.5)
    assert tiny.go_on(tmp_path / "run").rows[-1]["step"] == 15


def test_pictures_may_be_moved(photos, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(photos, here)
    tiny.go(here, tmp_path / "run", epochs=1)
    here.rename(there)
    with pytest.raises(ValueError, match=f"{here} is no folder: give --data"):
        training.resumed(tmp_path / "run")
    tiny.go_on(tmp_path / "run", data=str(there), epochs=2)
    assert tiny.go_on(tmp_path / "run", epochs=3).rows[-1]["step"] == 15
    with pytest.raises(ValueError, match="other pictures than the run"):
        tiny.go_on(tmp_path / "run", data=str(tiny.photographs(tmp_path / "other")))


def test_classes_of_other_names_are_refused(tmp_path):
    photos = tiny.photographs(tmp_path / "photos")
    tiny.go(photos, tmp_path / "run", epochs=1)
    for part in ("train", "test"):
        (photos / part / "class1").rename(photos / part / "zebra")
    with pytest.raises(ValueError, match="other classes than the run"):
        tiny.go_on(tmp_path / "run", epochs=2)


def test_what_a_resumed_run_cannot_change(photos, tmp_path):
    tiny.go(photos, tmp_path / "run", epochs=1)
    with pytest.raises(ValueError, match="this run has batch: 6, which a resumed run keeps"):
        training.resumed(tmp_path / "run", batch=8)
    with pytest.raises(ValueError, match="holds no run"):
        training.resumed(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds a run: --resume"):
        tiny.go(photos, tmp_path / "run")


def test_pictures_that_a_kill_prevented_are_drawn(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_draw", DRAW)
    tiny.go(photos, tmp_path / "run", epochs=1)
    (tmp_path / "run" / "confusion.png").unlink()
    tiny.go_on(tmp_path / "run")
    assert (tmp_path / "run" / "confusion.png").is_file()


def test_relative_files_are_found_from_elsewhere(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.go(photos, tmp_path / "first", epochs=1)
    Path("plan.yaml").write_text('"*": {method: galerkin, grid: 3}\n')
    files = {"weights": "first/best.pt", "plan": "plan.yaml"}
    tiny.go(photos, tmp_path / "run", epochs=1, **files)
    training.resumed(tmp_path / "run", **files)  # is no change
    monkeypatch.chdir(photos)
    for name in ("last.pt", "previous.pt"):
        (tmp_path / "run" / name).unlink()  # as if killed before anything was saved
    assert tiny.go_on(tmp_path / "run").rows[-1]["step"] == 5


def test_a_relative_folder_is_found_from_elsewhere(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(photos.parent)
    tiny.go("photos", tmp_path / "run", epochs=1)
    assert training.resumed(tmp_path / "run", data="photos").data == str(photos)
    monkeypatch.chdir(tmp_path)
    tiny.go_on(tmp_path / "run")


def test_changed_pictures_are_told(tmp_path, capsys):
    photos = tiny.photographs(tmp_path / "photos")
    tiny.go(photos, tmp_path / "run", epochs=1)
    os.utime(photos / "train" / "class0" / "0.png", (1, 1))
    train(training.resumed(tmp_path / "run"), resume=True)
    assert "pictures have changed" in capsys.readouterr().out


def test_a_damaged_checkpoint_gives_way_to_the_one_before(photos, tmp_path, capsys):
    tiny.go(photos, tmp_path / "whole")
    tiny.go(photos, tmp_path / "run")
    last = tmp_path / "run" / "last.pt"
    last.write_bytes(last.read_bytes()[:-200])
    train(training.resumed(tmp_path / "run"), resume=True)
    assert "last.pt is damaged" in (said := capsys.readouterr().out)
    assert "going on from previous.pt, step 10" in said
    assert tiny.same(tiny.weights(tmp_path / "run"), tiny.weights(tmp_path / "whole"))


@pytest.mark.parametrize("rename", [1, 2, 3, 4])
def test_killed_again_after_a_damaged_checkpoint(photos, tmp_path, rename):
    whole, out = tmp_path / "whole", tmp_path / "run"
    tiny.go(photos, whole)
    shutil.copytree(whole, out)
    (out / "last.pt").write_bytes((out / "last.pt").read_bytes()[:-200])

    def die(rank):
        tiny.arm("rename", rename)
        tiny.go_on(out)

    assert tiny.forked(die) == [-signal.SIGKILL]
    tiny.go_on(out)
    assert tiny.same(tiny.weights(out), tiny.weights(whole))


def test_weights_alone_cannot_be_gone_on_from(photos, tmp_path):
    out = tmp_path / "run"
    tiny.go(photos, out, epochs=1)
    shutil.copy(out / "best.pt", out / "last.pt")
    with pytest.raises(ValueError, match="no run to go on"):
        tiny.go_on(out)


def test_a_full_disk_leaves_the_last_good_state(photos, tmp_path, monkeypatch):
    tiny.go(photos, tmp_path / "whole")
    written, fsync = [], os.fsync

    def full(handle):
        written.append(handle)
        if len(written) == 11:  # plan and options are the first two
            raise OSError(28, "No space left on device")
        return fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(checkpoint.NotWritten, match="No space left on device; .* is whole"):
        tiny.go(photos, tmp_path / "run")
    monkeypatch.setattr(os, "fsync", fsync)
    assert 0 < torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] < 15
    tiny.go_on(tmp_path / "run")
    assert tiny.same(tiny.weights(tmp_path / "run"), tiny.weights(tmp_path / "whole"))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_picture_is_named(tmp_path, workers):
    photos = tiny.photographs(tmp_path / "photos")
    bad = photos / "train" / "class1" / "4.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(BadPicture, match=r"class1/4\.png: .*; then go on with: .* --resume"):
        tiny.go(photos, tmp_path / "run", workers=workers)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["step"] == 0


def test_a_label_out_of_range_is_named(tmp_path):
    scenes = tiny.scenes(tmp_path / "scenes")
    Image.new("L", (tiny.SIZE, tiny.SIZE), 7).save(scenes / "trainannot" / "3.png")
    with pytest.raises(ValueError, match=r"3\.png.* 7 "):
        tiny.go(scenes, tmp_path / "run")

"""gradfilter-device: what goes wrong around a run is told in one line."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tiny
from on_device import called, module, refused, run

from gradfilter.recipes import interrupts as recipes


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return tiny.photographs(tmp_path_factory.mktemp("device") / "photos", each=3)


@pytest.fixture(scope="module")
def trained(folder, photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("device") / "run"
    assert run("train", photos, "--model", folder, "--run", out).returncode == 0
    return out


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_the_disk_does_not_give_is_not_damaged(trained, number, monkeypatch):
    """The one before is no stand-in for it, and nobody should remove it."""
    checkpoint, path = module("checkpoint"), trained / "last.npz"

    def failing(file):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(np, "load", failing)
    with pytest.raises(module("exported").Unusable) as told:
        checkpoint.latest(trained)
    assert str(told.value) == f"cannot read {path}: {os.strerror(number)}"


def test_a_folder_in_the_place_of_a_checkpoint(folder, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "run")
    (out / "last.npz").unlink()
    (out / "last.npz").mkdir()
    done = run("status", "--model", folder, "--run", out)
    assert refused(done, "last.npz: Is a directory")


def other_tensors(out):
    """A whole checkpoint whose tensors are not those of the network."""
    checkpoint = module("checkpoint")
    values, about = checkpoint.load(out / "last.npz")
    values["0.weight"] = values["0.weight"][:1]
    checkpoint.save(out / "last.npz", values, about)


def other_type(out):
    checkpoint = module("checkpoint")
    values, about = checkpoint.load(out / "last.npz")
    checkpoint.save(out / "last.npz", values | {"0.bias": values["0.bias"].astype(float)}, about)


def no_state(out):
    shutil.copy(out / "best.npz", out / "last.npz")


def no_options(out):
    checkpoint = module("checkpoint")
    values, about = checkpoint.load(out / "last.npz")
    checkpoint.save(out / "last.npz", values, {"export": about["export"]})


@pytest.mark.parametrize(
    "change, why",
    [
        (other_tensors, "does not fit the network: 0.weight"),
        (other_type, "does not fit the network: 0.bias"),
        (no_state, "does not fit the network: momentum."),
        (no_options, "is no checkpoint of a run"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(folder, photos, trained, change, why, tmp_path):
    out = shutil.copytree(trained, tmp_path / "run")
    change(out)
    for command in (("train", photos), ("status",)):
        assert refused(run(*command, "--model", folder, "--run", out), why)


def test_predict_refuses_parameters_that_do_not_fit(folder, photos, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "run")
    other_tensors(out)
    shutil.copy(out / "last.npz", out / "best.npz")
    picture = sorted((photos / "test").rglob("*.png"))[0]
    done = run("predict", picture, "--model", folder, "--run", out)
    assert refused(done, "does not fit the network: 0.weight")


def test_a_run_that_is_not_there_is_told(folder, tmp_path):
    done = run("status", "--model", folder, "--run", tmp_path / "nope")
    assert refused(done, "there is no run in") and done.stdout == ""
    assert "not begun" in run("status", "--model", folder).stdout
    assert not (tmp_path / "nope").exists()


def test_a_graph_that_cannot_be_read_is_told(folder, monkeypatch, capsys):
    device = module("exported")

    def refusing(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(device, "open", refusing, raising=False)
    assert module("cli").main(["status", "--model", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "train.onnx: Permission denied" in told


def test_a_manifest_that_cannot_be_read_is_told_in_words(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "manifest.json").unlink()
    (other / "manifest.json").mkdir()
    done = run("status", "--model", other)
    assert refused(done, "manifest.json cannot be read: Is a directory\n")


HOLDING = """
import sys
from pathlib import Path
from gradfilter_device.locking import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_is_for_one_process_at_a_time(folder, photos, trained, tmp_path):
    out = tmp_path / "run"
    line = ("train", photos, "--model", folder, "--run", out, "--threads", 1)
    _, environment = called()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(out)], env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "held\n"
    assert refused(run(*line), f"the run in {out} is in use by another process")
    assert not (out / "last.npz").exists()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert run(*line).returncode == 0  # the lock went with its process


def test_a_run_that_has_ended_may_be_opened_again(folder, photos, tmp_path):
    training, model = module("training"), module("exported").Exported(folder)
    options = training.Options.of(model.manifest["recipe"])
    first = training.Run(model, photos, tmp_path, options, 1)
    with pytest.raises(module("exported").Unusable, match="in use by another process"):
        training.Run(model, photos, tmp_path, options, 1)
    first.go(5.0)
    assert training.Run(model, photos, tmp_path, options, 1).step == first.step


STRICT = {"PYTHONIOENCODING": "utf-8:strict"}


def test_names_that_are_no_text_are_told(folder, photos, tmp_path):
    """As cameras and old disks leave them."""
    data, out = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "run"
    odd = os.fsencode(data / "train" / "class0") + b"/\xff.png"
    with open(odd, "wb") as file:
        file.write(b"no picture")
    line = ("--model", folder, "--run", out, "--threads", 1)
    for arguments in (("train", data, *line), ("status", *line[:-2]), ("predict", odd, *line)):
        command, environment = called(*(a for a in arguments if a is not odd))
        if odd in arguments:
            shutil.copy(sorted((photos / "test").rglob("*.png"))[0], odd)
            command.insert(4, odd)
        done = subprocess.run(command, env=environment | STRICT, capture_output=True)
        assert done.returncode == 0, done.stderr
        if arguments[0] != "train":
            assert b"\\udcff.png" in done.stdout


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_output_stops_nothing(folder, photos, trained, closed, tmp_path):
    out = tmp_path / "run"
    command, environment = called("train", photos, "--model", folder, "--run", out, "--threads", 1)
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *command]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (out / "log.csv").read_text() == (trained / "log.csv").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
def test_a_full_disk_under_the_output_is_told_and_the_run_is_saved(folder, photos, tmp_path):
    line = ("--model", folder, "--run", tmp_path / "run")
    for arguments in (("train", photos, *line), ("status", *line), ("self-test", *line[:2])):
        command, environment = called(*arguments)
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert refused(done, "No space left on device")
    assert "accuracy" in run("status", *line).stdout


@pytest.fixture
def hangup():
    """As a terminal starts a program; `nohup` has the signal ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_at_once(number):
    interrupts = module("interrupts").interrupts
    with interrupts() as asked:
        signal.raise_signal(number)
        assert asked == [number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("interrupts", [module("interrupts").interrupts, recipes.interrupts])
def test_a_lost_connection_is_nothing_under_nohup(interrupts):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupts() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert asked == []
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_pipe_among_the_pictures_is_skipped(folder, photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    os.mkfifo(data / "train" / "class0" / "pipe.png")
    line = ("train", data, "--model", folder, "--run", tmp_path / "run", "--memory-limit", 4000)
    done = run(*line, timeout=60)
    assert done.returncode == 0 and "pipe.png: not a regular file" in done.stderr

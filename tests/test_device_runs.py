"""gradfilter-device: runs that are stopped, limited or asked for the impossible."""

import hashlib
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
import torch
from on_device import SOURCE, called, exported, module, refused, run, same

MIB = 2**20


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return tiny.photographs(tmp_path_factory.mktemp("device") / "photos", each=10)


@pytest.fixture(scope="module")
def adamw(tmp_path_factory, photos):
    """Exported with AdamW, and a run of it that nothing stopped."""
    place = tmp_path_factory.mktemp("device")
    model = exported(place / "adamw", photos, kind=torch.optim.AdamW, lr=0.3, epochs=20)
    done = run("train", photos, "--model", model, "--run", place / "run", "--threads", 1)
    assert done.returncode == 0, done.stderr
    return model, place / "run", done.stdout


def test_adamw_learns(adamw):
    _, out, told = adamw
    rows = [line.split(",") for line in (out / "log.csv").read_text().split()[1:]]
    assert float(rows[-1][2]) < 0.5 * float(rows[0][2]) and float(rows[-1][3]) > 0.9, told
    with np.load(out / "last.npz") as file:
        assert file["step"] == 20 * 8  # the optimizer's own count


def written(path) -> int:
    """When a checkpoint was written; while the next takes its place there is none for a moment."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize(
    "number, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_a_run_that_is_stopped_ends_with_the_same_bits(adamw, photos, number, code, tmp_path):
    """In the middle of a step half of the state is new: that is never what is saved."""
    model, whole, _ = adamw
    out = tmp_path / "run"
    arguments = ("train", photos, "--model", model, "--run", out, "--threads", 1)
    command, environment = called(*arguments, "--save-every", 0)
    for _ in range(3):
        before = written(out / "last.npz")
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3000):
            if written(out / "last.npz") > before:
                break
            time.sleep(0.002)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
        assert process.returncode == code, told
        assert number == signal.SIGKILL or told == "saved; the same command goes on\n"
    again = run(*arguments)
    assert again.returncode == 0 and "going on after step" in again.stdout
    assert same(out / "last.npz", whole / "last.npz")
    assert (out / "log.csv").read_text() == (whole / "log.csv").read_text()


class Stopping:
    """A session in which Ctrl-C is pressed in the middle of a step."""

    def __init__(self, session, at: int):
        self.session, self.left = session, at

    def io_binding(self):
        return self.session.io_binding()

    def run_with_iobinding(self, binding) -> None:
        self.session.run_with_iobinding(binding)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_the_middle_of_a_step(adamw, photos, tmp_path):
    training, (path, whole, _) = module("training"), adamw
    model = module("exported").Exported(path)
    options = training.Options.of(model.manifest["recipe"])
    run = training.Run(model, photos, tmp_path, options, 1)
    run.stepper.session = Stopping(run.stepper.session, 11)
    with pytest.raises(KeyboardInterrupt, match="saved"):
        run.go(5.0)
    assert run.step == 11
    again = training.Run(model, photos, tmp_path, options, 1)
    again.go(5.0)
    assert same(tmp_path / "last.npz", whole / "last.npz")


def test_both_checkpoints_torn_is_told(adamw, photos, tmp_path):
    model, whole, _ = adamw
    for name in ("last.npz", "previous.npz", "best.npz"):
        data = (whole / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
    assert refused(run("train", photos, "--model", model, "--run", tmp_path), "damaged")
    assert refused(run("status", "--model", model, "--run", tmp_path), "damaged")
    picture = sorted((photos / "test").rglob("*.png"))[0]
    assert refused(run("predict", picture, "--model", model, "--run", tmp_path), "damaged")


def test_a_checkpoint_with_any_byte_wrong_is_torn_or_whole(adamw):
    checkpoint, path = module("checkpoint"), adamw[1] / "best.npz"
    data, random = path.read_bytes(), np.random.RandomState(0)
    torn = path.with_name("torn.npz")
    found = []
    for place in random.randint(len(data), size=300):
        torn.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        found.append(checkpoint.load(torn))
    torn.unlink()
    assert found.count(None) > 200


def test_a_full_disk_is_told_and_leaves_the_checkpoint(folder, photos, tmp_path):
    out = tmp_path / "run"
    arguments = ("train", photos, "--model", folder, "--run", out, "--threads", 1)
    first = run(*arguments, "--save-every", 0, "--epochs", 2)
    assert first.returncode == 0
    for name in ("best.npz", "log.csv"):
        (out / name).unlink()
    shutil.move(out / "previous.npz", out / "last.npz")  # the last step is to be taken again

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    before = (out / "last.npz").read_bytes()
    done = run(*arguments, preexec_fn=full)
    assert refused(done, "cannot write")
    assert (out / "last.npz").read_bytes() == before
    assert {p.name for p in out.iterdir()} == {"last.npz", "lock"}
    assert run(*arguments).returncode == 0
    files = {"last.npz", "previous.npz", "best.npz", "log.csv", "lock"}
    assert {p.name for p in out.iterdir()} == files


def test_a_run_has_a_folder_before_it_takes_time(folder, photos, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    done = run("train", photos, "--model", folder, "--run", tmp_path / "file")
    assert refused(done, "cannot make the folder") and "epoch" not in done.stdout


def test_a_loss_that_is_no_number_ends_the_run(folder, photos, tmp_path):
    out = tmp_path / "run"
    done = run("train", photos, "--model", folder, "--run", out, "--lr", 1e30)
    assert refused(done, "stopped being a number at step 2")
    # one step in all: its loss is a number, what comes out of it is not
    once = run("train", photos, "--model", folder, "--run", out, "--lr", 1e40, "--batch", 30)
    assert once.returncode == 2 and "0.weight stopped being a number at step 1" in once.stderr
    assert [p.name for p in out.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    "option, value",
    [
        ("--epochs", "0"), ("--batch", "0"), ("--lr", "nan"), ("--lr", "-1"), ("--warmup", "2"),
        ("--memory-limit", "0"), ("--save-every", "x"), ("--threads", "-1"),
    ],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(folder, photos, option, value, tmp_path):
    given = f"{option}={value}"
    done = run("train", photos, "--model", folder, "--run", tmp_path / "run", given)
    assert refused(done, f"argument {option}")


def test_a_run_that_goes_on_keeps_its_options_and_pictures(folder, photos, tmp_path):
    data, out = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "run"
    arguments = ("train", data, "--model", folder, "--run", out, "--epochs", 1)
    assert run(*arguments).returncode == 0
    assert run(*arguments).returncode == 0
    assert run("train", data, "--model", folder, "--run", out).returncode == 0
    others = {"epochs": 2, "batch": 5, "lr": 0.2, "seed": 3}
    for name, value in others.items():
        done = run(*arguments, f"--{name}", value)
        assert refused(done, f"started with {name}")
    moved = shutil.move(data, tmp_path / "moved")
    assert run("train", moved, "--model", folder, "--run", out).returncode == 0
    sorted((moved / "train").rglob("*.png"))[0].unlink()
    done = run("train", moved, "--model", folder, "--run", out)
    assert refused(done, "began with other pictures")


def test_other_pictures_to_test_on_are_refused(folder, photos, tmp_path):
    data, out = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "run"
    arguments = ("train", data, "--model", folder, "--run", out)
    assert run(*arguments).returncode == 0
    shutil.copy(sorted((data / "test").rglob("*.png"))[0], data / "test" / "class0" / "more.png")
    assert refused(run(*arguments), "began with other pictures")


def test_a_run_of_a_version_that_knew_only_what_it_trained_on_goes_on(folder, photos, tmp_path):
    checkpoint, path = module("checkpoint"), tmp_path / "last.npz"
    arguments = ("train", photos, "--model", folder, "--run", tmp_path)
    assert run(*arguments).returncode == 0
    values, about = checkpoint.load(path)
    train, _ = module("folders").open_folder(photos, ["class0", "class1", "class2"], False)
    told = [(file.relative_to(photos).as_posix(), label) for file, label in train]
    about["pictures"] = hashlib.sha256(repr(told).encode()).hexdigest()
    checkpoint.save(path, values, about)
    assert run(*arguments).returncode == 0


def test_nobody_reads_what_is_told(folder, photos, tmp_path):
    """`| head` ends a command quietly; what was trained by then is saved."""
    line = ("--model", folder, "--run", tmp_path / "run")
    for arguments in (("train", photos, *line), ("status", *line), ("self-test", *line[:2])):
        reader, writer = os.pipe()
        os.close(reader)
        command, environment = called(*arguments)
        done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b""), arguments
    assert "accuracy" in run("status", *line).stdout


def test_options_are_offered_where_they_mean_something(folder):
    assert refused(run("status", "--model", folder, "--threads", 1), "--threads")
    told = " ".join(run("train", "--help").stdout.split())
    assert "of the order and the cuts (default: as exported, else 0)" in told


def of_size(fixed: int, each: int, monkeypatch):
    """Steps of a process that has `fixed` MB, and `each` for an image; and what was tried."""
    memory = module("memory")
    tried, most = [], [fixed * MIB]

    def step(count: int) -> None:
        tried.append(count)
        most[0] = (fixed + count * each) * MIB

    monkeypatch.setattr(memory, "peak", lambda: most[0])
    monkeypatch.setattr(memory, "resident", lambda: fixed * MIB)
    monkeypatch.setattr(memory, "forget", lambda: None)
    return memory, step, tried


@pytest.mark.parametrize(
    "limit, batch", [(111, 1), (120, 1), (130, 2), (158, 5), (421, 29), (422, 30), (4000, 30)]
)
def test_the_largest_batch_that_keeps_a_limit(limit, batch, monkeypatch):
    memory, step, tried = of_size(100, 10, monkeypatch)
    assert memory.fitting(limit * MIB, 30, False, step) == batch
    assert max(tried) == batch  # nothing larger was even tried
    assert 100 + 10 * batch <= max(0.95 * limit, 110)


def test_a_limit_that_one_step_exceeds(monkeypatch):
    memory, step, _ = of_size(100, 10, monkeypatch)
    unusable = module("exported").Unusable
    with pytest.raises(unusable, match="1 images takes 110 MB"):
        memory.fitting(109 * MIB, 30, False, step)
    with pytest.raises(unusable, match="smaller batches cannot be had"):
        memory.fitting(200 * MIB, 30, True, step)
    assert memory.fitting(401 * MIB, 30, True, step) == 30


def test_a_memory_limit_makes_batches_smaller(photos, tmp_path, monkeypatch):
    """A real run: the limit lies between a step of one image and one of the batch asked for."""
    monkeypatch.setattr("on_device.SIZE", 160)
    model = exported(tmp_path / "exported", photos, batch=None, epochs=1)
    arguments = ("train", photos, "--model", model, "--threads", 1, "--batch", 30)
    one = run(*arguments, "--run", tmp_path / "none", "--memory-limit", 8)
    least = int(one.stderr.partition("takes ")[2].split()[0])
    limited = (*arguments, "--run", tmp_path / "run", "--memory-limit", least + 20)
    first = run(*limited)
    assert first.returncode == 0, first.stderr
    found = int(first.stdout.partition("batches of ")[2].split()[0])
    assert 1 <= found < 30 and f"instead of 30, for {least + 20} MB" in first.stdout
    about = run("status", "--model", model, "--run", tmp_path / "run").stdout
    assert f"batches of {found}," in about
    again = run(*limited)  # the same command goes on
    assert again.returncode == 0 and "going on" in again.stdout, again.stderr


def limited(folder, photos, out, monkeypatch, above: int):
    """A run with a limit of 100 MB that takes more from its step number `above` on."""
    training, memory = module("training"), module("memory")
    model = module("exported").Exported(folder)
    found = training.Run(model, photos, out, training.Options.of(model.manifest["recipe"]), 1)
    found.most = 100 * MIB
    monkeypatch.setattr(memory, "peak", lambda: (50 if found.step < above else 150) * MIB)
    return found


def test_a_memory_stop_at_the_end_of_an_epoch_keeps_its_row(folder, photos, tmp_path, monkeypatch):
    found = limited(folder, photos, tmp_path, monkeypatch, above=8)
    assert (found.per_epoch, found.total) == (8, 8)
    unusable = module("exported").Unusable
    with pytest.raises(unusable, match="step 8 or the test after it took 150 MB"):
        found.go(5.0)
    assert [row["step"] for row in found.rows] == [8]
    again = run("train", photos, "--model", folder, "--run", tmp_path, "--threads", 1)
    assert again.returncode == 0 and "done: accuracy" in again.stdout, again.stderr


def test_a_memory_stop_within_an_epoch_goes_on(folder, photos, tmp_path, monkeypatch):
    found = limited(folder, photos, tmp_path, monkeypatch, above=3)
    with pytest.raises(module("exported").Unusable, match="step 3 took 150 MB"):
        found.go(5.0)
    again = run("train", photos, "--model", folder, "--run", tmp_path, "--threads", 1)
    assert again.returncode == 0 and "going on after step 3" in again.stdout, again.stderr


def test_the_memory_of_a_test_counts(folder, photos, tmp_path, monkeypatch):
    """A held-out picture that is larger than all that were trained on."""
    found = limited(folder, photos, tmp_path, monkeypatch, above=9)
    memory, test = module("memory"), module("training").Tester.metrics

    def large(*arguments):
        monkeypatch.setattr(memory, "peak", lambda: 200 * MIB)
        return test(*arguments)

    monkeypatch.setattr(module("training").Tester, "metrics", large)
    with pytest.raises(module("exported").Unusable, match="took 200 MB, above the limit of 100"):
        found.go(5.0)


@pytest.mark.parametrize("epochs, limit", [(1, ()), (1, ("--memory-limit", 4000)), (2, ())])
def test_a_run_that_was_saved_before_its_test(folder, photos, epochs, limit, tmp_path):
    """As a memory stop of an earlier version left it: an epoch is over, and has no row."""
    arguments = ("train", photos, "--model", folder, "--threads", 1, "--epochs", epochs)
    assert run(*arguments, "--run", tmp_path / "whole").returncode == 0
    training, out = module("training"), tmp_path / "run"
    model = module("exported").Exported(folder)
    options = training.Options.of(model.manifest["recipe"] | {"epochs": epochs})
    stopped = training.Run(model, photos, out, options, 1)

    def stop():
        stopped._save()
        raise KeyboardInterrupt("before the test")

    stopped._evaluate = stop
    with pytest.raises(KeyboardInterrupt, match="before the test"):
        stopped.go(5.0)
    again = run(*arguments, *limit, "--run", out)
    assert again.returncode == 0 and "going on after step 8" in again.stdout, again.stderr
    assert same(out / "last.npz", tmp_path / "whole" / "last.npz")
    assert (out / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text()


def test_memory_is_this_processs_own(folder):
    """getrusage would tell that of the process that started it."""
    much = bytearray(os.urandom(MIB) * 600)
    told = run("self-test", "--model", folder, "--threads", 1).stdout
    assert len(much) == 600 * MIB and int(told.split()[-5]) < 300, told


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_free_memory_is_kept_for_the_next_step_until_it_is_released():
    script = """
import numpy as np
from gradfilter_device import memory
memory.keep()
before = memory.resident()
np.ones(64 * memory.MIB, np.uint8)  # gone at once
kept = memory.resident() - before
memory.release()
print(kept // memory.MIB, (memory.resident() - before) // memory.MIB)
"""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    told = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)
    kept, left = map(int, told.split())
    assert kept >= 60 and left < 8

"""gradfilter-device: an exported network trained where there is no torch."""

import json
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import tiny
from on_device import SOURCE, called, changed, exported, module, run, same, signed


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return tiny.photographs(tmp_path_factory.mktemp("device") / "photos", each=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, photos):
    """A small network, exported."""
    return exported(tmp_path_factory.mktemp("device") / "exported", photos)


@pytest.fixture(scope="module")
def trained(folder, photos, tmp_path_factory):
    """A run from its beginning to its end, and what it printed."""
    out = tmp_path_factory.mktemp("device") / "run"
    done = run("train", photos, "--model", folder, "--run", out, "--threads", 1)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_it_learns_without_torch(trained):
    out, told = trained
    accuracy = [
        float(line.rpartition(",")[2]) for line in (out / "log.csv").read_text().split()[1:]
    ]
    assert len(accuracy) == 3
    assert max(accuracy) > 0.9, told
    assert "done: accuracy" in told


def test_the_self_test_compares_with_pytorch(folder, tmp_path):
    assert "ok: losses" in run("self-test", "--model", folder).stdout
    other = shutil.copytree(folder, tmp_path / "other")
    about = json.loads((other / "manifest.json").read_text())
    about["check"]["losses"][2] += 0.1
    (other / "manifest.json").write_text(signed(about))
    wrong = run("self-test", "--model", other)
    assert wrong.returncode == 2 and "something else" in wrong.stderr


def test_a_killed_run_ends_with_the_same_bits(folder, photos, trained, tmp_path):
    out = tmp_path / "run"
    arguments = (
        "train",
        photos,
        "--model",
        folder,
        "--run",
        out,
        "--threads",
        1,
        "--save-every",
        0,
    )
    command, environment = called(*arguments)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    for _ in range(600):
        if (out / "last.npz").exists() or process.poll() is not None:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    again = run(*arguments)
    assert again.returncode == 0 and "going on after step" in again.stdout
    assert same(out / "last.npz", trained[0] / "last.npz")
    assert (out / "log.csv").read_text() == (trained[0] / "log.csv").read_text()


def test_a_torn_checkpoint_falls_back_to_the_one_before(folder, photos, trained, tmp_path):
    out = shutil.copytree(trained[0], tmp_path / "run")
    last = (out / "last.npz").read_bytes()
    (out / "last.npz").write_bytes(last[: len(last) // 2])
    again = run("train", photos, "--model", folder, "--run", out, "--threads", 1)
    assert again.returncode == 0 and "going on after step" in again.stdout
    assert same(out / "last.npz", trained[0] / "last.npz")


def test_broken_pictures_are_skipped_and_told(folder, photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    first = sorted((data / "train").rglob("*.*"))[0]
    first.write_bytes(b"no picture")
    out = tmp_path / "run"
    done = run("train", data, "--model", folder, "--run", out, "--epochs", 1)
    assert done.returncode == 0 and first.name in done.stderr and "1 broken" in done.stdout
    assert first.name in run("status", "--model", folder, "--run", out).stdout


def test_a_fixed_batch_is_filled_up(photos, tmp_path):
    folder = exported(tmp_path / "exported", photos, batch=7)
    done = run("train", photos, "--model", folder, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert "images 3x32x32, 7 a step\n" in run("status", "--model", folder).stdout
    other = run("train", photos, "--model", folder, "--batch", 5)
    assert other.returncode == 2 and "batches of 7" in other.stderr


def test_predict_and_status(folder, photos, trained):
    picture = sorted((photos / "test").rglob("*.*"))[0]
    found = run("predict", picture, "--model", folder, "--run", trained[0])
    assert found.returncode == 0 and found.stdout.count("%") == 3
    assert found.stdout.split(": ")[1].startswith(picture.parent.name)
    told = run("status", "--model", folder, "--run", trained[0]).stdout
    assert "accuracy" in told and "batches of 4" in told
    assert "images 3x32x32, any number a step\n" in told


def test_a_memory_limit_makes_batches_smaller_or_is_refused(folder, photos, tmp_path):
    low = run("train", photos, "--model", folder, "--run", tmp_path / "a", "--memory-limit", 8)
    assert low.returncode == 2 and "the limit is 8 MB" in low.stderr
    high = run(
        "train", photos, "--model", folder, "--run", tmp_path / "b", "--memory-limit", 4000,
        "--epochs", 1,
    )  # fmt: skip
    assert high.returncode == 0 and "instead of" not in high.stdout


def test_a_damaged_folder_is_refused(folder, photos, tmp_path):
    def flipped(data: bytes) -> bytes:
        return data[:100] + bytes([data[100] ^ 1]) + data[101:]

    for name in ("train.onnx", "predict.onnx", "constants.bin", "parameters.npz"):
        other = changed(folder, tmp_path / name, name, flipped)
        refused = run("train", photos, "--model", other)
        assert refused.returncode == 2 and name in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_manifest_that_does_not_fit_the_graph_is_refused(folder, photos, tmp_path):
    def renamed(data: bytes) -> bytes:
        about = json.loads(data)
        moves = about["check"]["moves"]
        for n in list(about["parameters"]):
            about["parameters"][f"x{n}"] = about["parameters"].pop(n)
            moves[f"x{n}"] = moves.pop(n)
        return signed(about).encode()

    def larger(data: bytes) -> bytes:
        about = json.loads(data)
        about["images"] = [None, 3, 64, 64]
        return signed(about).encode()

    for i, change in enumerate((renamed, larger)):
        other = changed(folder, tmp_path / str(i), "manifest.json", change)
        refused = run("train", photos, "--model", other)
        assert refused.returncode == 2 and "does not fit" in refused.stderr
    torn = changed(folder, tmp_path / "torn", "manifest.json", lambda data: data[:50])
    assert run("status", "--model", torn).returncode == 2


def test_mistakes_are_told_in_one_line(folder, photos, tmp_path):
    nothing = run("train", tmp_path / "none", "--model", folder)
    assert nothing.returncode == 2 and nothing.stderr.count("\n") == 1
    nowhere = run("status", "--model", tmp_path)
    assert nowhere.returncode == 2 and "no exported network" in nowhere.stderr
    strange = tmp_path / "photos" / "zebra"
    strange.mkdir(parents=True)
    shutil.copy(sorted(photos.rglob("*.*"))[-1], strange)
    other = run("train", tmp_path / "photos", "--model", folder)
    assert other.returncode == 2


def test_the_distribution_needs_no_torch():
    lines = (SOURCE.parent / "pyproject.toml").read_text().splitlines()
    (needs,) = (line for line in lines if line.startswith("dependencies"))
    assert "torch" not in needs and "onnxruntime" in needs


def test_the_same_pictures_are_held_out_as_by_gradfilter_train(photos):
    device = module("folders")
    from gradfilter.recipes.datasets import folder as recipes

    files = recipes.class_files(photos, "train")
    assert device.class_files(photos, "train") == files
    assert device.hold_out(files) == recipes.hold_out(files)
    assert (device.PICTURES, device.TESTS, device.SHARE) == (
        recipes.PICTURES, recipes.TESTS, recipes.SHARE,
    )  # fmt: skip


def test_a_picture_looks_as_in_gradfilter_train(photos):
    device = module("photos")
    from gradfilter.recipes import augment
    from gradfilter.recipes.datasets import decode

    path = sorted(photos.rglob("*.*"))[0]
    for size in (24, 80):
        seen, _ = augment.evaluation("classification", size)(decode.picture(path), 0)
        found = device.cut(device.picture(path), (size, size), False)
        assert np.abs(found.astype(int) - seen.numpy().astype(int)).max() <= 1

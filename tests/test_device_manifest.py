"""gradfilter-device: manifests that were changed, and what the self-test finds."""

import json
import shutil
from hashlib import sha256

import numpy as np
import pytest
import tiny
from on_device import changed, exported, module, refused, run, signed

from gradfilter.export import folder as manifests


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return tiny.photographs(tmp_path_factory.mktemp("device") / "photos", each=3)


def rewritten(**values):
    """A change of a manifest."""
    return lambda data: signed(json.loads(data) | values).encode()


def within(key: str, **values):
    """A change of one part of a manifest."""
    return lambda data: rewritten(**{key: json.loads(data)[key] | values})(data)


def moving(name: str, move: list):
    """Another move of a tensor."""
    return lambda data: within("check", moves=json.loads(data)["check"]["moves"] | {name: move})(
        data
    )


@pytest.mark.parametrize(
    "change, why",
    [
        (rewritten(dtype="float64"), "does not fit"),
        (rewritten(outputs=4), "does not fit"),
        (rewritten(targets=[3]), "does not fit"),
        (rewritten(targets=[None, 32, 32]), "its 'targets'"),
        (rewritten(pictures={"classes": ["a"], "mean": [1] * 3, "std": [1] * 3}), "does not fit"),
        (rewritten(pictures={}), "does not fit"),
        (rewritten(images=[None, 3]), "no manifest"),
        (rewritten(parameters=[]), "no manifest"),
        (rewritten(files={}), "no hash of"),
        (rewritten(format="1"), "no manifest"),
        (rewritten(format=1), "format 1"),
        (rewritten(recipe={"momentum": 0.9}), "'momentum'"),
        (rewritten(recipe={"batch": 0}), "batch must be"),
        (rewritten(recipe={"batch": True}), "batch must be"),
        (rewritten(recipe={"batch": 2**31}), "batch must be"),
        (rewritten(recipe={"epochs": 1.5}), "epochs must be"),
        (rewritten(recipe={"lr": "0.1"}), "lr must be"),
        (rewritten(recipe={"lr": True}), "lr must be"),
        (rewritten(recipe={"lr": float("nan")}), "lr must be"),
        (rewritten(recipe={"lr": 10**400}), "lr must be"),
        (rewritten(recipe={"warmup": 2}), "warmup must be"),
        (rewritten(recipe={"warmup": -0.1}), "warmup must be"),
        (rewritten(recipe={"seed": 1.0}), "seed must be a whole number, not 1.0"),
        (rewritten(recipe={"augment": 1}), "augment must be true or false, not 1"),
        (rewritten(recipe={"augment": None}), "augment must be"),
        (lambda data: b"[]", "no manifest"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused(folder, photos, change, why, tmp_path):
    other = changed(folder, tmp_path / "other", "manifest.json", change)
    assert refused(run("train", photos, "--model", other, "--threads", 1), why)


@pytest.mark.parametrize(
    "change, why",
    [
        (within("state", **{"momentum.0.weight": ["a"]}), "its 'state'"),
        (within("state", **{"momentum.0.weight": [-1]}), "its 'state'"),
        (within("state", **{"momentum.0.weight": 3}), "its 'state'"),
        (within("parameters", **{"0.weight": [True]}), "its 'parameters'"),
        (rewritten(images=[None, 3, "32", "32"]), "its 'images'"),
        (rewritten(images=["4", 3, 32, 32]), "its 'images'"),
        (rewritten(images=[0, 3, 32, 32]), "its 'images'"),
        (rewritten(task="segmentation"), "its 'targets'"),
        (rewritten(task="detection"), "its 'task'"),
        (rewritten(outputs=0), "its 'outputs'"),
        (rewritten(optimizer={}), "its 'optimizer'"),
        (rewritten(recipe=[]), "its 'recipe'"),
        (rewritten(recipe=None), "its 'recipe'"),
        (rewritten(check={}), "its 'check'"),
        (within("check", losses=["1.0"]), "its 'check'"),
        (within("check", losses=[]), "its 'check'"),
        (within("check", rate=None), "its 'check'"),
        (within("check", images="2"), "its 'check'"),
        (within("check", moves=None), "its 'check'"),
        (within("check", moves={}), "its 'check'"),
        (moving("0.weight", [1.0] * 4), "its 'check'"),
        (moving("0.weight", ["1"] * 5), "its 'check'"),
        (moving("9.weight", [1.0] * 5), "its 'check'"),
        (within("pictures", mean=None), "it needs 3 of 'mean'"),
        (within("pictures", mean=["1", "2", "3"]), "its 'mean'"),
        (within("pictures", mean=[float("nan")] * 3), "its 'mean'"),
        (within("pictures", std=[1.0, 0, 1.0]), "its 'std'"),
        (within("pictures", std=[1.0, -1, 1.0]), "its 'std'"),
        (within("pictures", std=[10**400] * 3), "its 'std'"),
        (within("pictures", classes=[1, 2, 3]), "its 'classes'"),
        (within("pictures", ignore="255"), "its 'ignore'"),
        (rewritten(pictures=[]), "it needs 3 of 'classes'"),
    ],
)  # fmt: skip
def test_a_manifest_of_other_kinds_is_refused_by_every_command(
    folder, change, why, tmp_path, capsys
):
    other = changed(folder, tmp_path / "other", "manifest.json", change)
    given = {"train": [tmp_path], "predict": [tmp_path / "x.png"], "status": [], "self-test": []}
    for command, arguments in given.items():
        line = [command, *map(str, arguments), "--model", str(other)]
        assert module("cli").main(line) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and why in told


@pytest.mark.parametrize(
    "old, new",
    [(b"127.0", b"126.0"), (b'"class0"', b'"class3"'), (b'"digest": "', b'"digest": "0')],
)
def test_a_manifest_that_was_changed_is_refused(folder, old, new, tmp_path):
    """Each change gives another manifest that could be."""
    other = changed(
        folder, tmp_path / "other", "manifest.json", lambda data: data.replace(old, new)
    )
    assert refused(run("status", "--model", other), "manifest.json was changed or damaged since")


def test_a_manifest_may_be_written_in_another_way(folder, tmp_path):
    """What it says counts."""

    def sorted_anew(data: bytes) -> bytes:
        return json.dumps(json.loads(data), sort_keys=True, indent=4).encode()

    other = changed(folder, tmp_path / "other", "manifest.json", sorted_anew)
    assert run("status", "--model", other).returncode == 0


def test_both_packages_sign_a_manifest_alike():
    about = {"b": [1, 0.1, 1e-30, float("inf")], "a": {"\u00e4": None}, "digest": "of before"}
    expected = manifests.signed({k: v for k, v in about.items() if k != "digest"})["digest"]
    assert module("exported").signature(about) == expected


@pytest.mark.parametrize("mean", [[127.0] * 3, [127.5] * 3])
def test_another_preprocessing_is_another_export(folder, photos, mean, tmp_path):
    out = tmp_path / "run"
    assert run("train", photos, "--model", folder, "--run", out).returncode == 0
    change = within("pictures", mean=mean)
    other = changed(folder, tmp_path / "other", "manifest.json", change)
    done = run("status", "--model", other, "--run", out)
    assert done.returncode == 0 if mean == [127.0] * 3 else refused(done, "of another export")


@pytest.mark.parametrize("recipe, given, taken", [
    ({}, [], True), ({"augment": False}, [], False), ({"augment": True}, [], True),
    ({"augment": False}, ["--augment"], True), ({"augment": True}, ["--no-augment"], False),
])  # fmt: skip
def test_a_recipe_tells_whether_pictures_are_varied(folder, photos, recipe, given, taken, tmp_path):
    change = within("recipe", **recipe)
    other = changed(folder, tmp_path / "other", "manifest.json", change)
    line = ["train", str(photos), "--model", str(other), "--threads", "1", *given]
    assert module("cli").main(line) == 0
    checkpoint = module("checkpoint")
    _, about = checkpoint.load(other / "run" / checkpoint.LAST)
    assert about["options"]["augment"] is taken


def test_an_export_for_programs_of_ones_own_is_tested_too(folder, tmp_path):
    """It does not say how to read pictures."""
    other = changed(folder, tmp_path / "other", "manifest.json", rewritten(pictures=None))
    assert "ok: losses" in run("self-test", "--model", other, "--threads", 1).stdout


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_moves_that_are_not_pytorchs_are_refused(folder, number, tmp_path):
    change = moving("0.weight", [number] * 5)
    other = changed(folder, tmp_path / "other", "manifest.json", change)
    done = run("self-test", "--model", other, "--threads", 1)
    assert refused(done, "do not change 0.weight as PyTorch's do (1 of")


@pytest.mark.parametrize(
    "kind, why", [("float64", "does not fit"), ("object", "cannot be read"), (None, "cannot be")]
)
def test_parameters_of_another_type_are_refused(folder, photos, kind, why, tmp_path):
    """With a hash that is theirs."""
    other = shutil.copytree(folder, tmp_path / "other")
    path = other / "parameters.npz"
    with np.load(path) as file:
        values = {name: file[name] for name in file.files}
    if kind is None:
        path.write_bytes(b"no parameters")
    else:
        np.savez(path, **{name: a.astype(kind) for name, a in values.items()})
    hashes = {"parameters.npz": sha256(path.read_bytes()).hexdigest()}
    manifest = other / "manifest.json"
    manifest.write_bytes(within("files", **hashes)(manifest.read_bytes()))
    for command in (("train", photos), ("self-test",)):
        done = run(*command, "--model", other, "--threads", 1)
        assert refused(done, f"parameters.npz {why}")


def test_a_run_of_another_export_is_refused(folder, photos, tmp_path):
    assert run("train", photos, "--model", folder, "--run", tmp_path / "run").returncode == 0
    other = exported(tmp_path / "other", photos, batch=5)
    picture = sorted((photos / "test").rglob("*.png"))[0]
    for command in (("train", photos), ("predict", picture), ("status",)):
        done = run(*command, "--model", other, "--run", tmp_path / "run")
        assert refused(done, "is of another export")
        assert "epoch" not in done.stdout


def test_predict_without_a_runner_is_refused_in_one_line(folder, photos, tmp_path):
    other = changed(folder, tmp_path / "other", "manifest.json", rewritten(pictures=None))
    picture = sorted((photos / "test").rglob("*.png"))[0]
    assert refused(run("predict", picture, "--model", other), "does not say how to read pictures")


def test_the_self_test_asks_for_scores(folder, tmp_path):
    hashes = json.loads((folder / "manifest.json").read_text())["files"]
    change = within("files", **{"predict.onnx": hashes["train.onnx"]})
    other = changed(folder, tmp_path / "other", "manifest.json", change)
    shutil.copy(other / "train.onnx", other / "predict.onnx")
    assert refused(run("self-test", "--model", other, "--threads", 1), "does not fit predict.onnx")


@pytest.mark.parametrize("scores", [np.zeros((2, 4)), np.zeros((2, 3, 1)), np.full((2, 3), np.nan)])
def test_scores_are_one_number_for_every_class(folder, scores):
    model, selftest = module("exported").Exported(folder), module("selftest")
    selftest.check_scores(model, np.zeros((2, 3)))
    with pytest.raises(module("exported").Unusable, match="does not give numbers"):
        selftest.check_scores(model, scores)

"""gradfilter-device: which files of a folder are pictures of which class."""

import os
import shutil

import pytest
import tiny
from on_device import module
from PIL import Image

from gradfilter.recipes import recording
from gradfilter.recipes.datasets import folder as recipes


@pytest.fixture
def tree(tmp_path):
    """Class folders that hold all that is no picture of theirs, too."""
    root = tmp_path / "photos"

    def put(*names: str):
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(root / name, "PNG")

    put(*(f"{c}/{i}.png" for c in ("cat", "dog") for i in range(6)))
    put("cat/deeper/a.png", "cat/deeper/still/b.PNG", "cat/.thumbnails/c.png", "cat/.hidden.png")
    put(".trash/d.png", "dog/run/curves.png", "dog/run/deeper/e.png", "dog/half/f.png")
    put("run/g.png", "elsewhere.png")
    for place in ("run", "dog/run"):
        for name in (recording.CONFIG, recording.PLAN):
            (root / place / name).write_text("")
    (root / "dog" / "half" / recording.CONFIG).write_text("")  # which alone makes no run
    (root / "empty").mkdir()
    (root / "cat" / "back").symlink_to(root / "cat")
    (root / "dog" / "back").symlink_to(root)
    (tmp_path / "more").mkdir()
    shutil.copy(root / "elsewhere.png", tmp_path / "more" / "h.png")
    (root / "dog" / "more").symlink_to(tmp_path / "more")
    (root / "dog" / "notes.txt").write_text("")
    return root


def test_the_pictures_of_a_folder_are_those_of_gradfilter_train(tree):
    found, expected = module("folders").class_files(tree, ""), recipes.class_files(tree, "")
    assert found == expected
    assert [*found] == ["cat", "dog"] and [len(files) for files in found.values()] == [8, 8]
    train, test = recipes.parts(tree)
    own = module("folders").open_folder(tree, ["cat", "dog"], False)
    for part, files in zip(own, (train, test), strict=True):
        told = [(path.relative_to(tree).as_posix(), label) for path, label in part]
        names = enumerate(sorted(files))
        assert told == [(path, i) for i, name in names for path in files[name]]


def test_what_makes_a_run_is_the_same_for_both():
    assert module("folders").RUN == recipes.RUN


@pytest.mark.parametrize(
    "parts", [("train", "test"), ("Train", "Test"), ("training", "validation"), ("train", "VAL")]
)
def test_parts_are_known_by_the_names_that_gradfilter_train_knows(parts, tmp_path):
    tiny.photographs(tmp_path, each=2)
    for part, name in zip(("train", "test"), parts, strict=True):
        (tmp_path / part).rename(tmp_path / name)
    own = module("folders").open_folder(tmp_path, ["class0", "class1", "class2"], False)
    expected = recipes.parts(tmp_path)
    assert [len(files) for files in own] == [6, 6]
    for examples, files in zip(own, expected, strict=True):
        found = sorted(path.relative_to(tmp_path).as_posix() for path, _ in examples)
        assert found == sorted(f for each in files.values() for f in each)


def test_the_names_of_parts_are_the_same_for_both():
    folders = module("folders")
    assert (folders.TRAINS, folders.TESTS) == (recipes.TRAINS, recipes.TESTS)


def test_classes_without_pictures_are_told(tree, capsys):
    module("folders").open_folder(tree, ["cat", "dog"], False)
    assert capsys.readouterr().err == f"{tree}: no pictures of: empty, run\n"


def test_a_whole_folder_of_classes_tells_nothing(tmp_path, capsys):
    data = tiny.photographs(tmp_path / "photos", each=3)
    module("folders").open_folder(data, ["class0", "class1", "class2"], False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", ["", "cat", "cat/deeper"])
def test_a_folder_that_cannot_be_read_is_refused(tree, place, monkeypatch):
    """Its pictures would be missing from the class, or the class from all."""
    scan = os.scandir

    def refusing(path):
        if os.fspath(path) == os.fspath(tree / place):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(module("exported").Unusable) as told:
        module("folders").open_folder(tree, ["cat", "dog"], False)
    assert str(told.value) == f"cannot read {tree / place}: Permission denied"


@pytest.mark.parametrize("place", ["images", "train"])
def test_a_folder_of_masks_that_cannot_be_read_is_refused(place, tmp_path, monkeypatch):
    def refusing(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(module("exported").Unusable, match="cannot read .*: Permission denied"):
        module("folders").open_folder(tmp_path, [], True)


def test_names_of_classes_that_cannot_be_read_are_told_in_words(tree):
    table = tree / "cat_to_name.json"
    table.write_text("[1]")
    with pytest.raises(module("exported").Unusable, match="should be {folder: name}, but"):
        module("folders").open_folder(tree, ["cat", "dog"], False)

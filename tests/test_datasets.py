"""Pictures in class folders: what is found there, parts of them, caches, fingerprints."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

pytest.importorskip("torchvision")
from painted import save  # noqa: E402

from gradfilter.recipes.datasets import BadPicture, decode, folder, open_data  # noqa: E402
from gradfilter.recipes.datasets import pictures as pictures_module  # noqa: E402


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


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
        save(tmp_path / "photos" / name)
    save(tmp_path / "elsewhere" / "2.png")
    (tmp_path / "photos" / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "cat" / "back").symlink_to(tmp_path / "photos" / "cat")
    data = open_data(str(tmp_path / "photos"))
    assert sorted(data.train.names + data.test.names) == [
        "cat/1.png",
        "cat/more/2.png",
        "dog/1.png",
        "dog/2.png",
    ]


def test_hidden_folders_in_a_class_do_not_count(tmp_path):
    for name in ("cat/1.png", "cat/2.png", "cat/.thumbnails/1.png", "dog/1.png", "dog/2.png"):
        save(tmp_path / name)
    data = open_data(str(tmp_path))
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
    save(empty / "b" / "1.png")
    with pytest.raises(ValueError, match="every class has one picture, .* two of a class"):
        open_data(str(empty))
    save(empty / "b" / "2.png")
    assert len(open_data(str(empty)).test) == 1


def test_pictures_of_kinds_that_are_not_read_are_told(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        save(tmp_path / name)
    assert open_data(str(tmp_path)).unread == ""
    (tmp_path / "c").mkdir()
    for name in ("a/3.HEIC", "c/1.avif", "c/2.avif", "c/notes.txt"):
        (tmp_path / name).touch()
    found = open_data(str(tmp_path))
    assert found.classes == ("a", "b") and found.unread.endswith("not read: 1 .heic, 2 .avif")
    with pytest.raises(ValueError, match="found none; passed over, .* 2 .avif"):
        open_data(str(tmp_path / "c"))


@pytest.mark.parametrize("names", ["Train Test", "training validation", "TRAINING testing"])
def test_parts_by_other_names_are_no_classes(tmp_path, names):
    for part in names.split():
        for name in ("a", "b"):
            save(tmp_path / part / name / "1.png")
    data = open_data(str(tmp_path))
    assert data.classes == ("a", "b") and (len(data.train), len(data.test)) == (2, 2)


def test_labels_need_no_decoding(photos):
    for file in photos.rglob("*.png"):
        file.write_bytes(b"broken")
    data = open_data(str(photos))
    assert data.train.labels.tolist() == [0, 0, 1, 1, 1]
    with pytest.raises(BadPicture, match="1.png"):
        data.train[0]
    with pytest.raises(BadPicture, match="png"):
        open_data(str(photos), cache=True)


def test_a_worker_s_error_is_one_line_that_names_the_file(photos):
    (photos / "train" / "cat" / "1.png").write_bytes(b"broken")
    loader = torch.utils.data.DataLoader(open_data(str(photos)).train, num_workers=1)
    with pytest.raises(BadPicture) as caught:
        next(iter(loader))
    assert str(caught.value).startswith(f"{photos}/train/cat/1.png: cannot be read as a picture")
    assert "\n" not in str(caught.value)


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

"""Networks cut at their trained part, and runs from what the frozen part gave."""

import json
import pickle
import shutil
import threading
import time

import pytest
import torch

pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")
pytest.importorskip("rich")

import tiny  # noqa: E402
from torchvision.models import efficientnet_b0, mobilenet_v2, resnet18  # noqa: E402

import gradfilter as gf  # noqa: E402
from gradfilter.recipes import features, models  # noqa: E402
from gradfilter.recipes.checkpoint import NotWritten  # noqa: E402
from gradfilter.recipes.cut import CannotCut, Cut  # noqa: E402
from gradfilter.recipes.datasets import open_data  # noqa: E402
from gradfilter.recipes.features import Stored  # noqa: E402
from gradfilter.recipes.screen import Screen  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402

FILTER = gf.GalerkinFilter(grid=3)
NETWORKS = {
    "mobilenet_v2": mobilenet_v2,
    "resnet18": resnet18,  # its parts share a sum
    "tf_efficientnet_lite0": lambda: timm.create_model("tf_efficientnet_lite0"),
}


def converted(model, last, x):
    """In training mode, but for the dropout and depth of the part that is frozen."""
    plan = gf.convert(model, FILTER, last=last, example=x)
    model.train()
    for name in plan.front:
        if not list(model.get_submodule(name).children()):
            model.get_submodule(name).train(False)
    return model


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("last", [1, 5])
def test_a_cut_network_computes_the_same(name, last):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 48, 48)
    model = converted(NETWORKS[name](), last, x)
    cut = Cut(model, x)
    maps = cut.front(x)
    assert not any(t.requires_grad for t in maps)
    found = []
    for run in (lambda: cut.back(*maps), lambda: model(x)):
        model.zero_grad()
        torch.manual_seed(1)  # of dropout
        run().square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        found.append({n: g for n, g in grads.items() if g is not None})
    assert found[0].keys() == found[1].keys() and found[0]
    for n in found[0]:
        torch.testing.assert_close(found[0][n], found[1][n], rtol=1e-3, atol=1e-4)
    model.eval()
    torch.testing.assert_close(cut.back(*maps), model(x), rtol=1e-4, atol=1e-4)


def test_the_back_part_runs_by_the_engine():
    x = torch.randn(2, 3, 32, 32)
    cut = Cut(converted(mobilenet_v2(), 4, x), x)
    assert hasattr(cut.backs[True], "gf_engine")


def test_a_segmenter_is_cut():
    pytest.importorskip("segmentation_models_pytorch")
    network = models.build("unet-resnet18", 3, task="segmentation", weights="none")
    x = torch.randn(2, 3, 64, 64)
    cut = Cut(converted(network.model, 3, x), x)
    assert len(cut.shapes) >= 1
    assert cut.back(*cut.front(x)).shape == (2, 3, 64, 64)


class Branching(torch.nn.Module):
    """Its way depends on the values of the picture."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.a(x)
        return self.b(y if y.sum() > 0 else -y)


@pytest.mark.parametrize(
    "model, last, why",
    [
        (mobilenet_v2, None, "features.0.0 reads the picture itself and is trained"),
        (Branching, 1, "not traceable"),
    ],
)
def test_networks_that_cannot_be_cut(model, last, why):
    x = torch.randn(2, 3, 32, 32)
    with pytest.raises(CannotCut, match=why):
        Cut(converted(model(), last, x), x)


def test_what_is_random_in_the_frozen_part_stays_off():
    x = torch.randn(2, 3, 32, 32)
    model = converted(efficientnet_b0(), 4, x)  # stochastic depth everywhere
    assert len(Cut(model, x).shapes[0]) == 3
    model.features[2][1].stochastic_depth.train()
    assert Cut(model, x).shapes[0][0] < 1152  # now nothing after that is the same each time


@pytest.fixture
def trained(tiny_networks, photos, tmp_path):
    """A trainer of the last layers with features in a folder, and its data."""

    def make(folder="features", pictures=photos, **options):
        options = {"last": 1, "model": "still", "cache_features": True} | options
        settings = tiny.settings(pictures, tmp_path / "run", **options)
        data = open_data(str(pictures))
        trainer = Trainer(settings, data.task, data.classes, ignore=data.ignore)
        return Stored(trainer, tmp_path / folder, Screen(quiet=True).bar), data

    return make


def test_stored_features_are_those_of_the_front_in_16_bits(trained):
    stored, data = trained()
    dataset = stored.source(data.train, True)
    assert len(dataset) == len(data.train)
    places = [20, 3, 11]
    (maps,), targets = dataset.__getitems__([(4, i) for i in places])
    assert maps.dtype == torch.float16 and targets.tolist() == data.train.labels[places].tolist()
    change = stored.trainer.change[True]
    images = torch.stack([change(*data.train[i])[0] for i in places])
    torch.testing.assert_close(maps.float(), stored.front(images)[0], rtol=2**-10, atol=1e-6)


def final(stored, data) -> dict:
    trainer = stored.trainer
    for _ in trainer.steps(data.train, range(15), 15):
        pass
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


@pytest.mark.parametrize("kind", ["photos", "scenes"])
def test_a_run_from_features_equals_one_that_rounds_the_front_each_time(trained, kind, request):
    pictures = request.getfixturevalue(kind)
    stored, data = trained(pictures=pictures)
    start = {name: t.clone() for name, t in stored.trainer.model.state_dict().items()}
    cached = final(stored, data)
    live, _ = trained("live", pictures=pictures)
    whole = live.forward
    live.source = live.trainer.changed
    live.forward = lambda inputs: whole(tuple(t.half() for t in live.front(*inputs)))
    anew = final(live, data)
    moved = [name for name in start if not torch.equal(start[name], cached[name])]
    assert moved
    for name in moved:
        torch.testing.assert_close(cached[name], anew[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("tiny_networks")
def test_a_run_from_features_is_close_to_one_that_is_not_cut(photos, tmp_path):
    options = {"last": 1, "augment": "none", "epochs": 6}
    plain = tiny.go(photos, tmp_path / "plain", **options)
    cached = tiny.go(photos, tmp_path / "cached", cache_features=True, **options)
    for row, other in zip(plain.rows, cached.rows, strict=True):
        assert row["test_loss"] == pytest.approx(other["test_loss"], rel=2e-3)
    assert (tmp_path / "cached" / "features").is_dir()
    assert plain.rows[-1]["test_loss"] < 0.98 * plain.rows[0]["test_loss"]


@pytest.mark.usefixtures("tiny_networks")
def test_a_run_from_features_resumes(photos, tmp_path):
    options = {"last": 1, "cache_features": True, "save_every": 0.0, "model": "tiny"}
    tiny.go(photos, tmp_path / "whole", **options)

    def die(rank):
        tiny.arm("step", 8)
        tiny.go(photos, tmp_path / "killed", **options)

    assert tiny.forked(die) == [-9]
    tiny.go_on(tmp_path / "killed")
    assert tiny.same(*(tiny.weights(tmp_path / name) for name in ("whole", "killed")))


@pytest.mark.usefixtures("tiny_networks")
def test_two_processes_share_features(photos, tmp_path):
    options = {"last": 1, "cache_features": True, "model": "still"}
    tiny.go(photos, tmp_path / "one", **options)
    share = lambda rank: tiny.go(photos, tmp_path / "two", batch=3, **options)  # noqa: E731
    assert tiny.forked(share, processes=2) == [0, 0]
    for a, b in zip(*(tiny.weights(tmp_path / n).values() for n in ("one", "two")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def filled(monkeypatch) -> list:
    """Grows with every time that features are stored."""
    calls, store = [], features.store
    monkeypatch.setattr(features, "store", lambda *a, **k: (calls.append(1), store(*a, **k))[1])
    return calls


def test_features_are_stored_once(trained, monkeypatch):
    calls = filled(monkeypatch)
    for _ in range(2):
        stored, data = trained()
        stored.source(data.train, True)
        stored.source(data.train, True)
    assert len(calls) == 1


def test_two_runs_at_once_store_once(trained, monkeypatch):
    (first, data), (second, same) = trained(), trained()
    fill, calls, found = features._fill, [], []
    other = threading.Thread(target=lambda: found.append(second.source(same.train, True)))

    def slow(*arguments):
        calls.append(1)
        if len(calls) == 1:
            other.start()
            time.sleep(0.5)  # in which the other would begin, too
        return fill(*arguments)

    monkeypatch.setattr(features, "_fill", slow)
    here = first.source(data.train, True)
    other.join()
    assert len(calls) == 1 and found[0].folder == here.folder


def change_weight(stored, photos):
    stored.trainer.model[0].weight.data[0, 0, 0, 0] += 1


def change_picture(stored, photos):
    (photos / "train" / "class0" / "0.png").touch()


def change_last_layer(stored, photos):
    stored.trainer.model[-1].weight.data += 1


def cut_file(stored, photos):
    path = next(stored.folder.glob("*/map0.f16"))
    path.write_bytes(path.read_bytes()[:-2])


def spoil_index(stored, photos):
    path = next(stored.folder.glob("*/features.json"))
    path.write_text(path.read_text()[:20])


@pytest.mark.parametrize(
    "change, times",
    [
        (change_weight, 2),
        (change_picture, 2),
        (cut_file, 2),
        (spoil_index, 2),
        (change_last_layer, 1),
    ],
)
def test_features_are_stored_again_when_they_would_differ(
    trained, photos, tmp_path, monkeypatch, change, times
):
    own = shutil.copytree(photos, tmp_path / "photos")
    calls = filled(monkeypatch)
    stored, data = trained(pictures=own)
    stored.source(data.train, True)
    again, data = trained(pictures=own)
    change(again, own)
    again.source(data.train, True)
    assert len(calls) == times


def test_no_room_for_features(trained, monkeypatch):
    stored, data = trained()
    none = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: none)
    with pytest.raises(ValueError, match="GiB free: give another --cache-dir"):
        stored.source(data.train, True)
    assert not list(stored.folder.glob("*"))


def test_a_disk_that_fills_up_meanwhile(trained, monkeypatch):
    stored, data = trained()

    def full(array):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features.np, "ascontiguousarray", full)
    with pytest.raises(NotWritten, match="No space left on device"):
        stored.source(data.train, True)
    assert not list(stored.folder.glob("*"))


def test_values_beyond_16_bits_are_refused(trained):
    stored, data = trained()
    stored.trainer.model[0].weight.data *= 1e9
    with pytest.raises(ValueError, match="beyond 16 bits"):
        stored.source(data.train, True)


def test_another_process_maps_the_same_files(trained):
    stored, data = trained()
    dataset = stored.source(data.train, True)
    sent = pickle.dumps(dataset)
    assert len(sent) < 500
    (maps,), _ = pickle.loads(sent).__getitems__([(0, 5)])
    assert torch.equal(maps, dataset.__getitems__([(0, 5)])[0][0])


def test_the_index_says_what_is_there(trained):
    stored, data = trained()
    stored.source(data.train, True)
    index = json.loads(next(stored.folder.glob("*/features.json")).read_text())
    assert index["files"][0][1:] == ["<f2", [27, *stored.cut.shapes[0]]]

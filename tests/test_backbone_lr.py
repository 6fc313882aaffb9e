"""How fast all but the output layer learn where nobody says it, and that a run keeps to it."""

import json

import pytest
import torch
import yaml

tv = pytest.importorskip("torchvision").models
pytest.importorskip("rich")

import tiny  # noqa: E402
from commands import gradfilter, mistake  # noqa: E402

from gradfilter.recipes import evaluation, models, recording, settings, training  # noqa: E402
from gradfilter.recipes.parallel import World  # noqa: E402
from gradfilter.recipes.settings import Settings  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402

SHARE = 0.462  # at the batch of 6 of `tiny`
EXACT, FROZEN = {"*": "exact"}, {"*": "exact", "0": "frozen"}


def shares(trainer: Trainer) -> list[float]:
    return [group["share"] for group in trainer.optimizer.param_groups]


@pytest.mark.parametrize(
    "options, plan, share",
    [
        ({}, None, 0.2),
        ({"batch": 128}, None, 0.1),
        ({"batch": 64}, None, 0.141),
        ({"batch": 1}, None, 1.0),
        ({"last": 3}, None, 0.2),  # those are all that are counted
        ({"last": 2}, None, 1.0),
        ({"weights": "none"}, None, 1.0),
        ({}, EXACT, 0.2),
        ({}, FROZEN, 1.0),
        ({"backbone_lr": 1.0}, None, 1.0),
        ({"backbone_lr": 0.3, "last": 2}, None, 0.3),
        ({"backbone_lr": 0.3, "weights": "none"}, FROZEN, 0.3),
    ],
)
def test_the_rule(tiny_networks, tmp_path, options, plan, share):
    if plan:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        options = options | {"plan": str(tmp_path / "plan.json")}
    trainer = Trainer(Settings(model="still", device="cpu", **options), "classification", ("a",))
    assert trainer.settings.backbone_lr == share
    assert shares(trainer) == ([1.0] if share == 1 else [1.0, share])


def test_a_network_starts_trained_where_only_its_output_layer_is_new(tmp_path):
    def build(weights, classes=4, name="lraspp_mobilenet_v3_large", task="segmentation"):
        return models.build(name, classes, task=task, weights=weights)

    def saved(network):
        torch.save(network.model.state_dict(), tmp_path / "weights.pth")
        return tmp_path / "weights.pth"

    classify = {"name": "mobilenet_v3_large", "task": "classification"}
    random = build("none", **classify)
    assert not random.trained and build(saved(random), **classify).trained
    assert build(saved(random), 3, **classify).trained
    assert not build(saved(random)).trained  # whose head, two layers and more, is new
    pytest.importorskip("segmentation_models_pytorch")
    fcn = {"name": "fcn-mobilenet_v2"}
    encoder = build("none", name="mobilenet_v2", task="classification")
    assert not build(saved(encoder), **fcn).trained
    whole = saved(build("none", **fcn))
    assert build(whole, **fcn).trained and build(whole, 3, **fcn).trained


def config(out) -> dict:
    return yaml.safe_load((out / recording.CONFIG).read_text())


@pytest.mark.parametrize(
    "asked, last, told", [(None, None, SHARE), (None, 2, 1.0), (1.0, None, 1.0)]
)
def test_a_run_writes_what_it_used_and_goes_on_with_it(
    photos, tmp_path, tiny_networks, capsys, asked, last, told
):
    options = {"last": last, "backbone_lr": asked}
    for name in ("whole", "parts"):
        training.train(tiny.settings(photos, tmp_path / name, epochs=2, **options))
        assert (f"at {SHARE} of the learning rate" in capsys.readouterr().out) == (told == SHARE)
        assert config(tmp_path / name)["backbone_lr"] == told
    found = torch.load(tmp_path / "parts" / "last.pt", weights_only=True)
    assert found["settings"]["backbone_lr"] == told
    assert shares(evaluation.load(tmp_path / "parts", "last", World("cpu"))[0])[-1] == told
    tiny.go_on(tmp_path / "whole", epochs=3)
    # as `gradfilter compare` goes on: by what was asked for
    again = tiny.settings(photos, tmp_path / "parts", epochs=3, **options)
    training.train(again, resume=True, quiet=True)
    assert tiny.same(*(tiny.weights(tmp_path / name) for name in ("whole", "parts")))
    assert config(tmp_path / "parts")["backbone_lr"] == told
    explicit = options | {"backbone_lr": told, "epochs": 2}
    tiny.go(photos, tmp_path / "explicit", **explicit)
    tiny.go_on(tmp_path / "explicit", epochs=3)
    assert tiny.same(*(tiny.weights(tmp_path / name) for name in ("whole", "explicit")))


def test_a_run_of_before_the_option_goes_on_as_it_was(photos, tmp_path, tiny_networks):
    tiny.go(photos, tmp_path / "whole", epochs=2, backbone_lr=1.0)
    tiny.go(photos, tmp_path / "old", epochs=2, backbone_lr=1.0)
    written = config(tmp_path / "old")
    del written["backbone_lr"]
    (tmp_path / "old" / recording.CONFIG).write_text(yaml.safe_dump(written))
    found = torch.load(tmp_path / "old" / "last.pt", weights_only=True)
    del found["settings"]["backbone_lr"]
    torch.save(found, tmp_path / "old" / "last.pt")
    assert shares(evaluation.load(tmp_path / "old", "last", World("cpu"))[0]) == [1.0]
    for name in ("whole", "old"):
        tiny.go_on(tmp_path / name, epochs=3)
    assert tiny.same(*(tiny.weights(tmp_path / name) for name in ("whole", "old")))


def test_a_comparison_has_the_share_of_every_depth(photos, tmp_path, tiny_networks, monkeypatch):
    line = ["--model", "still", "--batch", 6, "--lr", 1, "--no-tensorboard", "--seeds", 0]
    line += ["--methods", "exact", "--last", 2, "all", "--epochs", 2, "--out", tmp_path / "some"]
    step, taken = Trainer.step, []

    def interrupted(self, *args):
        taken.append(shares(self))
        if len(taken) == 18:  # in the second epoch of the second run
            raise KeyboardInterrupt
        step(self, *args)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert gradfilter("compare", "--data", photos, *line) == 130
    assert gradfilter("compare", "--data", photos, *line) == 0
    assert taken[0] == [1.0] and taken[-1] == [1.0, SHARE]
    runs = tmp_path / "some" / "runs"
    found = {p.name: config(p)["backbone_lr"] for p in runs.iterdir()}
    assert found == {"exact-last2-seed0": 1.0, "exact-all-seed0": SHARE}
    tiny.go(photos, tmp_path / "all", model="still", method="exact", epochs=2)
    assert tiny.same(tiny.weights(tmp_path / "all"), tiny.weights(runs / "exact-all-seed0"))


def test_a_comparison_of_before_the_rule_is_not_mixed_with_it(
    photos, tmp_path, tiny_networks, capsys
):
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"data": str(photos), "batch": 6}))
    line = "compare", "--data", photos, "--batch", 6, "--out", tmp_path
    told = mistake(capsys, *line)
    assert "holds a comparison with backbone_lr: 1.0, now the default; change --out" in told


def test_help_tells_the_rule(capsys):
    gradfilter("train", "--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "where all layers of a network with trained weights are trained: 0.1 for 128" in told
    assert Settings().backbone_lr is None and settings.BEFORE == {"backbone_lr": 1.0}


@pytest.mark.parametrize("last, share", [(None, SHARE), (2, 1.0)])
def test_clients_learn_at_the_servers_share(
    photos, tmp_path, tiny_networks, fresh_clients, monkeypatch, last, share
):
    pytest.importorskip("flwr")
    from gradfilter.federated import client

    told, ready = [], client.ready

    def seen(chosen, *args):
        trainer = ready(chosen, *args)
        told.append(shares(trainer)[-1])
        return trainer

    def own_weights(context, read=client.read):
        both = read(context)
        return both[0].changed(weights="none"), both[1]

    monkeypatch.setattr(client, "ready", seen)
    if last is None:  # where nothing of its own weights is left
        monkeypatch.setattr(client, "read", own_weights)
    line = ["--model", "still", "--batch", 6, "--rounds", 1, "--simulate", 2, "--in-process"]
    line += ["--last", last] if last else []
    out = tmp_path / "run"
    assert gradfilter("federate", "--data", photos, *line, "--out", out) == 0
    assert told == [share] * 2 and config(out)["backbone_lr"] == share
    assert gradfilter("federate", "--resume", out, "--rounds", 2) == 0
    assert told == [share] * 4 and config(out)["backbone_lr"] == share
    found = torch.load(out / "best.pt", weights_only=True)
    assert found["settings"]["backbone_lr"] == share

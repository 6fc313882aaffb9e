"""Kept bytes by hand, and the cost model held against what is measured."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from cases import METHODS, Fork, small_cnn
from profiled import images, rows, two_convolutions
from torch import nn

import gradfilter as gf
from gradfilter import kept, profiler
from gradfilter.demo import kept_bytes
from gradfilter.profiler import EXACT, INFERENCE, PLAN

pytestmark = pytest.mark.usefixtures("quick_stopwatch")


def test_kept_bytes_of_the_layer_level_by_hand():
    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2))
    found = gf.profile(model, images(), repeats=1)
    means = (2 * 3 * 4 * 4 * 4, 2 * 4 * 4 * 4 * 4)  # 4x4 patches of 4 bytes
    dense = 2 * 4 * 8 * 8 * 4
    assert rows(found) == {
        ("0", "conv"): means[0],
        ("1", "activation"): dense,
        ("2", "conv"): means[1],
    }
    # the map between is kept once, by the activation and by the layer, and is the layer's
    assert rows(found, EXACT) == {("0", "conv"): 2 * 3 * 8 * 8 * 4, ("2", "conv"): dense}
    assert found.rival(PLAN).kept == sum(means) + dense
    assert found.rival(INFERENCE).kept == 0


def test_kept_bytes_of_the_engine_by_hand():
    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=images())
    found = gf.profile(model, images(), repeats=1)
    assert rows(found) == {
        ("0", "conv"): 2 * 3 * 4 * 4 * 4,
        ("0", "activation"): 2 * 4 * 4 * 4 * 4,  # the mean slope of every patch
        ("2", "conv"): 2 * 4 * 4 * 4 * 4,
    }
    assert [(c.name, c.level) for c in found.checks if c.level == "engine"] == [
        ("0", "engine"),
        ("2", "engine"),
    ]
    assert found.disagreements == []
    assert "not comparable: beside the layers' inputs gf.cost counts 2.0 KB" in found.table()


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("engine", [True, False])
def test_cost_agrees_and_totals_are_what_autograd_keeps(method, engine):
    model, x = small_cnn().eval(), images(2, 12)
    gf.convert(model, method, example=x if engine else None)
    found = gf.profile(model, x, repeats=1)
    different = {(c.name, c.level, c.cost, c.kept): c.note for c in found.disagreements}
    if isinstance(method, gf.GradientFilter) and any(c.level == "engine" for c in found.checks):
        # the first layer has stride 2: blocks of 2 * patch at the layer level, patches in a region
        blocks, patches = (
            2 * 3 * (-(-12 // side)) ** 2 * 4 for side in (2 * method.patch, method.patch)
        )
        assert "blocks of patch times stride" in different.pop(("0", "engine", blocks, patches))
    assert different == {} and len(found.checks) > 6
    assert {c.name for c in found.checks} >= {r.name for r in gf.cost(model, x).layers}
    assert found.rival(PLAN).kept == kept_bytes(copy.deepcopy(model), x)
    gf.revert(model)
    assert found.rival(EXACT).kept == kept_bytes(model.eval(), x)


def test_a_lying_cost_model_is_found_out(monkeypatch):
    def lying(model, example):
        told = gf.cost(model, example)
        told.layers[:] = [
            replace(r, kept_bytes=r.kept_bytes + 4) if r.name == "2" else r for r in told.layers
        ]
        return told

    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=images())
    monkeypatch.setattr(profiler, "cost", lying)
    found = gf.profile(model, images(), repeats=1)
    assert [(c.name, c.level, c.cost - c.kept) for c in found.disagreements] == [
        ("2", "layer", 4),
        ("2", "engine", 4),
    ]
    assert "2 (conv): 516 bytes by gf.cost, 512 measured at the engine level" in found.table()
    assert len(found.to_dict()["disagreements"]) == 2


def test_what_training_mode_keeps_beside_is_a_disagreement():
    model = nn.Sequential(*two_convolutions(), nn.Dropout(0.5)).train()
    gf.convert(model, gf.GalerkinFilter(patch=2))
    (found,) = gf.profile(model, images(), repeats=1).disagreements
    assert (found.name, found.cost, found.kept > 0) == ("3", 0, True)
    assert "evaluation mode" in found.note


def test_a_difference_that_is_not_of_the_mode_is_not_laid_to_it():
    padded = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")  # keeps the map it pads, too
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), padded).train()
    found = gf.profile(model, images(), repeats=1).disagreements
    assert {c.kind for c in found} == {"activation", "conv"}  # or this test shows nothing
    assert not any("evaluation mode" in c.note for c in found)


def test_a_shared_input_is_kept_once_by_the_engine():
    model, x = Fork(), images()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=x)
    found = gf.profile(model, x, repeats=1)
    (different,) = found.disagreements
    assert (different.name, different.level) == ("b", "engine")
    assert (different.cost, different.kept) == (2 * 4 * 4 * 4 * 4, 0)
    assert "reads the input of a" in different.note and different.note in found.table()


def test_nothing_of_the_forward_pass_outlives_the_look_at_it():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Sigmoid())
    weight = weakref.ref(model[0].weight)
    kept.measure(model, torch.randn(1, 3, 8, 8), {})
    kept_bytes(model, torch.randn(1, 3, 8, 8))
    del model
    gc.collect()
    assert weight() is None

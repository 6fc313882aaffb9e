"""Conversion and back: what it changes, and what it must leave alone."""

import copy
import io
import pickle

import pytest
import torch
from cases import METHODS, small_cnn
from converted import (
    FILTER,
    PATCH1,
    assert_equal_gradients,
    batch,
    gradients,
    loss_of,
    methods,
    portrait,
)
from torch import nn

import gradfilter as gf


def lived_in_model():
    """A model with a history: hooks, a frozen weight, a gradient, mixed training flags."""
    model = small_cnn()
    model[3].register_forward_hook(lambda *_: None)
    model[3].register_full_backward_hook(lambda *_: None)
    model[5].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[3].to(memory_format=torch.channels_last)
    model.train()
    model[2].eval()
    return model


# convert and revert


@methods
@pytest.mark.parametrize("last", [None, 1])
def test_revert_restores_everything(method, last):
    model = lived_in_model()
    before = portrait(model)
    gf.convert(model, method, last=last)
    assert portrait(model) != before
    gf.revert(model)
    assert portrait(model) == before


@methods
def test_a_converted_model_is_the_same_modules_and_parameters(method):
    model = lived_in_model()
    modules, *rest = portrait(model)
    gf.convert(model, method)
    assert list(portrait(model)[1:]) == rest
    for name, module in model.named_modules():
        assert id(module) == modules[name][0]
        assert isinstance(module, modules[name][1])
        assert type(module).__name__ == modules[name][1].__name__


def test_hooks_still_fire():
    model, fired = small_cnn(), []
    model[3].register_forward_pre_hook(lambda *_: fired.append("pre"))
    model[3].register_forward_hook(lambda *_: fired.append("forward"))
    model[3].register_full_backward_hook(lambda *_: fired.append("backward"))
    model[3].weight.register_hook(lambda g: fired.append("weight"))
    gf.convert(model, FILTER)
    loss_of(model).backward()
    assert sorted(fired) == ["backward", "forward", "pre", "weight"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_have_the_dtype_of_the_parameters(dtype):
    model = small_cnn(dtype)
    gf.convert(model, FILTER)
    for g in gradients(model, batch(dtype=dtype)).values():
        assert g.dtype == dtype and g.isfinite().all()


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_devices_survive(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = small_cnn().to(device)
    before = portrait(model)
    gf.convert(model, FILTER, last=1)
    loss_of(model, batch().to(device)).backward()
    assert model[5].weight.grad.device.type == device
    model.zero_grad()
    gf.revert(model)
    assert portrait(model) == before


def test_memory_format_survives():
    model = small_cnn().to(memory_format=torch.channels_last)
    strides = [p.stride() for p in model.parameters()]
    gf.convert(model, FILTER)
    y = model[:2](batch().contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert [p.stride() for p in model.parameters()] == strides


def test_the_forward_pass_is_exact():
    model = small_cnn().eval()
    expected = model(batch())
    for method in METHODS:
        gf.convert(model, method)
        assert torch.equal(model(batch()), expected), method


def test_reverted_gradients_are_pytorchs():
    model = small_cnn().eval()
    expected = gradients(model)
    gf.convert(model, gf.GradientFilter(patch=4))
    filtered = gradients(model)
    assert not torch.allclose(filtered["0.weight"], expected["0.weight"])
    gf.revert(model)
    assert_equal_gradients(gradients(model), expected)


def test_converting_again_replaces_the_earlier_plan():
    model = small_cnn()
    model[9].weight.requires_grad_(False)
    before = portrait(model)
    gf.convert(model, gf.GradientFilter(patch=4), last=1)
    assert not model[0].weight.requires_grad and not model[1].weight.requires_grad
    plan = gf.convert(model, FILTER, norm="batch")
    assert model[0].gf.method == FILTER and model[0].weight.requires_grad
    assert model[1].weight.requires_grad and type(model[1]) is nn.BatchNorm2d
    assert plan.frozen == ["9"]
    gf.revert(model)
    assert portrait(model) == before


def test_a_failed_conversion_leaves_the_model_reverted():
    model = small_cnn()
    before = portrait(model)
    gf.convert(model, FILTER, last=1)
    with pytest.raises(ValueError):
        gf.convert(model, FILTER, last=99)
    assert portrait(model) == before


def test_revert_of_a_plain_model_does_nothing():
    model = lived_in_model()
    before = portrait(model)
    gf.revert(model)
    assert portrait(model) == before


def test_a_layer_called_by_keyword():
    conv = nn.Conv2d(3, 4, 3)
    expected = conv(input=batch())
    gf.convert(conv, FILTER)
    assert torch.equal(conv(input=batch()), expected)


def test_a_converted_layer_says_so():
    model = small_cnn()
    gf.convert(model, FILTER)
    assert "Conv2d(3, 8, " in repr(model) and f"backward={FILTER!r}" in repr(model)


# copies


def copies(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(buffer, weights_only=False),
    }


@methods
def test_state_dicts_load_both_ways(method):
    converted, plain = small_cnn(), small_cnn()
    gf.convert(converted, method)
    for p in converted.parameters():
        p.data.normal_()
    gradients(converted)  # what a stateful method remembers is no part of the state dict
    assert list(converted.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(converted.state_dict(), strict=True)
    plain.eval()
    assert torch.equal(plain(batch()), converted(batch()))
    other = small_cnn()
    converted.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(converted(batch()), other.eval()(batch()))


@methods
def test_copies_train_alike_and_apart(method):
    model = small_cnn()
    gf.convert(model, method, last=1)
    gradients(model)  # a warm-started method has a state from here on
    for kind, twin in copies(model).items():
        original = {k: v.clone() for k, v in model.state_dict().items()}
        states = [m.gf.state for m in model if hasattr(m, "gf")]
        assert type(twin[0]) is type(model[0]), kind
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        assert all(torch.equal(v, original[k]) for k, v in model.state_dict().items()), kind
        twin.load_state_dict(model.state_dict())
        expected, found = gradients(copy.deepcopy(model)), gradients(twin)
        assert_equal_gradients(found, expected)
        assert [m.gf.state for m in model if hasattr(m, "gf")] == states, kind
        gf.revert(twin)
        assert type(twin[0]) is nn.Conv2d and type(model[0]) is not nn.Conv2d, kind
        assert twin[0].weight.requires_grad and not model[0].weight.requires_grad, kind


def test_a_copied_generator_is_its_own():
    model = small_cnn()
    gf.convert(model, gf.Int8(generator=torch.Generator().manual_seed(3)))
    twin = copy.deepcopy(model)
    assert_equal_gradients(gradients(twin), gradients(model))


# batch norm


def norm_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def test_frozen_norm_keeps_its_statistics_in_training_mode():
    model = norm_model()
    before = {k: v.clone() for k, v in model[1].state_dict().items()}
    gf.convert(model, FILTER, norm="frozen")
    model.train()
    assert model.training and model[0].training and not model[1].training
    gradients(model)
    assert all(torch.equal(v, before[k]) for k, v in model[1].state_dict().items())
    assert model[1].weight.grad is not None


def test_frozen_norm_normalises_by_its_statistics():
    model = norm_model().eval()
    expected = model(batch())
    gf.convert(model, FILTER)
    assert torch.equal(model.train()(batch()), expected)


def test_batch_norm_is_left_as_it_was():
    model = norm_model()
    twin = copy.deepcopy(model)
    gf.convert(model, PATCH1, norm="batch")
    assert type(model[1]) is nn.BatchNorm2d
    assert_equal_gradients(gradients(model), gradients(twin), 1e-5)
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("asked", [True, False])
def test_revert_gives_batch_norm_the_mode_that_was_asked_for(asked):
    model = norm_model().train(not asked)
    gf.convert(model, FILTER)
    model.train(asked)
    gf.revert(model)
    assert type(model[1]) is nn.BatchNorm2d
    assert [m.training for m in model.modules()] == [asked] * 5


def test_a_norm_without_statistics_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    gf.convert(model, FILTER)
    assert type(model[1]) is nn.BatchNorm2d and model[1].training


def test_frozen_norm_keeps_its_activation():
    timm_layers = pytest.importorskip("timm.layers")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), timm_layers.BatchNormAct2d(4))
    expected = model.eval()(batch())
    gf.convert(model.train(), FILTER)
    assert torch.equal(model.train()(batch()), expected)
    gf.revert(model)
    assert type(model[1]) is timm_layers.BatchNormAct2d and model[1].training

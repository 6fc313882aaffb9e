"""Which layers `convert` takes, by depth, by pattern and by plan, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from cases import small_cnn
from converted import FILTER, Backwards, batch, trained
from torch import nn

import gradfilter as gf

# by depth


def test_last_counts_in_execution_order_when_there_is_an_example():
    model = Backwards()
    plan = gf.convert(model, FILTER, last=1, example=batch())
    assert list(plan) == ["spare", "a", "b", "c", "head"]
    assert trained(model) == ["head.weight", "head.bias", "c.weight", "c.bias"]
    assert plan.converted == {"c": FILTER} and plan.frozen == ["spare", "a", "b"]
    assert plan.exact == {"head": "GalerkinFilter takes convolutions, this is a linear layer"}
    gf.convert(model, FILTER, last=2, example=(batch(),))
    assert trained(model)[2:] == [
        *("c.weight", "c.bias", "norm.weight", "norm.bias", "b.weight", "b.bias")
    ]


def test_last_counts_in_registration_order_without_an_example():
    model = Backwards()
    plan = gf.convert(model, FILTER, last=2)
    assert list(plan) == ["head", "c", "b", "a", "spare"]
    assert trained(model) == ["a.weight", "a.bias", "spare.weight", "spare.bias"]
    assert list(plan.converted) == ["a", "spare"]


def test_a_layer_the_example_does_not_reach_says_so():
    model = Backwards()
    plan = gf.convert(model, FILTER, example={"x": batch()})
    assert plan["spare"].reason == "the example does not reach it"
    assert list(plan.converted) == ["a", "b", "c"]


def test_counting_with_an_example_leaves_statistics_flags_and_random_state_alone():
    model = Backwards().train()
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    rng = torch.get_rng_state()
    gf.convert(model, FILTER, last=1, example=batch(), norm="batch")
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())
    assert all(m.training for m in model.modules())
    assert torch.equal(rng, torch.get_rng_state())


def test_last_leaves_what_the_user_froze():
    model = small_cnn()
    model[11].bias.requires_grad_(False)
    gf.convert(model, FILTER, last=1)
    assert trained(model) == ["5.weight", "5.bias", "9.weight", "9.bias", "11.weight"]
    gf.revert(model)
    assert not model[11].bias.requires_grad and model[0].weight.requires_grad


def test_the_output_layer_stays_exact_unless_asked_for():
    model = small_cnn()
    plan = gf.convert(model, gf.Svd(energy=0.5))
    assert plan["11"].reason == "the output layer stays exact"
    assert isinstance(plan["9"].method, gf.Svd)
    plan = gf.convert(model, {"*": gf.Svd(energy=0.5)})
    assert list(plan.converted) == ["0", "3", "5", "9", "11"]


@pytest.mark.parametrize("last", [0, -1, 2.0, "2"])
def test_last_must_be_a_positive_whole_number(last):
    with pytest.raises(ValueError, match="last must be a whole number >= 1, got"):
        gf.convert(small_cnn(), FILTER, last=last)


def test_last_larger_than_there_are_layers():
    with pytest.raises(ValueError, match="last=4, but the model has 3 such layers"):
        gf.convert(small_cnn(), FILTER, last=4)


# by pattern


@pytest.fixture(scope="module")
def mobilenet():
    return pytest.importorskip("torchvision").models.mobilenet_v2(weights=None)


def test_patterns_pick_layers_by_name(mobilenet):
    hosvd, gradient_filter = gf.Hosvd(energy=0.8), gf.GradientFilter(patch=4)
    plan = gf.convert(mobilenet, {"features.1[4-8].*": hosvd, "features.18.0": gradient_filter})
    for name, entry in plan.items():
        block = int(name.split(".")[1])
        wanted = hosvd if name.startswith("features") and 14 <= block <= 18 else gf.Exact()
        wanted = gradient_filter if name == "features.18.0" else wanted
        assert entry.method == wanted and entry.reason is None, name
        assert mobilenet.get_submodule(name).gf.method == wanted
    assert len(plan.converted) == 4 * 3 + 1
    gf.revert(mobilenet)


def test_later_patterns_override_earlier_ones():
    model = small_cnn()
    coarse, fine = gf.GalerkinFilter(grid=2), gf.GalerkinFilter(grid=4)
    plan = gf.convert(model, {"*": coarse, "[35]": fine})
    assert plan.converted == {"0": coarse, "3": fine, "5": fine}
    plan = gf.convert(model, {"[35]": fine, "*": coarse})
    assert plan.converted == {"0": coarse, "3": coarse, "5": coarse}


def test_patterns_can_freeze():
    model = small_cnn()
    plan = gf.convert(model, {"*": FILTER, "[03]": "frozen"})
    assert plan.frozen == ["0", "3"] and plan.converted == {"5": FILTER}
    assert not model[0].weight.requires_grad and not model[3].bias.requires_grad
    assert model[1].weight.requires_grad
    gf.revert(model)
    assert all(p.requires_grad for p in model.parameters())


def test_last_counts_the_layers_a_pattern_picked():
    model = small_cnn()
    plan = gf.convert(model, {"[03]": FILTER}, last=1)
    assert plan.converted == {"3": FILTER} and plan.frozen == ["0"]
    assert trained(model)[0] == "3.weight"


def test_a_pattern_that_matches_nothing_suggests_near_names(mobilenet):
    with pytest.raises(ValueError, match="'features.18.9' matches no .*; did you mean 'features.1"):
        gf.convert(mobilenet, {"features.18.9": FILTER})
    with pytest.raises(ValueError, match="'zzz' matches no convolution or Linear layer$"):
        gf.convert(mobilenet, {"*": FILTER, "zzz": FILTER})
    with pytest.raises(ValueError, match="'features.0.1' matches no"):  # a batch norm
        gf.convert(mobilenet, {"features.0.1": FILTER})


def test_a_layer_asked_for_by_name_must_take_its_method():
    model = small_cnn()
    with pytest.raises(ValueError, match="layer '9' cannot have GradientFilter.*linear layer"):
        gf.convert(model, {"9": gf.GradientFilter(patch=2)})
    with pytest.raises(ValueError, match="layer '3' cannot have WalshHadamard.*1x1"):
        gf.convert(model, {"3": gf.WalshHadamard()})
    plan = gf.convert(model, {"*": gf.WalshHadamard()})  # by pattern it is no error
    assert list(plan.converted) == ["5", "9", "11"] and list(plan.exact) == ["0", "3"]


# by plan

CONVERSIONS = {
    "one-method": (small_cnn, {"what": FILTER}),
    "reasons": (small_cnn, {"what": gf.WalshHadamard()}),
    "last": (small_cnn, {"what": FILTER, "last": 1}),
    "patterns": (
        small_cnn,
        {"what": {"*": gf.Hosvd(energy=0.7), "0": "frozen", "3": FILTER, "5": gf.Exact()}},
    ),
    "patterns-last": (small_cnn, {"what": {"3": FILTER, "5": gf.Exact()}, "last": 1}),
    "registration": (Backwards, {"what": FILTER, "last": 2}),
    "execution": (Backwards, {"what": FILTER, "last": 2, "example": batch()}),
}


@pytest.mark.parametrize(("make", "arguments"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_plan_reproduces_its_conversion(make, arguments):
    model = make()
    plan = gf.convert(model, **arguments)
    fresh = make()
    again = gf.convert(fresh, plan)
    assert trained(fresh) == trained(model)
    here = [(name, replace(e, where=None)) for name, e in plan.items()]
    assert list(again.items()) == here  # without an example there is no engine
    for name, entry in plan.items():
        assert fresh.get_submodule(name).gf.method == entry.method
    gf.revert(fresh)
    assert trained(fresh) == [n for n, _ in fresh.named_parameters()]


def test_a_plan_of_another_model_is_refused():
    plan = gf.convert(small_cnn(), FILTER)
    with pytest.raises(ValueError, match="the plan is of another model: no layer '0'"):
        gf.convert(Backwards(), plan)


def test_printing_a_plan():
    model = small_cnn()
    plan = gf.convert(model, gf.GradientFilter(patch=4), last=2)
    assert str(plan).splitlines() == [
        "0   conv    frozen",
        "3   conv    GradientFilter(patch=4)",
        "5   conv    GradientFilter(patch=4)",
        "9   linear  exact: GradientFilter takes convolutions, this is a linear layer",
        "11  linear  exact: GradientFilter takes convolutions, this is a linear layer",
        "2 converted, 1 frozen, 2 exact",
    ]
    assert str(gf.convert(nn.Conv2d(3, 4, 3), FILTER)).startswith("(the model itself)  conv")
    assert len(plan) == 5 and plan["3"].trained


# errors


def test_a_model_without_a_supported_layer():
    with pytest.raises(ValueError, match="this model has no layer that GalerkinFilter can take$"):
        gf.convert(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), FILTER)
    with pytest.raises(ValueError, match=r"can take \(GalerkinFilter takes convolutions"):
        gf.convert(nn.Linear(3, 4), FILTER)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_scripted_modules_are_refused():
    conv = nn.Conv2d(3, 4, 3)
    for scripted in (torch.jit.script(conv), torch.jit.trace(conv, batch())):
        with pytest.raises(TypeError, match="the model is scripted; convert the nn.Module before"):
            gf.convert(scripted, FILTER)
        with pytest.raises(TypeError, match="layer '1' is scripted"):
            gf.convert(nn.Sequential(conv, scripted), FILTER)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_modules_are_refused():
    from torch.ao.nn import quantized
    from torch.ao.quantization import quantize_dynamic

    model = quantize_dynamic(small_cnn(), {nn.Linear})
    with pytest.raises(TypeError, match=r"layer '9' \(Linear\) is already quantised; convert the"):
        gf.convert(model, FILTER)
    with pytest.raises(TypeError, match=r"the model \(Conv2d\) is already quantised"):
        gf.convert(quantized.Conv2d(3, 4, 3), FILTER)


@pytest.mark.parametrize(
    ("model", "what", "arguments", "error", "message"),
    [
        ("resnet18", FILTER, {}, TypeError, "model must be an nn.Module, got str"),
        (None, "galerkin", {}, TypeError, "give a method, a mapping of patterns or a Plan"),
        (None, gf.GalerkinFilter, {}, TypeError, "give a method"),
        (None, {"0": "exact"}, {}, TypeError, "'0' must be a method or 'frozen', got 'exact'"),
        (None, FILTER, {"norm": "eval"}, ValueError, "norm must be 'frozen' or 'batch'"),
    ],
)
def test_wrong_arguments(model, what, arguments, error, message):
    with pytest.raises(error, match=message):
        gf.convert(model or small_cnn(), what, **arguments)

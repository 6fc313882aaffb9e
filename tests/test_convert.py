"""Conversion: what it changes, what it must leave alone, and what it says."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from cases import METHODS, small_cnn
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import gradfilter as gf

methods = pytest.mark.parametrize("method", METHODS, ids=repr)
FILTER = gf.GalerkinFilter(patch=2)
PATCH1 = gf.GalerkinFilter(patch=1)  # exact, by way of the converted layer


def batch(n=4, seed=0, dtype=torch.float32):
    return torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def loss_of(model, x=None):
    return model(batch() if x is None else x).square().mean()


def gradients(model, x=None):
    """Parameter gradients of one step, by name; the same rounding noise every time."""
    model.zero_grad()
    torch.manual_seed(0)
    loss_of(model, x).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name in found:
        error = (found[name] - expected[name]).abs().max()
        assert error <= tolerance * (1 + expected[name].abs().max()), name


def portrait(model):
    """Everything that must be the same objects and values after `revert`."""
    modules = {
        name: (
            id(m),
            type(m),
            m.training,
            sorted(m.__dict__),
            [[id(h) for h in hooks.values()] for hooks in (m._forward_hooks, m._backward_hooks)],
            list(m._modules),
        )
        for name, m in model.named_modules()
    }
    tensors = {
        name: (id(t), t.data_ptr(), t.requires_grad, t.dtype, t.device, t.stride())
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    grads = {n: p.grad.data_ptr() for n, p in model.named_parameters() if p.grad is not None}
    return modules, tensors, grads, list(model.state_dict())


def saved_tensors(run, model):
    """The tensors, other than the model's own, that autograd keeps of `run()`."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return [t for t in kept if t.untyped_storage().data_ptr() not in own]


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


# which layers


class Backwards(nn.Module):
    """Registers its layers in the reverse of the order it calls them in."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.c = nn.Conv2d(4, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3)
        self.a = nn.Conv2d(3, 4, 3)
        self.spare = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        x = self.c(self.norm(self.b(self.a(x))))
        return self.head(x.mean((-1, -2)))


def trained(model):
    return [n for n, p in model.named_parameters() if p.requires_grad]


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


# what is kept and computed


@methods
def test_a_frozen_layer_keeps_nothing(method):
    conv = nn.Conv2d(3, 4, 1)
    conv.weight.requires_grad_(False)
    x = batch().requires_grad_()
    assert saved_tensors(lambda: conv(x), conv)  # plain PyTorch keeps the input
    gf.convert(conv, method)
    ys = []
    assert saved_tensors(lambda: ys.append(conv(x)), conv) == []
    ys[0].sum().backward()
    assert x.grad.isfinite().all() and conv.weight.grad is None
    assert torch.equal(conv.bias.grad, torch.full((4,), 4 * 12 * 12.0))


def test_nothing_is_kept_before_the_first_trained_layer():
    model = small_cnn()
    gf.convert(model, FILTER, last=1)
    assert saved_tensors(lambda: model[:5](batch()), model) == []
    assert not model[:5](batch()).requires_grad
    (kept,) = saved_tensors(lambda: model[:6](batch()), model)
    assert kept.shape == (4, 8, 3, 3)


def test_no_gradient_mode_keeps_nothing():
    model = small_cnn()
    gf.convert(model, FILTER)
    with torch.no_grad():
        assert saved_tensors(lambda: model(batch()), model) == []


@pytest.mark.parametrize(("last", "calls"), [(None, 2), (3, 2), (2, 1), (1, 0)])
def test_the_first_trained_layer_computes_no_input_gradient(monkeypatch, last, calls):
    count = []
    inherited = gf.GalerkinFilter.grad_input

    def spy(self, op, g, w, x_shape):
        count.append(x_shape)
        return inherited(self, op, g, w, x_shape)

    monkeypatch.setattr(gf.GalerkinFilter, "grad_input", spy)
    model = small_cnn()
    gf.convert(model, FILTER, last=last)
    loss_of(model).backward()
    assert len(count) == calls


def test_a_layer_of_which_only_the_bias_is_trained():
    model = small_cnn()
    model[3].weight.requires_grad_(False)
    gf.convert(model, FILTER)
    grads = gradients(model)
    assert "3.weight" not in grads and "3.bias" in grads and "0.weight" in grads


# errors


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


@pytest.mark.parametrize("last", [0, -1, 2.0, "2"])
def test_last_must_be_a_positive_whole_number(last):
    with pytest.raises(ValueError, match="last must be a whole number >= 1, got"):
        gf.convert(small_cnn(), FILTER, last=last)


def test_last_larger_than_there_are_layers():
    with pytest.raises(ValueError, match="last=4, but the model has 3 such layers"):
        gf.convert(small_cnn(), FILTER, last=4)


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


@methods
@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()])
def test_double_backward_is_refused(method, loss):
    model = small_cnn()
    gf.convert(model, method)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss(model(batch())), parameters, create_graph=True)
    # the last converted layer is the first that the second backward pass meets
    with pytest.raises(RuntimeError, match=r"double backward through a layer converted to \w+\("):
        torch.autograd.grad(sum(g.square().sum() for g in grads), parameters)


def test_double_backward_names_the_method():
    conv = nn.Conv2d(3, 4, 3)
    gf.convert(conv, FILTER)
    x = batch().requires_grad_()
    (gx,) = torch.autograd.grad(conv(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"GalerkinFilter\(patch=2\).*revert the"):
        gx.sum().backward()


def test_create_graph_alone_is_no_error():
    model = small_cnn()
    gf.convert(model, FILTER)
    expected = gradients(model)
    torch.manual_seed(0)
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    assert_equal_gradients(dict(zip(expected, grads, strict=True)), expected)

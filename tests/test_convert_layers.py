"""Layers that `convert` understands, whatever they pad or subclass, and those it leaves exact."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from converted import (
    FILTER,
    PATCH1,
    assert_equal_gradients,
    batch,
    methods,
    portrait,
    trained,
)
from torch import nn
from torch.nn.utils import parametrizations, prune

import gradfilter as gf


def layer_gradients(layer, x):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    y.backward(g)
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters()}


def assert_exact_when_converted(layer, x):
    """With patch 1 a converted layer is the plain one: so its geometry was understood."""
    expected = layer_gradients(layer, x)
    plan = gf.convert(layer, PATCH1)
    assert plan.exact == {} and len(plan.converted) == 1, plan
    assert_equal_gradients(layer_gradients(layer, x), expected, 1e-10)
    gf.revert(layer)


PADDINGS = {
    "reflect": {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    "replicate": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "replicate", "stride": 2},
    "circular": {"kernel_size": 5, "padding": 2, "padding_mode": "circular"},
    "reflect-same": {"kernel_size": 4, "padding": "same", "padding_mode": "reflect"},
    "reflect-none": {"kernel_size": 3, "padding": 0, "padding_mode": "reflect"},
    "same": {"kernel_size": 3, "padding": "same", "dilation": 2},
    "same-even": {"kernel_size": (4, 2), "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid", "stride": 2},
    "two-paddings": {"kernel_size": (3, 5), "padding": (0, 2), "groups": 2},
}


paddings = pytest.mark.parametrize("arguments", PADDINGS.values(), ids=PADDINGS)
copies_padding = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@copies_padding
@paddings
@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
def test_paddings_are_understood(arguments, size):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, **arguments, dtype=torch.float64)
    assert_exact_when_converted(conv, torch.randn(2, 4, *size, dtype=torch.float64))
    assert_exact_when_converted(conv, torch.randn(4, *size, dtype=torch.float64))  # unbatched


@copies_padding
@methods
@paddings
def test_every_method_takes_every_padding(method, arguments):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, **arguments, dtype=torch.float64)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    expected = conv(x)
    if isinstance(method, gf.WalshHadamard):
        with pytest.raises(ValueError, match="1x1"):
            gf.convert(conv, method)
        return
    gf.convert(conv, method)
    found = layer_gradients(conv, x)
    assert torch.equal(found["y"], expected.detach())
    assert found["x"].shape == x.shape and found["weight"].shape == conv.weight.shape
    assert all(t.isfinite().all() for t in found.values())


def test_a_padding_mode_is_a_padding_layer_before_the_convolution():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    bare = nn.Conv2d(3, 4, 3)
    bare.load_state_dict(conv.state_dict())
    gf.convert(conv, FILTER)
    gf.convert(bare, FILTER)
    expected = layer_gradients(nn.Sequential(nn.ReflectionPad2d(1), bare), batch())
    found = layer_gradients(conv, batch())
    assert torch.equal(found["x"], expected["x"])
    assert torch.equal(found["weight"], expected["1.weight"])


def test_unbatched_linear():
    linear = nn.Linear(6, 4).double()
    x = torch.randn(6).double()
    expected = layer_gradients(linear, x)
    gf.convert(linear, gf.Hosvd(energy=1))
    assert_equal_gradients(layer_gradients(linear, x), expected, 1e-10)


class StaticPadConv(nn.Conv2d):
    """TensorFlow's padding for a fixed image size, as in several EfficientNet ports."""

    def __init__(self, *args, pads, **kwargs):
        super().__init__(*args, **kwargs)
        self.static_padding = nn.ZeroPad2d(pads)

    def forward(self, x):
        x = self.static_padding(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class RenamedConv(nn.Conv2d):
    """A subclass that changes nothing."""


class MaskedConv(nn.Conv2d):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class LoraConv(nn.Conv2d):
    """Adds a low-rank layer that starts at 0, so that at first it changes nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.update = nn.Conv2d(self.in_channels, self.out_channels, self.kernel_size)
        nn.init.zeros_(self.update.weight)
        nn.init.zeros_(self.update.bias)

    def forward(self, x):
        return super().forward(x) + self.update(x)


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def conv2d_same(*args, **kwargs):
    return pytest.importorskip("timm.layers").Conv2dSame(*args, **kwargs)


def std_conv(*args, **kwargs):
    return pytest.importorskip("timm.layers").StdConv2d(*args, **kwargs)


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (12, 11), (5, 10)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: conv2d_same(3, 4, 3, stride=2),
        lambda: conv2d_same(4, 4, 5, stride=2, groups=4),
        lambda: conv2d_same(3, 4, 3, stride=3, dilation=2),
        lambda: conv2d_same(3, 4, 1, stride=2),
        lambda: StaticPadConv(3, 4, 3, stride=2, pads=(0, 1, 0, 1)),
        lambda: StaticPadConv(4, 4, 5, stride=2, groups=4, pads=(1, 2, 2, 1)),
        lambda: RenamedConv(3, 4, 3, padding=1),
    ],
)
def test_subclasses_that_only_pad_are_understood(make, size):
    torch.manual_seed(0)
    conv = make().double()
    original = type(conv)
    x = torch.randn(2, conv.in_channels, *size, dtype=torch.float64)
    assert_exact_when_converted(conv, x)
    assert type(conv) is original
    gf.convert(conv, FILTER)
    twin = pickle.loads(pickle.dumps(conv))
    assert torch.equal(twin(x), conv(x))


@pytest.mark.parametrize("value", [None, 0.0])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [std_conv, MaskedConv, LoraConv])
def test_subclasses_that_change_more_are_left_exact(make, device, value):
    conv = make(4, 4, 3).double()
    if value is not None:
        nn.init.constant_(conv.weight, value)  # as zero-initialised residual branches have
    model = nn.Sequential(nn.Conv2d(4, 4, 3), conv).to(device)
    plan = gf.convert(model, FILTER)
    reason = f"{make(4, 4, 3).__class__.__name__} changes more of nn.Conv2d than its padding"
    assert plan["1"].reason == reason and plan["1"].method == gf.Exact()
    assert type(model[1]) is type(conv) and "0" in plan.converted
    with pytest.raises(ValueError, match="layer '1' cannot have Gal.*changes more"):
        gf.convert(model, {"1": FILTER})


def test_meta_and_half_precision_subclasses_are_understood():
    for conv in (conv2d_same(3, 4, 3, stride=2).to("meta"), conv2d_same(3, 4, 3).half()):
        assert gf.convert(conv, FILTER).exact == {}
        assert conv.gf.shape.same


def test_trying_a_subclass_out_has_no_side_effects():
    seen = []
    conv = StaticPadConv(3, 4, 3, pads=(1, 1, 1, 1))
    conv.register_forward_hook(lambda *_: seen.append(1))
    before, rng = portrait(conv), torch.get_rng_state()
    gf.convert(conv, FILTER)
    gf.revert(conv)
    assert portrait(conv) == before and seen == []
    assert torch.equal(rng, torch.get_rng_state())


# layers left exact, with a reason


class ReadsWeights(nn.Module):
    """Uses the weight of one child without calling it, and asks another for its dtype."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(6, 6)
        self.asked = nn.Linear(6, 6)

    def forward(self, x):
        return self.asked(F.linear(x, self.read.weight).to(self.asked.weight.dtype))


def pruned():
    conv = nn.Conv2d(3, 4, 3)
    prune.l1_unstructured(conv, "weight", 0.5)
    return conv


def with_own_forward():
    conv = nn.Conv2d(3, 4, 3)
    conv.forward = lambda x: x
    return conv


LEFT = {
    "parametrised": (lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), "", "computed from"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 4)), "", "computed from"),
    "pruned": (pruned, "", "computed from"),
    "lazy": (lambda: nn.LazyConv2d(4, 3), "", "lazy"),
    "lazy-linear": (lambda: nn.LazyLinear(4), "", "lazy"),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2),
        ".out_proj",
        "MultiheadAttention reads its weight without calling it",
    ),
    "reads": (ReadsWeights, ".read", "ReadsWeights reads its weight without calling it"),
    "linear-subclass": (lambda: ScaledLinear(3, 4), "", "changes the forward of nn.Linear"),
    "complex": (lambda: nn.Conv2d(3, 4, 3, dtype=torch.complex64), "", "complex64"),
    "own-forward": (with_own_forward, "", "replaced"),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), "", "ConvTranspose2d is not supported"),
    "1d": (lambda: nn.Conv1d(3, 4, 3), "", "Conv1d is not supported"),
}


@pytest.mark.parametrize(("make", "child", "reason"), LEFT.values(), ids=LEFT)
def test_layers_that_are_left_exact_say_why(make, child, reason):
    method = gf.Svd(energy=0.5)
    model = nn.ModuleDict({"plain": nn.Conv2d(3, 4, 3), "odd": make(), "head": nn.Linear(3, 4)})
    name, original = f"odd{child}", type(model.get_submodule(f"odd{child}"))
    plan = gf.convert(model, method)
    assert reason in plan[name].reason and plan[name].method == gf.Exact()
    assert f"exact: {plan[name].reason}" in str(plan)
    assert type(model.get_submodule(name)) is original
    assert "plain" in plan.converted
    with pytest.raises(ValueError, match=f"layer '{name}' cannot have Svd.*{reason}"):
        gf.convert(model, {name: method})


def test_a_weight_that_is_read_for_its_dtype_is_converted():
    plan = gf.convert(ReadsWeights(), {"*": gf.Svd()})
    assert list(plan.converted) == ["asked"]


def test_transformer_layers_are_converted():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    plan = gf.convert(model, gf.WalshHadamard(patch=2, bases=2), example=torch.randn(2, 9, 8))
    assert "linear1" in plan.converted
    assert list(gf.convert(model, {"linear*": gf.Svd()}).converted) == ["linear1", "linear2"]


def test_a_parametrised_layer_can_be_frozen():
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    plan = gf.convert(model, {"0": "frozen", "1": FILTER})
    assert plan.frozen == ["0"] and trained(model) == ["1.weight", "1.bias"]
    gf.revert(model)
    assert len(trained(model)) == 5


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_hook_that_computes_the_weight_is_seen_through():
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    plan = gf.convert(model, FILTER, last=1)
    assert plan.frozen == ["0"] and trained(model) == ["1.weight", "1.bias"]


def test_a_qat_layer_is_left_exact_and_its_observers_untouched():
    from torch.ao.nn import qat
    from torch.ao.quantization import get_default_qat_qconfig

    conv = qat.Conv2d(3, 4, 3, qconfig=get_default_qat_qconfig())
    before = {k: v.clone() for k, v in conv.state_dict().items()}
    plan = gf.convert(nn.Sequential(nn.Conv2d(3, 3, 1), conv), FILTER)
    assert "changes more" in plan["1"].reason
    assert all(torch.equal(v, before[k]) for k, v in conv.state_dict().items())

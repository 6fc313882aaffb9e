"""Where the engine runs, what it says of the rest, and what it keeps."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import segmentation_models_pytorch as smp
import torch
from networks import NAMED, Call, Network, Unit, assert_same, engines, exact, named, norm, run
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import gradfilter as gf

METHOD = gf.GalerkinFilter(grid=7)
UNTRACEABLE = "layer level: not traceable: symbolically traced variables cannot be used as inputs"


def share_in_regions(plan):
    """Of the trained convolutions that the example reaches."""
    places = [
        e.where or ""
        for e in plan.values()
        if e.kind == "conv" and e.trained and e.reason != "the example does not reach it"
    ]
    return sum(where.startswith("region ") for where in places) / len(places)


@pytest.mark.parametrize("name", [*NAMED, "mobilenet_v3_large", "resnet34", "regnet_x_400mf"])
def test_networks_run_in_regions(name):
    model = named(name)
    plan = gf.convert(model, METHOD, example=torch.randn(1, 3, 64, 64))
    assert share_in_regions(plan) >= 0.9, plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a region that does not run by the engine is told
        model(torch.randn(2, 3, 80, 64)).sum().backward()


ENCODERS = "resnet18 mobilenet_v2 efficientnet-b0 timm-mobilenetv3_small_100 dpn68b mit_b0"


@pytest.mark.parametrize("encoder", ENCODERS.split())
def test_segmentation_encoders_run_in_regions(encoder):
    model, x = smp.Unet(encoder, encoder_weights=None), torch.randn(1, 3, 64, 64)
    assert share_in_regions(gf.convert(model, METHOD, example=x)) >= 0.9
    assert share_in_regions(gf.convert(model.encoder, METHOD, example=x)) >= 0.9


def test_a_segmentation_network_has_the_gradients_of_its_layers():
    torch.manual_seed(0)
    model = smp.Unet("mobilenet_v2", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8))
    x = torch.randn(1, 3, 64, 96, dtype=torch.float64)
    layer, engine = engines(model, METHOD, x)
    assert_same(run(engine, x), run(layer, x))


def conv(i=8, o=8):
    return nn.Conv2d(i, o, 3, padding=1)


def block():
    return nn.Sequential(conv(), norm(8, "affine"), nn.SiLU())


class Decides(nn.Module):
    """Control flow that depends on the data, around parts that have none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(conv(3), nn.SiLU())
        self.blocks = nn.ModuleList([block(), Call(self.decides, inner=block(), last=conv())])
        self.head = conv()

    @staticmethod
    def decides(m, x):
        return m.last(m.inner(x)) if x.mean() > 100 else m.last(m.inner(x) + x)

    def forward(self, x):
        x = self.stem(x)
        if x.sum() > 1e9:
            return x
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def test_the_traceable_parts_of_a_model_run_in_regions():
    model, x = Decides(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    plan = gf.convert(model.double(), METHOD, example=x)
    places = {name: e.where for name, e in plan.items()}
    assert places["stem.0"] == "region 1 of stem"
    assert places["blocks.0.0"] == "region 1 of blocks.0"
    assert places["blocks.1.inner.0"] == "region 1 of blocks.1.inner"
    assert places["head"].startswith(UNTRACEABLE)
    assert places["blocks.1.last"].startswith(UNTRACEABLE)
    assert "region 1 of blocks.0" in str(plan) and UNTRACEABLE in str(plan)


def test_a_model_in_parts_trains_as_a_whole():
    model, x = Decides(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    expected = exact(model, x)
    gf.convert(model.double().train(), gf.GalerkinFilter(patch=1), example=x)
    assert_same(run(model, x), expected)
    gf.revert(model)
    assert type(model) is Decides and type(model.blocks[0]) is nn.Sequential
    assert not any(key.startswith("gf") for m in model.modules() for key in m.__dict__)


def test_a_model_without_traceable_parts_trains_at_the_layer_level():
    class Untraceable(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = conv(3), conv()

        def forward(self, x):
            return self.b(self.a(x)) if x.sum() < 1e9 else x

    model, x = Untraceable().double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    plan = gf.convert(model, METHOD, example=x)
    assert all(e.where.startswith(UNTRACEABLE) for e in plan.values())
    assert not any(hasattr(m, "gf_engine") for m in model.modules())
    found = run(model, x)
    gf.convert(model, METHOD)
    assert_same(found, run(model, x))


def test_the_plan_says_why_a_layer_is_outside():
    model = nn.Sequential(
        conv(3),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.PReLU(),
        conv(),
        nn.MaxPool2d(2, ceil_mode=True),
        conv(),
        conv(),
    )
    x = torch.randn(2, 3, 11, 11)
    model[6].register_forward_hook(lambda *_: None)
    plan = gf.convert(model, {"*": METHOD, "5": gf.Exact()}, example=x)
    assert [e.where for e in plan.values()] == [
        "region 1",
        "layer level: reflect padding",
        "region 2",
        "layer level: Exact has no patch grid",
        "layer level: Conv2d has hooks",
    ]
    plan = gf.convert(model, METHOD, example=x, engine="layer")
    assert plan["0"].where == "layer level: engine='layer'"
    assert gf.convert(model, METHOD)["0"].where is None


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(conv(3), nn.SiLU(), conv())

    def forward(self, x, scale=None):
        x = x if x.ndim == 4 else x[None]
        return self.a(x) if scale is None else self.a(x) * scale


def test_calls_the_engine_cannot_take_run_at_the_layer_level():
    """By keyword, with one image alone, with a number: as the model itself would."""
    model, x = Keywords(), torch.randn(2, 3, 12, 12)
    expected = model(x), model(x[0]), model(x, scale=2.0)
    gf.convert(model, METHOD, example=x)
    for found, e in zip((model(x=x), model(x[0]), model(x, 2.0)), expected, strict=True):
        torch.testing.assert_close(found, e)
        found.sum().backward()


def test_an_example_by_keyword_engages_the_parts():
    model, x = Keywords(), torch.randn(2, 3, 12, 12)
    plan = gf.convert(model, METHOD, example={"x": x, "scale": None})
    assert {e.where for e in plan.values()} == {"region 1 of a"}
    assert not hasattr(model, "gf_engine")


def saved(model, x, loss=lambda y: y.sum()):
    """Shape and bytes of each tensor that autograd holds, parameters and buffers aside."""
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(t):
        if t.data_ptr() not in own:
            found[t.data_ptr()] = tuple(t.shape), t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = loss(model(x))
    return [*found.values()], graph(y)


def graph(y):
    """Every autograd function behind y."""
    found, todo = set(), [y.grad_fn]
    while todo:
        f = todo.pop()
        if f is not None and f not in found:
            found.add(f)
            todo += [before for before, _ in f.next_functions]
    return found


@pytest.mark.parametrize(
    "name, last, block", [("mobilenet_v2", 4, 17), ("mobilenet_v3_small", 6, 11)]
)
def test_a_frozen_front_keeps_nothing_and_autograd_sees_nothing_of_it(name, last, block):
    """The whole model holds what its end, from the first trained block on, alone holds."""
    model, x = named(name).eval(), torch.randn(2, 3, 64, 64)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier
    end = nn.Sequential(*model.features[block:], *head)
    with torch.no_grad():
        middle = model.features[:block](x)
    gf.convert(end, METHOD, example=middle)
    alone = sum(size for _, size in saved(end, middle)[0])
    gf.revert(end)
    plan = gf.convert(model, METHOD, example=x, last=last)
    assert {e.where for e in plan.values() if e.kind == "conv"} == {"region 1"}
    kept, functions = saved(model, x)
    assert sum(size for _, size in kept) == alone
    leaves = {f.variable for f in functions if hasattr(f, "variable")}
    trained = {p for p in model.parameters() if p.requires_grad}
    assert leaves == trained == set(end.parameters())


@pytest.mark.parametrize("name", ["mobilenet_v2", "tf_efficientnet_lite0", "resnet18"])
def test_kept_bytes(name):
    """At least 12 times less than exact backpropagation with the same frozen batch norms."""
    model, x = named(name).train(), torch.randn(1, 3, 224, 224)
    for m in model.modules():
        if isinstance(m, _BatchNorm):
            m.eval()
    before = sum(size for _, size in saved(model, x)[0])
    gf.convert(model, METHOD, example=x)
    after = sum(size for _, size in saved(model, x)[0])
    assert before >= 12 * after, before / after


EAGER = """
import torch, networks
from gradfilter import kernels
assert "forced" in kernels.status()["cpu"]
from test_engine import METHOD, some_network
model, x = some_network(), torch.randn(2, 3, 20, 20)
layer, engine = networks.engines(model, METHOD, x)
networks.assert_same(networks.run(engine, x), networks.run(layer, x), 1e-4)
"""


def some_network():
    blocks = [
        ("chain", Unit(norm="affine", act="silu", stride=2), "none"),
        ("gate", Unit(8, norm="affine", act="gelu"), "none"),
        ("residual", Unit(2, kernel=5), "tanh"),
    ]
    return Network(blocks, "both", seed=0)


def test_the_eager_kernels_do_as_well():
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent / "src"), str(here)])
    environment = os.environ | {"GRADFILTER_KERNELS": "eager", "PYTHONPATH": path}
    command = [sys.executable, "-c", EAGER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

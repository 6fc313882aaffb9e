"""The engine has the gradients of the layer level, and with patch 1 those of backpropagation."""

import copy
import random

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from cases import CONVS, conv_module
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from networks import (
    ACTS,
    BLOCKS,
    CHANNELS,
    METHODS,
    POOLS,
    SMOOTH,
    Block,
    Call,
    Network,
    Unit,
    assert_same,
    drawn_networks,
    engines,
    norm,
    run,
)
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import StochasticDepth

import gradfilter as gf
from gradfilter.kernels.eager import ACTIVATIONS
from gradfilter.region.lower import Outside

EXACT = gf.GalerkinFilter(patch=1)
methods = pytest.mark.parametrize("method", METHODS, ids=repr)


def drawn(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def freeze(model, which, seed):
    """Freeze no parameter, a random half of them, those of the front, or all but the biases."""
    parameters = dict(model.named_parameters())
    coin = random.Random(seed)
    front = coin.randrange(len(parameters))
    for i, (name, p) in enumerate(parameters.items()):
        frozen = {
            "none": False,
            "half": coin.random() < 0.5,
            "front": i < front,
            "weights": not name.endswith("bias"),
        }
        p.requires_grad_(not frozen[which])


def exact(model, x, statistics="frozen"):
    """The step of the model itself, its batch norms in the mode that a conversion gives them."""
    model = copy.deepcopy(model).to(x.dtype).train()
    for m in model.modules():
        if isinstance(m, _BatchNorm) and statistics == "frozen":
            m.eval()
    return run(model, x)


@drawn(150)
@given(
    drawn_networks(),
    st.sampled_from(METHODS),
    st.sampled_from(["frozen", "batch"]),
    st.sampled_from(["none", "half", "front", "weights"]),
    st.booleans(),
)
def test_drawn_networks(drawn, method, statistics, frozen, input_grad):
    model, x = drawn.build(statistics)
    freeze(model, frozen, drawn.seed)
    layer, engine = engines(model, method, x, statistics)
    found = run(engine, x, input_grad)
    assert_same(found, run(layer, x, input_grad))
    expected = exact(model, x, statistics)
    forward = [key for key in found if not key.startswith("grad")]
    assert_same({key: found[key] for key in forward}, {key: expected[key] for key in forward})


@drawn(60)
@given(drawn_networks(), st.sampled_from(["frozen", "batch"]))
def test_drawn_networks_with_patch_1_are_exact(drawn, statistics):
    model, x = drawn.build(statistics)
    _, engine = engines(model, EXACT, x, statistics)
    assert_same(run(engine, x), exact(model, x, statistics))


@drawn(60)
@given(drawn_networks(acts=SMOOTH, pools=False), st.sampled_from(METHODS))
def test_drawn_networks_in_float32(drawn, method):
    """Smooth functions alone: at a kink, rounding may choose the other side."""
    model, x = drawn.build()
    expected = run(engines(model, method, x)[0], x)
    found = run(engines(model, method, x.float())[1], x.float())
    assert {t.dtype for key, t in found.items() if key.startswith("grad") and t is not None} == {
        torch.float32
    }
    expected = {key: t if t is None else t.to(found[key].dtype) for key, t in expected.items()}
    assert_same(found, expected, 2e-4)


# A forward pass in which something is easily misread; each takes [N, 4, 9, 7].
def conv(out=4, kernel=3, **options):
    return nn.Conv2d(4, out, kernel, padding=kernel // 2, **options)


def in_place_twice(m, x):
    y = m.a(x)
    return m.act(y) + y  # y, too, is what the activation made of it


def one_head_unused(m, x):
    y = m.a(x)
    m.b(y)
    return m.c(y)


class ReadsOptions(nn.Module):
    """Optional arguments, and a mask that a tracer could take for given."""

    def __init__(self):
        super().__init__()
        self.a = conv()

    def forward(self, x, mask=None, twice: bool = False):
        y = self.a(x)
        y = y if mask is None else y * mask
        return self.a(y) if twice else F.silu(y)


class OddNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).abs()


HAND = {
    "norm after a sum": lambda: Call(lambda m, x: m.n(m.a(x) + x), a=conv(), n=norm(4, "affine")),
    "a map plus itself": lambda: Call(lambda m, x: (lambda y: y + y)(m.a(x)), a=conv()),
    "in-place sum": lambda: Call(
        lambda m, x: m.act(m.n(m.a(x)).add_(x)), a=conv(), n=norm(4, "affine"), act=nn.SiLU()
    ),
    "in-place activation": lambda: Call(in_place_twice, a=conv(), act=nn.SiLU(inplace=True)),
    "in-place input": lambda: Call(
        lambda m, x: m.a(F.silu(m.b(x), True)) + m.c(x), a=conv(), b=conv(), c=conv()
    ),
    "leaky 0": lambda: Call(lambda m, x: m.act(m.a(x)), a=conv(), act=nn.LeakyReLU(0.0)),
    "leaky 0.3": lambda: Call(lambda m, x: m.act(m.a(x)), a=conv(), act=nn.LeakyReLU(0.3)),
    "elu 0.5": lambda: Call(lambda m, x: m.act(m.a(x)), a=conv(), act=nn.ELU(0.5)),
    "hardtanh": lambda: Call(lambda m, x: m.act(3 * m.a(x)), a=conv(), act=nn.Hardtanh(0, 6)),
    "one norm of two layers": lambda: Call(
        lambda m, x: m.n(m.b(m.n(m.a(x)))), a=conv(), b=conv(), n=norm(4, "affine")
    ),
    "one layer, two norms": lambda: Call(
        lambda m, x: m.n(m.a(x)) + m.o(m.a(x)), a=conv(), n=norm(4, "affine"), o=norm(4, "bare")
    ),
    "two epsilons": lambda: Call(
        lambda m, x: m.n(m.a(x)) + m.o(m.b(x)),
        a=conv(),
        b=conv(),
        n=norm(4, "affine"),
        o=nn.BatchNorm2d(4, eps=0.1),
    ),
    "a norm of its own": lambda: Call(lambda m, x: m.n(m.a(x)), a=conv(), n=OddNorm(4)),
    "timm's norm and activation": lambda: Call(
        lambda m, x: m.n(m.a(x)), a=conv(), n=BatchNormAct2d(4, act_layer=nn.SiLU)
    ),
    "one pixel, read twice": lambda: Call(
        lambda m, x: (lambda s: s * s + s)(m.a(x).mean((2, 3), keepdim=True)), a=conv()
    ),
    "a view": lambda: Call(
        lambda m, x: m.fc(F.silu(m.a(x)).view(x.size(0), -1)), a=conv(), fc=nn.Linear(252, 3)
    ),
    "mean over channels": lambda: Call(
        lambda m, x: m.a(x).mean(1, keepdim=True) * m.b(x), a=conv(), b=conv()
    ),
    "by keyword": lambda: Call(
        lambda m, x: torch.cat(
            tensors=[F.silu(input=m.a(input=x)), torch.chunk(m.b(x), chunks=2, dim=1)[1]], dim=1
        ),
        a=conv(),
        b=conv(),
    ),
    "chunks turned round": lambda: Call(
        lambda m, x: torch.cat(m.a(x).chunk(2, 1)[::-1], 1), a=conv()
    ),
    "uneven chunks": lambda: Call(
        lambda m, x: torch.cat([t * t.mean() for t in m.a(x).chunk(3, 1)], 1), a=conv(7)
    ),
    "cat along rows": lambda: Call(lambda m, x: torch.cat([m.a(x), m.b(x)], 2), a=conv(), b=conv()),
    "a sum with a factor": lambda: Call(
        lambda m, x: torch.add(m.a(x), m.b(x), alpha=2) + 1, a=conv(), b=conv()
    ),
    "a position map": lambda: Call(
        lambda m, x: F.silu(m.a(x) + m.p), a=conv(), p=nn.Parameter(torch.randn(1, 4, 9, 7))
    ),
    "a layer scale": lambda: Call(
        lambda m, x: x + m.a(x) * m.s, a=conv(), s=nn.Parameter(torch.randn(1, 4, 1, 1))
    ),
    "a product of maps": lambda: Call(lambda m, x: m.a(x) * m.b(x), a=conv(), b=conv()),
    "optional arguments": ReadsOptions,
    "one head unused": lambda: Call(one_head_unused, a=conv(), b=conv(), c=conv()),
    "depth of 0": lambda: Call(
        lambda m, x: (lambda y: y + F.silu(m.drop(y)))(m.a(m.drop(x))),
        a=conv(),
        drop=StochasticDepth(0.0, "row"),
    ),
    "depthwise, frozen": lambda: Call(
        lambda m, x: m.b(m.a(x)), a=conv(), b=conv(groups=4, bias=False).requires_grad_(False)
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_what_is_easily_misread(name):
    torch.manual_seed(0)
    model, x = HAND[name](), torch.randn(2, 4, 9, 7, dtype=torch.float64)
    assert_same(run(engines(model, EXACT, x)[1], x), exact(model, x))
    layer, engine = engines(model, gf.GalerkinFilter(patch=2), x)
    expected = run(layer, x)
    assert_same(run(engine, x), expected)
    found = run(engines(model, gf.GalerkinFilter(patch=2), x.float())[1], x.float())
    assert_same(found, in_float32(expected, found), 1e-4)


def in_float32(expected, found):
    return {key: t if t is None else t.to(found[key].dtype) for key, t in expected.items()}


@methods
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name, method):
    """Behind a convolution, a norm, a sum and a max-pool, and before one."""
    assert set(ACTS) == set(ACTIVATIONS)
    unit = Unit(bias=False, norm="affine", act=name)
    blocks = [("chain", unit, name), ("residual", Unit(), name), ("before", Unit(8), name)]
    model = Network([*blocks, ("chain", Unit(kernel=1, pool=(3, 2, 1)), name)], "map", seed=3)
    x = 2 * torch.randn(2, 3, 11, 13, dtype=torch.float64)
    layer, engine = engines(model, method, x)
    assert_same(run(engine, x), run(layer, x))


@pytest.mark.parametrize("act", ["none", "relu", "silu"])
@pytest.mark.parametrize("pool", POOLS)
@methods
def test_max_pool(method, pool, act):
    model = Network([("chain", Unit(act=act, pool=pool), "none"), ("chain", Unit(), "none")], "map", 0)
    x = torch.randn(2, 3, 14, 17, dtype=torch.float64)
    layer, engine = engines(model, method, x)
    assert_same(run(engine, x), run(layer, x))


@pytest.mark.parametrize("method", [*METHODS, gf.GalerkinFilter(grid=20), EXACT], ids=repr)
@pytest.mark.parametrize("name", CONVS)
def test_every_geometry(name, method):
    """Each way to apply the counts: grids above and below 16 a side, groups, strides, paddings."""
    case = CONVS[name]
    torch.manual_seed(0)
    model = Call(lambda m, x: F.silu(m.a(x)), a=conv_module(case))
    for size in (case.size, tuple(3 * s + 1 for s in case.size)):
        x = torch.randn(case.batch, case.channels, *size, dtype=torch.float64)
        layer, engine = engines(model, method, x)
        assert_same(run(engine, x), run(layer, x))


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-30, 1e-20])
def test_a_gamma_of_nothing(value):
    """A gamma of 0 has a gradient, though nothing passes its channel."""
    torch.manual_seed(0)
    model = Call(lambda m, x: F.silu(m.n(m.a(x))), a=conv(), n=norm(4, "affine"))
    model.n.weight.data[:2] = value
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    expected = run(engines(model, gf.GalerkinFilter(grid=3), x)[0], x)
    found = run(engines(model, gf.GalerkinFilter(grid=3), x.float())[1], x.float())
    assert expected["grad n.weight"][0].abs() > 1e-3
    assert_same(found, in_float32(expected, found), 1e-5)


def test_mixed_methods():
    """Where two methods meet, the gradient is projected from one grid to the other."""
    blocks = [("residual", Unit(act="silu"), "silu"), ("gate", Unit(8, act="relu"), "relu")] * 2
    model, x = Network(blocks, "both", 0), torch.randn(2, 3, 15, 13, dtype=torch.float64)
    plan = {
        "*": gf.GalerkinFilter(grid=4),
        "blocks.1.*": gf.GradientFilter(patch=2),
        "blocks.2.*": gf.Exact(),
    }
    layer, engine = engines(model, plan, x)
    assert_same(run(engine, x), run(layer, x))
    assert len({p.method for p in program_of(engine).parts if not isinstance(p, Outside)}) == 2


def program_of(model):
    (program,) = model.gf_engine.programs.values()
    return program


@drawn(40)
@given(
    drawn_networks(
        kinds=["chain", "concat", "shuffle", "gate", "shared", "split"], norms=["none"], pools=False
    ),
    st.sampled_from(METHODS),
)
def test_without_sums_and_norms_it_is_the_conversion_of_each_layer(drawn, method):
    """There, every value meets a convolution's projection, and projecting twice is nothing new."""
    model, x = drawn.build()
    layer, engine = engines(model, method, x)
    alone = copy.deepcopy(model).to(x.dtype).train()
    gf.convert(alone, method)
    expected = run(alone, x)
    ...


# the networks people use

NAMED = {
    name: lambda name=name: torchvision.models.get_model(name, weights=None, num_classes=10)
    for name in (
        "mobilenet_v2 mobilenet_v3_small efficientnet_b0 resnet18 regnet_y_400mf mnasnet0_5 "
        "shufflenet_v2_x0_5"
    ).split()
}
NAMED["tf_efficientnet_lite0"] = lambda: timm.create_model("tf_efficientnet_lite0", num_classes=10)


def named(name):
    """A network whose batch norms have seen something."""
    torch.manual_seed(0)
    model = NAMED[name]()
    for m in model.modules():
        if isinstance(m, _BatchNorm):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias)
    return model


def images(seed=0, dtype=torch.float64):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 72, 64, generator=noise, dtype=dtype)


@pytest.mark.parametrize(
    "method, statistics",
    [
        (gf.GalerkinFilter(grid=4), "frozen"),
        (gf.GalerkinFilter(patch=3), "batch"),
        (gf.GradientFilter(patch=2), "frozen"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", NAMED)
def test_named_networks(name, method, statistics):
    """Stochastic depth and dropout included: both draw the same from one seed."""
    layer, engine = engines(named(name), method, images(), statistics)
    assert_same(run(engine, images()), run(layer, images()))


@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_b0", "resnet18", "shufflenet_v2_x0_5"])
@pytest.mark.parametrize("statistics", ["frozen", "batch"])
def test_named_networks_with_patch_1_are_exact(name, statistics):
    model = named(name)
    engine = engines(model, EXACT, images(), statistics)[1]
    assert_same(run(engine, images()), exact(model, images(), statistics))


@pytest.mark.parametrize("name", NAMED)
def test_named_networks_in_float32(name):
    """On one of three batches: rounding moves a pixel over a kink now and then, not every time."""
    worst = []
    for seed in range(3):
        x = images(seed)
        model, method = named(name), gf.GalerkinFilter(grid=4)
        expected = run(engines(model, method, x)[0], x)
        found = run(engines(model, method, x.float())[1], x.float())
        keys = [key for key, g in expected.items() if "grad" in key and g is not None]
        worst.append(max(float((found[k] - expected[k]).norm() / expected[k].norm()) for k in keys))
        if worst[-1] < 1e-4:
            return
    raise AssertionError(worst)

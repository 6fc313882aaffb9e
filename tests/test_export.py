"""An exported step is the step that PyTorch takes, for every kind of plan."""

import copy

import exported
import networks
import numpy as np
import onnx
import pytest
import torch
from exported import assert_close, in_pytorch, optimizer_of
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

import gradfilter as gf
from gradfilter.export import galerkin, onebyone

CLASSES = 5
TOLERANCE = 1e-9
LARGE = 2600  # bytes: of these small networks the larger maps, and not what is kept of them
PLANS = {
    "galerkin grid": gf.GalerkinFilter(grid=3),
    "galerkin patch": gf.GalerkinFilter(patch=2),
    "gradient filter": gf.GradientFilter(patch=2),
    "gradient filter 3": gf.GradientFilter(patch=3),
    "exact": gf.Exact(),
    "mixed": {
        "0.*": gf.GalerkinFilter(grid=3),
        "1.*": gf.Exact(),
        "2.*": gf.GradientFilter(patch=2),
    },
    "frozen": {"0.*": "frozen", "1.*": gf.GalerkinFilter(grid=3), "2.*": gf.Exact()},
}
KEEPING = ("exact", "mixed", "frozen")  # a large map from the first layers on, for a norm too


@pytest.fixture(autouse=True, params=[onebyone.LARGE, LARGE], ids=["batch", "one by one"])
def large(request):
    """The whole batch at once, or the front of the network image by image."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onebyone, "LARGE", request.param)
        yield request.param == LARGE


def block(channels: int, out: int, stride: int, groups: int = 1, act=nn.ReLU6) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, 3, stride, 1, groups=groups, bias=False)
    return nn.Sequential(conv, networks.norm(out, "affine"), act())


def small(maps: bool = False) -> nn.Sequential:
    """Dense, depthwise, grouped, strided and 1x1 layers; scores, or maps of them."""
    torch.manual_seed(0)
    expand = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), networks.norm(16, "affine"), nn.ReLU())
    body = [
        nn.Sequential(block(3, 8, 2), block(8, 8, 1, 8)),
        nn.Sequential(expand, block(16, 16, 2, 2, nn.Hardswish), block(16, 16, 1, 16, nn.SiLU)),
        nn.Sequential(nn.Conv2d(16, 12, 1), nn.ReLU()),
    ]
    if maps:
        return nn.Sequential(*body, nn.Conv2d(12, CLASSES, 1)).double()
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES)]
    return nn.Sequential(*body, *head).double()


def batch(count: int = 3, size=(13, 18), maps: bool = False):
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, *size, generator=noise, dtype=torch.float64)
    shape = (count, *size) if maps else (count,)
    target = torch.randint(CLASSES, shape, generator=noise)
    if maps:
        target[:, :2] = -100  # no class: has no part in the loss
    return x, target


def planned(name: str, maps: bool = False, **options) -> nn.Module:
    model = small(maps)
    gf.convert(model, PLANS[name], **(options or {"example": batch(2)[0]}))
    return model


@pytest.mark.parametrize("maps", [False, True], ids=["classes", "masks"])
@pytest.mark.parametrize("plan", PLANS)
def test_one_step_in_float64(plan, maps, large, tmp_path):
    model, (x, target) = planned(plan, maps), batch(maps=maps)
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9, weight_decay=1e-3)
    folder = exported.exported(model, x, target, tmp_path, optimizer=optimizer)
    kinds = {n.op_type for n in onnx.load(tmp_path / "train.onnx").graph.node}
    assert ("Scan" in kinds) == (large and plan not in KEEPING)
    loss = folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer)
    assert_close(folder.values | {"loss": np.array(loss)}, expected, TOLERANCE)


@pytest.mark.parametrize("size", [(13, 18), (16, 20)], ids=["beyond", "whole"])
@pytest.mark.parametrize("plan", ["galerkin grid", "galerkin patch", "mixed"])
def test_one_step_on_large_grids(plan, size, tmp_path, monkeypatch):
    """Where not all counts are written out; no map as every tap sees it is put in another order."""
    monkeypatch.setattr(galerkin, "SMALL", 0)
    x, target = batch(size=size)
    model = planned(plan, example=x[:2])
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    folder = exported.exported(model, x, target, tmp_path, optimizer=optimizer)
    nodes = onnx.load(tmp_path / "train.onnx").graph.node
    turned = [a.ints for n in nodes if n.op_type == "Transpose" for a in n.attribute]
    assert max(map(len, turned)) <= 4
    loss = folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer)
    assert_close(folder.values | {"loss": np.array(loss)}, expected, TOLERANCE)


@pytest.mark.parametrize("plan", ["galerkin grid", "galerkin patch", "mixed", "exact"])
@pytest.mark.parametrize("how", ["no example", "layer"])
def test_a_plan_without_the_engine(how, plan, tmp_path):
    """Its constants are results of einsum, whose elements may share their memory."""
    x, target = batch()
    options = {"engine": "auto"} if how == "no example" else {"engine": "layer", "example": x}
    model = planned(plan, **options)
    folder = exported.exported(model, x, target, tmp_path)
    folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer_of(model, torch.optim.SGD))
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_three_steps_of_every_optimizer(kind, clip, tmp_path):
    model, (x, target) = planned("mixed"), batch()
    optimizer = optimizer_of(model, OPTIMIZERS[kind][0], **OPTIMIZERS[kind][1])
    folder = exported.exported(model, x, target, tmp_path, optimizer=optimizer, clip=clip)
    for _ in range(3):
        folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer, clip, steps=3)
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_groups_of_parameters_keep_their_share_of_the_rate(kind, tmp_path):
    model, (x, target) = planned("mixed"), batch()
    trained = [p for p in model.parameters() if p.requires_grad]
    rates = [exported.RATE * share for share in (0.3, 1, 0.1)]
    groups = [{"params": trained[i::3], "lr": rate} for i, rate in enumerate(rates)]
    optimizer = OPTIMIZERS[kind][0](groups, **OPTIMIZERS[kind][1])
    with pytest.raises(ValueError, match="not the model's"):
        gf.export(planned("mixed"), x, target, tmp_path, optimizer=optimizer)
    gf.export(model, x, target, tmp_path, optimizer=optimizer)
    folder = exported.Folder(tmp_path, exported.reference)
    for _ in range(3):
        folder.step(x, target)  # the highest
    expected = in_pytorch(model, x, target, optimizer, steps=3)
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)


@pytest.mark.parametrize("fixed", [None, 4])
def test_batch_size_free_or_fixed(fixed, tmp_path):
    model, (x, target) = planned("galerkin grid"), batch(4)
    folder = exported.exported(model, x[:2], target[:2], tmp_path, batch=fixed)
    folder.step(x, target)
    optimizer = optimizer_of(model, torch.optim.SGD)
    expected = in_pytorch(model, x, target, optimizer)
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)
    assert folder.manifest["images"][0] == fixed


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("maps", [False, True], ids=["classes", "masks"])
@pytest.mark.parametrize("plan", ["galerkin patch", "gradient filter", "frozen"])
def test_a_free_batch_is_any_number_of_images(plan, maps, count, tmp_path):
    """Exported with 2 images, with AdamW, whose count of steps has no batch size at all."""
    model, (x, target) = planned(plan, maps), batch(count, maps=maps)
    optimizer = optimizer_of(model, torch.optim.AdamW)
    folder = exported.exported(model, *batch(2, maps=maps), tmp_path, optimizer=optimizer, clip=0.5)
    for _ in range(2):
        folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer, 0.5, steps=2)
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)
    assert len(folder.scores(x)) == count


ACTIVATIONS = [nn.ReLU6, nn.Hardswish, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Hardsigmoid]


@pytest.mark.parametrize("last", [None, 1])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_that_write_in_place(act, last, tmp_path):
    """As MobileNetV3 has them; in a frozen front nothing else does their work."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), act(inplace=True), nn.Conv2d(4, 4, 3), act(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES),
    ).double()  # fmt: skip
    x, target = batch(3)
    gf.convert(model, gf.GalerkinFilter(grid=3), example=x, last=last)
    folder = exported.exported(model, x, target, tmp_path)
    folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer_of(model, torch.optim.SGD))
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)


class Last(nn.LayerNorm):
    """Over the channels of a map, which come last for it."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


NORMS = [Last(4), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Softsign(), nn.LogSigmoid(), nn.CELU()]


@pytest.mark.parametrize("engine", ["auto", "layer"])
@pytest.mark.parametrize("inner", NORMS, ids=lambda m: type(m).__name__)
def test_what_pytorch_itself_writes_with_other_operators(inner, engine, tmp_path):
    """Norms with parameters of their own, which are trained too."""
    torch.manual_seed(0)
    own = copy.deepcopy(inner)
    for p in own.parameters():
        nn.init.uniform_(p)
    shuffled = nn.Sequential(
        nn.PixelUnshuffle(2), nn.Conv2d(16, 32, 1), nn.GLU(1), nn.PixelShuffle(2)
    )
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), own, shuffled, nn.Conv2d(4, 4, 3), *head
    ).double()
    x, target = batch(3, (16, 20))
    gf.convert(model, gf.GalerkinFilter(grid=3), example=x, engine=engine)
    folder = exported.exported(model, x, target, tmp_path)
    folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer_of(model, torch.optim.SGD))
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)


def test_prediction_is_the_models(tmp_path):
    for maps in (False, True):
        model, (x, target) = planned("frozen", maps), batch(maps=maps)
        folder = exported.exported(model, x, target, tmp_path)
        with torch.no_grad():
            scores = model.eval()(x)
        if maps:
            scores = torch.nn.functional.interpolate(scores, x.shape[2:], mode="bilinear")
        assert np.abs(folder.scores(x) - scores.numpy()).max() < 1e-9


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(networks.drawn_networks(kinds=[k for k in networks.BLOCKS if k != "drop"]))
def test_drawn_networks(tmp_path_factory, drawn):
    inner, x = drawn.build()
    network = networks.Call(lambda m, x: m.inner(x)[0], inner=inner).double()
    gf.convert(network, networks.METHODS[drawn.seed % len(networks.METHODS)], example=x)
    with torch.no_grad():
        shape = network.eval()(x).shape
    if len(shape) == 4:
        inner.fc.requires_grad_(False)  # a map is given, and no class
    noise = torch.Generator().manual_seed(drawn.seed)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=noise)
    folder = exported.exported(network, x, target, tmp_path_factory.mktemp("drawn"))
    folder.step(x, target)
    expected = in_pytorch(network, x, target, optimizer_of(network, torch.optim.SGD))
    expected.pop("loss")
    assert_close(folder.values, expected, TOLERANCE)

"""Graphs whose depthwise layers lie in blocks of channels: the same steps, where they can run."""

import platform
import shutil

import exported
import networks
import numpy as np
import onnx
import pytest
import torch
from exported import assert_close, optimizer_of
from on_device import module
from torch import nn
from torchvision.models.mobilenetv2 import InvertedResidual

import gradfilter as gf
from gradfilter.export import convolutions
from gradfilter.export.folder import in_blocks
from gradfilter.export.graph import BLOCKED

x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="not every processor has blocks"
)


def depthwise(kernel: int, stride: int, act: nn.Module, channels: int = 32) -> nn.Module:
    """A network whose middle layer is depthwise."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, 2, 1), nn.BatchNorm2d(channels), nn.ReLU6(),
        nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False),
        nn.BatchNorm2d(channels), act,
        nn.Conv2d(channels, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 4),
    )  # fmt: skip


def written(model, path, what, size=28, batch=None, **options):
    x, target = torch.randn(3, 3, size, size), torch.randint(4, (3,))
    gf.convert(model, what, example=x, **options)
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    gf.export(model, x, target, path, optimizer=optimizer, batch=batch)
    return x, target


def both(path, x, target, steps: int = 2) -> list[dict]:
    """Parameters, state and losses by the plain graph and by that in blocks."""
    found = []
    for name in ("train.onnx", in_blocks("train.onnx")):
        folder = exported.Folder(path, exported.runtime)
        folder.run_train = exported.runtime(path / name)
        losses = [folder.step(x, target) for _ in range(steps)]
        found.append(folder.values | {"losses": np.array(losses, np.float32)})
    return found


def nodes(path, kind: str) -> list:
    graph = onnx.load(path, load_external_data=False).graph
    bodies = [a.g for n in graph.node for a in n.attribute if a.name == "body"]
    every = [n for g in (graph, *bodies) for n in g.node]
    return [n for n in every if n.op_type == kind and n.domain == BLOCKED]


def depthwise_ones(convolutions: list) -> list:
    """Those with groups whose taps are no constant, as they are of patch means."""
    groups = [next(a.i for a in n.attribute if a.name == "group") for n in convolutions]
    pairs = zip(convolutions, groups, strict=True)
    return [n for n, count in pairs if count > 1 and "constant" not in n.input[1]]


def assert_same(one: dict, other: dict, tolerance: float = 1e-4) -> None:
    assert_close(other, {n: torch.from_numpy(np.asarray(a)) for n, a in one.items()}, tolerance)


@x86
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize(
    "what", [gf.GalerkinFilter(grid=7), gf.GalerkinFilter(patch=2), gf.GradientFilter(), gf.Exact()]
)
def test_the_steps_are_those_of_the_plain_graph(what, kernel, stride, batch, tmp_path):
    x, target = written(depthwise(kernel, stride, nn.ReLU6()), tmp_path, what, batch=batch)
    assert_same(*both(tmp_path, x, target))


@x86
@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.Hardswish(), nn.Identity()])
def test_an_activation_becomes_part_of_its_convolution(act, tmp_path):
    x, target = written(depthwise(3, 1, act), tmp_path, gf.GalerkinFilter(grid=7), batch=3)
    [forward, *_] = depthwise_ones(nodes(tmp_path / in_blocks("train.onnx"), "Conv"))
    fused = {a.name: onnx.helper.get_attribute_value(a) for a in forward.attribute}
    expected = {nn.ReLU: b"Relu", nn.ReLU6: b"Clip"}.get(type(act))
    assert fused.get("activation") == expected
    assert_same(*both(tmp_path, x, target))


def residual() -> nn.Module:
    """Blocks of MobileNetV2, with channels that fill no block; the last map is small."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    for inner, out, stride in ((16, 24, 2), (24, 24, 1), (24, 64, 2)):
        layers.append(InvertedResidual(inner, out, stride, 4))
    layers += [nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 4))
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return net


@x86
@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize("what", [gf.GalerkinFilter(grid=7), gf.GalerkinFilter(patch=2)])
def test_a_network_stays_in_blocks(what, batch, tmp_path):
    """Maps that are wider than their channels, sums inside convolutions, counts of bytes."""
    x, target = written(residual(), tmp_path, what, 56, batch)
    x, target = x[:batch], target[:batch]
    assert_same(*both(tmp_path, x, target))
    convolutions = nodes(tmp_path / in_blocks("predict.onnx"), "Conv")
    assert len(convolutions) == 10  # all but the last, whose map is smaller than its weight
    assert sum(len(n.input) == 4 for n in convolutions) == 1
    assert len(nodes(tmp_path / in_blocks("predict.onnx"), "ReorderOutput")) == 1


@x86
@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize(
    "what", [gf.GalerkinFilter(grid=7), gf.GalerkinFilter(patch=2), gf.GradientFilter(patch=3)]
)
def test_patches_that_reach_beyond_their_maps(what, batch, tmp_path):
    """Maps of 31, 16 and 8 pixels a side; those of the plain graph as PyTorch has them."""
    x, target = written(residual(), tmp_path, what, 61, batch)
    x, target = x[:batch], target[:batch]
    plain, blocked = both(tmp_path, x, target)
    assert_same(plain, blocked)
    torch.manual_seed(0)
    model = residual()
    gf.convert(model, what, example=x)
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    expected = exported.in_pytorch(model, x, target, optimizer, steps=2)
    del expected["loss"]
    assert_close(blocked, expected, 1e-3)


@x86
def test_large_weights_are_read_ahead(tmp_path, monkeypatch):
    """By a Gemm that takes a number of them and leaves it alone, whatever it is."""
    monkeypatch.setattr(convolutions, "LARGE", 64 * 256)
    x, target = written(residual(), tmp_path, gf.GalerkinFilter(grid=7), 56, 1)
    assert_same(*both(tmp_path, x[:1], target[:1]))
    blocked, plain = (
        onnx.load(tmp_path / name, load_external_data=False).graph.node
        for name in (in_blocks("train.onnx"), "train.onnx")
    )
    [ahead] = [n for n in blocked if n.op_type == "ReduceMax"]
    [gemm] = [n for n in blocked if ahead.output[0] in n.input]
    assert gemm.op_type == "Gemm" and [a.f for a in gemm.attribute if a.name == "beta"] == [0]
    assert not any(n.op_type == "ReduceMax" for n in plain)


@pytest.mark.parametrize("batch", [None, 3])
def test_all_three_convolutions_of_a_layer_are_in_blocks(batch, tmp_path):
    """With a free number of images the weight's is done for one after the other."""
    written(depthwise(3, 1, nn.ReLU6()), tmp_path, gf.GalerkinFilter(grid=7), batch=batch)
    train, predict = (
        nodes(tmp_path / in_blocks(name), "Conv") for name in ("train.onnx", "predict.onnx")
    )
    assert len(depthwise_ones(train)) == 3  # y, gx, gw
    assert len(depthwise_ones(predict)) == 1
    assert not nodes(tmp_path / "train.onnx", "Conv")


@pytest.mark.parametrize("channels, dtype", [(24, torch.float32), (32, torch.float64)])
def test_only_where_the_kernels_fit(channels, dtype, tmp_path):
    """Whole blocks, in float32; what an export before has left is taken away."""
    written(depthwise(3, 1, nn.ReLU6()), tmp_path, gf.GalerkinFilter(grid=7))
    assert (tmp_path / "probe.onnx").exists()
    model, x = depthwise(3, 1, nn.ReLU6(), channels).to(dtype), torch.randn(3, 3, 28, 28).to(dtype)
    gf.convert(model, gf.GalerkinFilter(grid=7), example=x)
    gf.export(model, x, torch.randint(4, (3,)), tmp_path)
    left = {"probe.onnx", in_blocks("train.onnx"), in_blocks("predict.onnx")}
    assert left.isdisjoint(p.name for p in tmp_path.iterdir())


@x86
@pytest.mark.slow
@pytest.mark.parametrize("what", [gf.GalerkinFilter(grid=7), gf.Exact()])
@pytest.mark.parametrize("name", ["mobilenet_v2", "tf_efficientnet_lite0"])
def test_real_networks(name, what, tmp_path):
    torch.manual_seed(0)
    x, target = written(networks.named(name), tmp_path, what, 64, 3, last=8)
    assert_same(*both(tmp_path, x, target), tolerance=2e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocked")
    written(depthwise(3, 1, nn.ReLU6()), path, gf.GalerkinFilter(grid=7), batch=3)
    return path


def loaded(folder, monkeypatch) -> list[str]:
    """The files that the runner loads for the training graph."""
    runner = module("exported")
    model, names = runner.Exported(folder), []
    load = runner.Exported._loaded
    monkeypatch.setattr(
        runner.Exported, "_loaded", lambda self, name, n: names.append(name) or load(self, name, n)
    )
    model.session("train.onnx", 1)
    model.session("train.onnx", 1)
    return names


@x86
def test_the_runner_takes_blocks_where_they_give_the_same(folder, monkeypatch):
    quick = in_blocks("train.onnx")
    assert loaded(folder, monkeypatch) == ["probe.onnx", quick, quick]


@x86
@pytest.mark.parametrize("broken", ["unknown", "first", "depthwise"])
def test_the_runner_does_without_where_they_fail(folder, broken, monkeypatch, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    model = onnx.load(other / "probe.onnx")
    if broken == "unknown":
        [first, *_] = [n for n in model.graph.node if n.op_type == "ReorderInput"]
        first.op_type = "NobodyKnows"
    else:
        convolutions = [n for n in model.graph.node if n.op_type == "Conv" and n.domain == ""]
        conv = convolutions[("first", "depthwise").index(broken)]
        conv.attribute.remove(next(a for a in conv.attribute if a.name == "pads"))
        conv.attribute.append(onnx.helper.make_attribute("pads", [0, 0, 2, 2]))
    (other / "probe.onnx").write_bytes(model.SerializeToString())
    runner = module("exported")
    monkeypatch.setattr(runner.Exported, "_check_hash", lambda *_: None)
    assert loaded(other, monkeypatch) == ["probe.onnx", "train.onnx", "train.onnx"]

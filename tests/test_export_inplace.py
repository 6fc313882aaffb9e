"""New parameters over the old ones: nothing reads an old one after its new one is there."""

import networks
import numpy as np
import pytest
import torch
from exported import optimizer_of
from on_device import module
from torch import nn

import gradfilter as gf
from gradfilter.export.graph import Graph
from gradfilter.export.inplace import in_place, wait_for_readers

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {}),
}


def after_steps(folder, x, target, twice: bool) -> dict[str, np.ndarray]:
    model = module("exported").Exported(folder)
    assert model.manifest["in_place"]
    model.manifest["in_place"] = not twice
    stepper = module("stepping").Stepper(model, 1, model.start())
    for _ in range(3):
        stepper.step(x.numpy(), target.numpy(), 0.05)
    return stepper.values


def assert_same_in_place(model, x, tmp_path, kind: str, **options) -> None:
    own, settings = OPTIMIZERS[kind]
    target = torch.arange(len(x)) % 4
    gf.export(model, x, target, tmp_path, optimizer=optimizer_of(model, own, **settings), **options)
    one, two = (after_steps(tmp_path, x, target, twice) for twice in (False, True))
    start = module("exported").Exported(tmp_path).start()
    for name, expected in two.items():
        np.testing.assert_array_equal(one[name], expected, err_msg=name)
        assert not np.array_equal(one[name], start[name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("what", [gf.GalerkinFilter(grid=3), gf.GradientFilter(), gf.Exact()])
def test_steps_in_place_are_those_in_two_buffers(what, clip, kind, tmp_path):
    """Some weights are small enough to be updated with others, some are not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32), nn.ReLU6(),
        nn.Conv2d(32, 160, 1), nn.ReLU(), nn.Conv2d(160, 64, 3), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4),
    ).eval()  # fmt: skip
    x = torch.randn(3, 3, 16, 16)
    gf.convert(model, what, example=x)
    assert_same_in_place(model, x, tmp_path, kind, clip=clip)


@pytest.mark.slow
@pytest.mark.parametrize("what", [gf.GalerkinFilter(grid=7), gf.Exact()])
@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "efficientnet_b0"])
def test_real_networks(name, what, tmp_path):
    torch.manual_seed(0)
    model, x = networks.named(name), torch.randn(2, 3, 64, 64)
    gf.convert(model, what, example=x)
    assert_same_in_place(model, x, tmp_path, "momentum", batch=2)


def test_an_update_waits_for_what_reads_the_old_value():
    graph = Graph()
    rate = graph.input("rate", (), torch.float32)
    w, x = (graph.input(n, (4, 4), torch.float32) for n in ("w", "images"))
    late = graph.matmul(graph.permute(w, [1, 0]), x)  # of which the update knows nothing
    graph.output("y", late)
    graph.output("new.w", graph.binary("Sub", w, graph.binary("Mul", rate, x)))
    assert not in_place(graph, ["w"], "new.")
    wait_for_readers(graph, ["w"], "new.")
    assert in_place(graph, ["w"], "new.")
    made = {v.name for v in graph.inputs} | set(graph.constants)
    for node in graph.nodes:  # each is behind what it needs
        assert made.issuperset(node.inputs)
        made.update(node.outputs)

"""What of an exported step is done image by image."""

import networks
import onnx
import pytest
import torch
from torch import nn

import gradfilter as gf
from gradfilter.export import onebyone


def scan(path, name: str = "train.onnx"):
    """The Scan over the images of a graph, or None."""
    nodes = onnx.load(path / name, load_external_data=False).graph.node
    return next((n for n in nodes if n.op_type == "Scan" and n.input[0] == "images"), None)


def body(node) -> list:
    return next(a.g for a in node.attribute if a.name == "body").node


def written(path, name: str, what, size: int = 112, batch=None, **options):
    torch.manual_seed(0)
    model, x, target = networks.named(name), torch.randn(2, 3, size, size), torch.zeros(2).long()
    gf.convert(model, what, example=x, **options)
    return gf.export(model, x, target, path, batch=batch)


@pytest.mark.parametrize("batch", [None, 4])
def test_large_maps_are_made_for_one_image_at_a_time(batch, tmp_path):
    path = written(tmp_path, "mobilenet_v2", gf.GalerkinFilter(grid=7), batch=batch)
    for name in ("train.onnx", "predict.onnx", "train-blocked.onnx", "predict-blocked.onnx"):
        layers = [n for n in body(scan(path, name)) if n.op_type == "Conv"]
        layers = [n for n in layers if "constant" not in n.input[1]]  # patch means are some too
        assert 5 < len(layers) < 20  # those on maps of 56 and 28 pixels


def test_one_image_is_not_taken_apart(tmp_path):
    assert scan(written(tmp_path, "mobilenet_v2", gf.GalerkinFilter(grid=7), batch=1)) is None


def test_nothing_large_leaves_the_body(tmp_path):
    """Exact layers keep their maps for all images: only what is before them goes one by one."""
    plan = {
        "features.[0-3]*": gf.GalerkinFilter(grid=7),
        "features.1[4-8]*": gf.GalerkinFilter(grid=7),
    }
    exact = written(tmp_path / "exact", "mobilenet_v2", gf.Exact())
    assert scan(exact) is None
    graph = onnx.load(written(tmp_path / "mixed", "mobilenet_v2", plan) / "train.onnx").graph
    assert scan(tmp_path / "mixed") is not None
    sizes = {
        v.name: v.type.tensor_type.shape.dim
        for n in graph.node if n.op_type == "Scan"
        for v in next(a.g for a in n.attribute if a.name == "body").output
    }  # fmt: skip
    largest = 96 * 56 * 56  # the first expansion
    for shape in sizes.values():
        assert torch.tensor([d.dim_value for d in shape]).prod() <= onebyone.SMALLER * largest


def test_a_frozen_front_has_its_constants_with_it(tmp_path):
    """The runtime puts layers into its own layout only where their weights are constants."""
    path = written(tmp_path, "mobilenet_v2", gf.GalerkinFilter(grid=7), last=4)
    graph = next(a.g for a in scan(path).attribute if a.name == "body")
    constants = {t.name for t in graph.initializer}
    layers = [n for n in graph.node if n.op_type == "Conv"]
    assert layers and all(n.input[1] in constants for n in layers)


class Mixed(nn.Module):
    """Averages over the batch in the middle: image by image it would be something else."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 8, 3, 4, 1)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x - x.mean(0, keepdim=True)
        return self.last(torch.relu(self.second(x)).mean((2, 3)))


def test_what_is_of_several_images_stays_outside(tmp_path):
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(4, 3, 64, 64)
    gf.convert(model, gf.GalerkinFilter(grid=4), example=x)
    path = gf.export(model, x, torch.zeros(4).long(), tmp_path, batch=4)
    assert scan(path) is None or not any(n.op_type == "ReduceMean" for n in body(scan(path)))

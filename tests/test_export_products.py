"""Matrix products of a step in the form that takes the least work."""

import onnx
import pytest
import torch
from exported import assert_close, exported, in_pytorch, optimizer_of, runtime
from torch import nn

import gradfilter as gf


def net(dtype: torch.dtype) -> nn.Sequential:
    """Whose last map is smaller than the weight behind it; gamma is 0 once."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, 4, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.Conv2d(64, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6()]
    with torch.no_grad():
        layers[4].weight.normal_()[0] = 0
    # the last weight is large enough to be updated by itself
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 96)]
    return nn.Sequential(*layers, *head).to(dtype)


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def step(request, tmp_path):
    """The nodes of a step of one image, after it has been compared with PyTorch's."""
    model, dtype = net(request.param), request.param
    x, target = torch.randn(1, 3, 16, 16, dtype=dtype), torch.tensor([1])
    gf.convert(model, gf.GalerkinFilter(grid=4), example=x)
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    options = dict(optimizer=optimizer, batch=1)
    if dtype == torch.float32:
        options["by"] = runtime
    folder = exported(model, x, target, tmp_path, **options)
    for _ in range(2):
        folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer, steps=2)
    expected.pop("loss")
    assert_close(folder.values, expected, 1e-9 if dtype == torch.float64 else 1e-5)
    return onnx.load(tmp_path / "train.onnx", load_external_data=False).graph.node, dtype


def test_the_output_is_scaled_where_it_is_smaller_than_the_weight(step):
    nodes, _ = step
    [norm] = [n for n in nodes if n.op_type == "BatchNormalization"]
    [conv] = [n for n in nodes if norm.input[0] in n.output]
    assert conv.op_type == "Conv" and conv.input[1] == "3.weight"


def test_a_gradient_is_added_to_its_momentum_by_the_product(step):
    """In float32: a Gemm's factor is a float32 in any graph."""
    nodes, dtype = step
    [last] = [n for n in nodes if "new.momentum.8.weight" in n.output]
    assert last.op_type == ("Gemm" if dtype == torch.float32 else "Add")


def test_a_row_is_updated_by_one_product(step):
    """The parameter that is large enough for it: read and written as a row, and in one pass."""
    nodes, dtype = step
    [last] = [n for n in nodes if "new.8.weight" in n.output]
    assert last.op_type == ("Gemm" if dtype == torch.float32 else "Sub")
    assert "8.weight" in last.input
    [small] = [n for n in nodes if "new.8.bias" in n.output]
    assert small.op_type in ("Split", "Reshape")

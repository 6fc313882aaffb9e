"""Networks that do more with a map than layers do, an operator each, against PyTorch's step."""

import pytest
import torch
import torch.nn.functional as F
from exported import assert_close, exported, in_pytorch, optimizer_of
from torch import nn

import gradfilter as gf
from gradfilter.export.graph import Graph
from gradfilter.export.lower import Lowering
from gradfilter.export.trace import NoForm, traced

OPERATORS = {
    "the last channel": lambda x: x * x[:, -1:],
    "all but the last channel": lambda x: x[:, :-1] * x[:, 1:],
    "all but the last column": lambda x: x[..., :-1] * x[..., -1:],
    "channels from behind": lambda x: x[:, -5:-2] * 2,
    "no channel": lambda x: torch.cat([x, x[:, 5:2]], 1),
    "every other channel": lambda x: x[:, ::2] * x[:, 1::2],
    "every third row": lambda x: x[:, :, 1::3].relu(),
    "one channel": lambda x: x * x[:, 3][:, None],
    "one place": lambda x: x * x.flatten(2)[:, :, 0][:, :, None, None],
    "length of a vector": lambda x: F.normalize(x, dim=1),
    "length of a map": lambda x: x / (x.norm(dim=(2, 3), keepdim=True) + 1),
    "absolute sum": lambda x: x / (x.norm(p=1, dim=1, keepdim=True) + 1),
    "deviation": lambda x: x * x.std((2, 3), keepdim=True),
    "variance": lambda x: x * x.var(1, keepdim=True, unbiased=False),
    "soft maximum": lambda x: x + x.logsumexp(1, keepdim=True),
    "turned around": lambda x: x * x.roll((1, 2), (2, 3)),
    "shuffled": lambda x: F.channel_shuffle(x, 2).relu() * x,
    "taken apart": lambda x: torch.cat([p * (i + 1) for i, p in enumerate(x.split(3, 1))], 1),
}


class Doing(nn.Module):
    """A convolution, a function of its map, and a classifier."""

    def __init__(self, function, classes: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.function = nn.Conv2d(3, 8, 3, padding=1), function
        channels = function(torch.ones(2, 8, 6, 6)).shape[1]
        self.b = nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        return self.b(self.function(self.a(x))).mean((2, 3))


@pytest.mark.parametrize("what", OPERATORS)
def test_a_step_is_pytorchs(what, tmp_path):
    model = Doing(OPERATORS[what]).double()
    x, target = torch.randn(3, 3, 6, 6).double(), torch.tensor([0, 2, 1])
    gf.convert(model, gf.Exact(), example=x)
    optimizer = optimizer_of(model, torch.optim.SGD)
    folder = exported(model, x[:2], target[:2], tmp_path, optimizer=optimizer)
    folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer)
    expected.pop("loss")
    assert_close(folder.values, expected, 1e-9)


def test_the_number_of_images_as_a_number_is_refused(tmp_path):
    x, target = torch.randn(2, 3, 6, 6), torch.tensor([0, 1])
    model = Doing(lambda x: x - x.mean(0, keepdim=True))
    gf.convert(model, gf.Exact(), example=x)
    with pytest.raises(ValueError, match="number of images; fix it with batch"):
        gf.export(model, x, target, tmp_path)
    gf.export(model, x, target, tmp_path, batch=2)


def test_a_form_of_another_shape_is_refused(monkeypatch):
    """What is wrong with a form would be broadcast, and computed without a word."""
    from gradfilter.export import lower

    trace = traced(lambda x: (x.exp() * 2,), [torch.ones(2, 3)])
    graph = Graph()
    x = graph.input("x", (2, 3), torch.float32)
    monkeypatch.setitem(lower.OPERATORS, "exp", lambda c, call, x: c.graph.sum(x, [1], keep=True))
    with pytest.raises(NoForm, match=r"gave \(2, 3\), its ONNX form \(2, 1\)"):
        Lowering(graph, []).run(trace, [x])

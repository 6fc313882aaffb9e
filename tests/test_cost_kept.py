"""Kept bytes of the cost model: those of the paper, and those that autograd saves."""

import pytest
import torch
from cases import METHODS, Fork, small_cnn
from counted import batch, row
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import gradfilter as gf

methods = pytest.mark.parametrize("method", METHODS, ids=repr)
KB = 1024


# the memory column of the gradient filtering paper (ImageNet, batch 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize(
    ("name", "method", "last", "kilobytes"),
    [
        ("mobilenet_v2", gf.Exact(), 2, 245),
        ("mobilenet_v2", gf.Exact(), 4, 459.375),
        ("mobilenet_v2", gf.GradientFilter(patch=2), 2, 80),
        ("mobilenet_v2", gf.GradientFilter(patch=2), 4, 150),
        ("resnet18", gf.Exact(), 2, 196),
        ("resnet18", gf.Exact(), 4, 490),
        ("resnet18", gf.GradientFilter(patch=2), 2, 64),
        ("resnet18", gf.GradientFilter(patch=2), 4, 112),
    ],
)
def test_the_published_memory(name, method, last, kilobytes, device, example):
    models = pytest.importorskip("torchvision").models
    with torch.device(device):
        model = getattr(models, name)(weights=None)
        x = torch.zeros(1, 3, 224, 224)
    gf.convert(model, method, last=last, example=x if example else None)
    cost = gf.cost(model, x)
    kept = sum(r.kept_bytes for r in cost.layers if r.kind == "conv" and r.trained)
    assert kept == kilobytes * KB
    assert sum(r.kind == "conv" and r.trained for r in cost.layers) == last
    assert sum(r.kept_bytes for r in cost.layers if r.kind == "conv" and not r.trained) == 0


# kept bytes are what autograd saved


def saved_by_layers(model, x):
    """Bytes that autograd saves inside each convolution and Linear layer, a storage once."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    inside, first, sizes, held = [], {}, {}, []

    def pack(t):
        storage = t.untyped_storage()
        if inside and storage.data_ptr() not in own:
            first.setdefault(storage.data_ptr(), inside[-1])
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(t)
        return t

    handles = []
    for name, m in model.named_modules():
        if isinstance(m, nn.Conv2d | nn.Linear):
            enter = lambda _m, _x, name=name: inside.append(name)  # noqa: E731
            handles.append(m.register_forward_pre_hook(enter))
            handles.append(m.register_forward_hook(lambda *_: inside.clear()))
    with saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    for handle in handles:
        handle.remove()
    del y
    total = dict.fromkeys((n for n, m in model.named_modules() if hasattr(m, "weight")), 0)
    for pointer, name in first.items():
        total[name] += sizes[pointer]
    return total


def assert_kept_bytes(model, x):
    found = {r.name: r.kept_bytes for r in gf.cost(model, x).layers if r.kind in ("conv", "linear")}
    expected = saved_by_layers(model.eval(), x)
    assert found == {name: expected[name] for name in found}
    assert len(found) > 4 and sum(found.values()) > 0


@methods
@pytest.mark.parametrize("last", [None, 2])
def test_kept_bytes_are_what_autograd_saves(method, last):
    model = small_cnn()
    gf.convert(model, method, last=last)
    assert_kept_bytes(model, batch())


@methods
def test_kept_bytes_of_mobilenet_are_what_autograd_saves(method):
    torch.manual_seed(0)
    model = pytest.importorskip("torchvision").models.mobilenet_v2(weights=None)
    gf.convert(model, method)
    assert_kept_bytes(model, torch.randn(2, 3, 64, 64))


def test_kept_bytes_of_a_plain_model_are_what_autograd_saves():
    model = small_cnn()
    model[3].weight.requires_grad_(False)  # PyTorch keeps its input all the same
    assert_kept_bytes(model, batch())
    assert row(gf.cost(model, batch()), "3").kept_bytes == 2 * 8 * 6 * 6 * 4


def test_all_kept_bytes_are_what_autograd_saves():
    model = small_cnn().eval()
    gf.convert(model, gf.GalerkinFilter(patch=2))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        model(batch())
    kept = sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in own)
    assert gf.cost(model, batch()).total.kept_bytes == kept


def test_an_input_two_layers_share_counts_once():
    model = Fork()
    gf.convert(model, gf.Exact())
    kept = {r.name: r.kept_bytes for r in gf.cost(model, batch()).layers}
    assert kept == {"stem": 2 * 3 * 144 * 4, "a": 2 * 4 * 144 * 4, "b": 0}
    gf.convert(model, gf.GradientFilter(patch=4))  # each keeps sums of its own
    kept = {r.name: r.kept_bytes for r in gf.cost(model, batch()).layers}
    assert kept == {"stem": 2 * 3 * 9 * 4, "a": 2 * 4 * 9 * 4, "b": 2 * 4 * 9 * 4}


class Positions(nn.Module):
    """A bias for every pixel, from a layer that reads a table of their coordinates."""

    def __init__(self):
        super().__init__()
        self.conv, self.bias = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(2, 4)
        self.register_buffer("table", torch.rand(12, 12, 2))

    def forward(self, x):
        return self.conv(x) + self.bias(self.table).permute(2, 0, 1)


@pytest.mark.parametrize("method", [gf.Exact(), gf.Hosvd()], ids=repr)
def test_a_buffer_that_a_layer_reads_is_there_anyway(method):
    """What a method makes of it is not."""
    model = Positions()
    gf.convert(model, {"bias": method})
    kept = row(gf.cost(model, batch()), "bias").kept_bytes
    assert (kept > 0) == (method != gf.Exact())

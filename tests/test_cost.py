"""The cost model against the papers, against autograd, and against counting by hand."""

import gc
import json
import weakref

import pytest
import torch
from cases import METHODS, small_cnn
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import gradfilter as gf
from gradfilter import kept

methods = pytest.mark.parametrize("method", METHODS, ids=repr)
KB = 1024


def batch(n=2):
    """Images that are much alike, so that a rank by energy is not full."""
    noise = torch.Generator().manual_seed(0)
    return torch.randn(3, 12, 12, generator=noise) + torch.randn(n, 3, 12, 12, generator=noise) / 3


def row(cost, name):
    return next(r for r in cost.layers if r.name == name)


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
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = self.stem(x)
            return self.a(x) + self.b(x)

    model = Fork()
    gf.convert(model, gf.Exact())
    kept = {r.name: r.kept_bytes for r in gf.cost(model, batch()).layers}
    assert kept == {"stem": 2 * 3 * 144 * 4, "a": 2 * 4 * 144 * 4, "b": 0}
    gf.convert(model, gf.GradientFilter(patch=4))  # each keeps sums of its own
    kept = {r.name: r.kept_bytes for r in gf.cost(model, batch()).layers}
    assert kept == {"stem": 2 * 3 * 9 * 4, "a": 2 * 4 * 9 * 4, "b": 2 * 4 * 9 * 4}


# multiply-adds by hand: one layer behind another, so that both gradients are needed


def two_layers(conv, method):
    """The row of `conv` behind a 1x1 layer, for 2 images of 8x8 pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(conv.in_channels, conv.in_channels, 1), conv)
    gf.convert(model, {"1": method})
    return row(gf.cost(model, torch.randn(2, conv.in_channels, 8, 8)), "1")


DENSE = 2 * 6 * 8 * 8 * (4 * 3 * 3)  # outputs times taps of Conv2d(4, 6, 3, padding=1)


@pytest.mark.parametrize(
    ("method", "backward"),
    [
        (gf.Exact(), 2 * DENSE),
        # 4x4 patches, the summed kernel; the weight gradient is one product per patch
        (gf.GradientFilter(patch=2), 2 * (2 * 4 * 4 * 6 * 4)),
        # 4x4 patches of which each reads 3x3, both ways
        (gf.GalerkinFilter(patch=2), 2 * (2 * 4 * 4 * 9 * 6 * 4)),
        # patches of 3, 3 and 2 pixels: 3x3 patches that read 3x3
        (gf.GalerkinFilter(grid=3), 2 * (2 * 3 * 3 * 9 * 6 * 4)),
        (gf.GalerkinFilter(patch=1), 2 * DENSE),
        (gf.Int8(), 2 * DENSE),
        (gf.Int8(gf.GalerkinFilter(patch=2)), 2 * (2 * 4 * 4 * 9 * 6 * 4)),
    ],
    ids=repr,
)
def test_multiply_adds_of_the_filters(method, backward):
    found = two_layers(nn.Conv2d(4, 6, 3, padding=1), method)
    assert (found.forward_macs, found.backward_macs) == (DENSE, backward)


def test_multiply_adds_of_grouped_and_strided_layers():
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
    dense = 2 * 8 * 4 * 4 * (2 * 3 * 3)
    found = two_layers(conv, gf.Exact())
    assert (found.forward_macs, found.backward_macs) == (dense, 2 * dense)
    found = two_layers(conv, gf.GradientFilter(patch=2))  # 2x2 patches
    assert found.backward_macs == 2 * (2 * 2 * 2 * 8 * 2)


def test_multiply_adds_of_walsh_hadamard():
    """3 coefficients for each of 4x4 patches, both ways; a 1x1 layer from 4 to 6 channels."""
    found = two_layers(nn.Conv2d(4, 6, 1), gf.WalshHadamard(patch=2, bases=3))
    assert found.forward_macs == 2 * 64 * 4 * 6
    assert found.backward_macs == 2 * (2 * 16 * 3 * 4 * 6)


def test_multiply_adds_of_a_fixed_rank():
    """Ranks (2, 3, 3, 3) of an input [2, 4, 8, 8] of a 3x3 layer with 6 outputs."""
    found = two_layers(nn.Conv2d(4, 6, 3, padding=1), gf.SubspaceIteration(rank=3))
    size = 2 * 4 * 8 * 8
    iteration = 2 * size * (2 + 3 + 3 + 3)  # x^T start, then x times that, mode by mode
    core = size * 2 + size * 3 + 2 * 3 * 8 * 8 * 3 + 2 * 3 * 3 * 8 * 3
    assert found.forward_macs == DENSE + iteration + core
    rotate_g = 2 * 2 * 6 * 8 * 8  # the batch factor goes over to g
    rebuild = 2 * 3 * 3 * 3 * 8 + 2 * 3 * 8 * 3 * 8  # height, then width
    convolution = 2 * 6 * 8 * 8 * (3 * 9)  # 2 images of 3 channels
    channels = 6 * 3 * 9 * 4
    assert found.backward_macs == DENSE + rotate_g + rebuild + convolution + channels


@pytest.mark.parametrize("modes", [1, 4])
def test_multiply_adds_of_decompositions(modes):
    """At full rank every size is known without the data."""
    method = gf.Svd(energy=1) if modes == 1 else gf.Hosvd(energy=1)
    found = two_layers(nn.Conv2d(4, 6, 3, padding=1), method)
    size, dims = 2 * 4 * 8 * 8, [2, 4, 8, 8][:modes]
    grams = core = size * sum(dims)
    assert found.forward_macs == DENSE + grams + core
    gw = 2 * 2 * 6 * 8 * 8 + DENSE
    if modes == 4:
        gw += size * 8 + size * 8 + 6 * 4 * 9 * 4  # height, width, channels
    assert found.backward_macs == DENSE + gw


def test_multiply_adds_of_linear_layers():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    found = gf.cost(model, torch.zeros(2, 4, 5))
    assert (row(found, "0").forward_macs, row(found, "0").backward_macs) == (8 * 35, 8 * 35)
    assert (row(found, "1").forward_macs, row(found, "1").backward_macs) == (8 * 21, 2 * 8 * 21)


def test_frozen_layers_compute_only_what_is_needed():
    model = small_cnn()
    gf.convert(model, gf.Exact())
    everything = gf.cost(model, batch())
    gf.convert(model, {"3": "frozen"})
    found = gf.cost(model, batch())
    assert row(found, "3").backward_macs == row(everything, "3").backward_macs // 2
    assert row(found, "3").kept_bytes == 0
    gf.convert(model, gf.GradientFilter(patch=2), last=1)
    found = gf.cost(model, batch())
    for r in found.layers[: [r.name for r in found.layers].index("5")]:
        assert (r.backward_macs, r.kept_bytes, r.trained) == (0, 0, False)
    patches = 2 * 3 * 3
    assert row(found, "5").backward_macs == patches * 8 * 12  # no input gradient


# rows


def test_rows_are_in_execution_order_and_sum_to_the_total():
    model = small_cnn()
    gf.convert(model, gf.GalerkinFilter(grid=3))
    cost = gf.cost(model, batch())
    kinds = [(r.name, r.kind) for r in cost.layers]
    assert [k for k in kinds if k[1] in ("conv", "linear", "norm")] == [
        *(("0", "conv"), ("1", "norm"), ("3", "conv"), ("5", "conv")),
        *(("9", "linear"), ("11", "linear")),
    ]
    assert ("6", "activation") in kinds
    for field in ("forward_macs", "backward_macs", "kept_bytes"):
        assert getattr(cost.total, field) == sum(getattr(r, field) for r in cost.layers) > 0
    assert row(cost, "0").method == repr(gf.GalerkinFilter(grid=3))
    assert row(cost, "9").method == "Exact()" and row(cost, "6").method == ""
    assert cost.total.trained and cost.unsupported == []


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unsupported_modules_are_listed(device):
    model = nn.Sequential(Strange(), nn.ConvTranspose2d(3, 4, 2), nn.Conv2d(4, 4, 1)).to(device)
    gf.convert(model, gf.GalerkinFilter(patch=2))
    cost = gf.cost(model, batch().to(device))
    assert cost.unsupported == ["0", "1"]
    assert [r.counted for r in cost.layers] == [False, False, True]
    assert row(cost, "1").kept_bytes == 2 * 3 * 144 * 4 and row(cost, "1").trained
    assert cost.table().splitlines()[-1] == "multiply-adds not counted: 0, 1"
    assert " ? " in cost.table()


def test_a_layer_left_exact_for_a_reason_is_listed():
    timm_layers = pytest.importorskip("timm.layers")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), timm_layers.StdConv2d(4, 4, 3))
    gf.convert(model, gf.GalerkinFilter(patch=2))
    cost = gf.cost(model, batch())
    assert cost.unsupported == ["1"] and row(cost, "1").kept_bytes > 0


def test_table_and_dictionary():
    model = small_cnn()
    gf.convert(model, gf.GradientFilter(patch=2), last=1)
    cost = gf.cost(model, batch())
    lines = cost.table().splitlines()
    assert str(cost) == cost.table()
    assert " ".join(lines[0].split()) == "module kind method trained forward backward kept"
    assert [line.split()[0] for line in lines[1:]] == [*(r.name for r in cost.layers), "total"]
    (five,) = (line for line in lines if line.startswith("5 "))
    assert five.split()[-1:] == ["KB"] and five.split()[-2] == f"{2 * 8 * 9 * 4 / KB:.1f}"
    found = json.loads(json.dumps(cost.to_dict()))
    assert found["total"]["kept_bytes"] == cost.total.kept_bytes
    assert found["layers"][0] == {
        "name": "0",
        "kind": "conv",
        "method": "GradientFilter(patch=2)",
        "trained": False,
        "forward_macs": 2 * 8 * 36 * 27,
        "backward_macs": 0,
        "kept_bytes": 0,
        "counted": True,
    }


# the example


def test_examples_may_be_tuples_and_mappings():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x, shift):
            return self.conv(input=x + shift)

    model, x = Two(), batch()
    gf.convert(model, gf.GalerkinFilter(patch=2))
    expected = gf.cost(model, (x, 1.0))
    assert expected.layers == gf.cost(model, {"x": x, "shift": 1.0}).layers
    assert row(expected, "conv").kept_bytes == 2 * 3 * 36 * 4


def test_an_unbatched_example():
    model = nn.Conv2d(3, 4, 3, padding=1)
    gf.convert(model, gf.GalerkinFilter(patch=2))
    assert gf.cost(model, batch()[0]).layers == gf.cost(model, batch()[:1]).layers


@methods
def test_meta_costs_what_the_real_device_costs(method):
    energy = getattr(getattr(method, "inner", method), "energy", None)
    model = small_cnn()
    gf.convert(model, method)
    real = gf.cost(model, batch())
    model = small_cnn().to("meta")
    gf.convert(model, method)
    if energy:
        with pytest.raises(RuntimeError, match="a rank by energy depends on the data"):
            gf.cost(model, batch().to("meta"))
    else:
        meta = gf.cost(model, batch().to("meta"))
        assert [r for r in meta.layers if r.kind != "norm"] == [
            r for r in real.layers if r.kind != "norm"
        ]
        # PyTorch's own batch norm keeps unused statistics on the meta device
        assert meta.total.forward_macs == real.total.forward_macs
        assert meta.total.backward_macs == real.total.backward_macs


@methods
def test_cost_leaves_the_model_alone(method):
    model = small_cnn().train()
    model[2].eval()
    gf.convert(model, method, norm="batch")
    model(batch()).sum().backward()
    flags = [m.training for m in model.modules()]
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    states = [(m.gf.before, m.gf.state) for m in model if hasattr(m, "gf")]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    rng = torch.get_rng_state()
    with torch.no_grad():  # costs are those of training all the same
        assert gf.cost(model, batch(3)).total.kept_bytes > 0
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, tensors[k]) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert [(m.gf.before, m.gf.state) for m in model if hasattr(m, "gf")] == states
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("look", [gf.cost, lambda model, x: kept.measure(model, x, {})])
def test_what_was_looked_at_is_let_go(look):
    seen = []
    model = small_cnn()
    model[0].register_forward_hook(lambda m, inputs, y: seen.append(weakref.ref(y)))
    look(model, torch.randn(2, 3, 12, 12))
    gc.collect()
    assert seen and all(y() is None for y in seen)

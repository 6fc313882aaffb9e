"""The cost model: its rows, the examples it takes, and a model that is left alone."""

import gc
import json
import weakref

import pytest
import torch
from cases import METHODS, small_cnn
from counted import batch, row
from torch import nn

import gradfilter as gf
from gradfilter import kept

methods = pytest.mark.parametrize("method", METHODS, ids=repr)
KB = 1024


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


# the model


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

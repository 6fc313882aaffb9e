"""Gradient fidelity: numbers by hand, patch means by a loop, and a model that is left alone."""

import copy
import json
import math

import pytest
import torch
from cases import METHODS, Fork, small_cnn
from commands import gradfilter, mistake
from torch import nn

import gradfilter as gf
from gradfilter import trial
from gradfilter.fidelity import Match, Sums, Trend, dc_share

EQUAL = Match(1.0, math.inf, 1.0)


def images(n=2, size=12):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def match(a, e):
    sums = Sums()
    sums.add(torch.tensor(a), torch.tensor(e))
    return sums.match()


# numbers by hand


def test_a_match_by_hand():
    found = match([1.0, 0.0], [1.0, 1.0])
    assert found.cosine == pytest.approx(1 / math.sqrt(2))
    assert found.snr_db == pytest.approx(10 * math.log10(2 / 1))
    assert found.norm == pytest.approx(1 / math.sqrt(2))
    found = match([-2.0, -2.0], [1.0, 1.0])  # noise of (3, 3)
    assert found.cosine == pytest.approx(-1) and found.norm == pytest.approx(2)
    assert found.snr_db == pytest.approx(-10 * math.log10(9))
    assert match([3.0, 4.0], [3.0, 4.0]) == EQUAL


def test_a_match_with_nothing():
    assert match([1.0, 2.0], [0.0, 0.0]) == Match(None, None, None)
    assert match([0.0, 0.0], [1.0, 2.0]) == Match(None, 0.0, 0.0)


def test_the_share_of_dc_energy_by_hand():
    assert dc_share(torch.randn(4, 3, 1, 1)) == pytest.approx(1)
    assert dc_share(torch.full((2, 3, 3, 3), 5.0)) == pytest.approx(1)
    sobel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])[None, None]
    assert dc_share(sobel) == 0
    one_tap = torch.zeros(1, 1, 3, 3)
    one_tap[..., 1, 2] = 7.0
    assert dc_share(one_tap) == pytest.approx(1 / 9)
    both = torch.cat([sobel, torch.full((1, 1, 3, 3), 1.0)])  # energies 12 and 9, all DC
    assert dc_share(both) == pytest.approx(9 / 21)
    # by Parseval: the energy of the spectrum at frequency 0
    w = torch.randn(4, 3, 5, 3, generator=torch.Generator().manual_seed(1))
    spectrum = torch.fft.fft2(w).abs().square()
    assert dc_share(w) == pytest.approx(float(spectrum[..., 0, 0].sum() / spectrum.sum()))
    assert dc_share(torch.zeros(1, 1, 3, 3)) is None


def test_a_trend_by_hand():
    found = Trend.of([(1, 10.0), (2, 20.0), (3, 30.0), (4, math.inf)])
    assert (found.layers, found.near, found.far) == (3, 30.0, 10.0)
    assert found.per_layer == pytest.approx(-10) and str(found).startswith("falls by 10.00 dB")
    assert str(Trend.of([(1, 9.0), (2, 3.0)])).startswith("rises by 6.00 dB")
    assert Trend.of([(1, math.inf), (2, 120.0)]) == Trend(0, None, None, None)
    assert Trend.of([(3, 5.0)]) == Trend(1, None, 5.0, 5.0)


# layers


@pytest.mark.parametrize("method", [gf.Exact(), None], ids=repr)
def test_exact_gradients_match_exactly(method):
    model, x = small_cnn(), images()
    if method:
        gf.convert(model, method, example=x)
    found = gf.fidelity(model.train(), x, torch.tensor([0, 1]))
    assert [r.name for r in found.layers] == ["0", "3", "5", "9", "11"]
    assert all(r.weight == EQUAL for r in found.layers) and found.total == EQUAL
    assert [r.input for r in found.layers] == [None] + 4 * [EQUAL]
    assert found.weight_trend.layers == found.input_trend.layers == 0


def by_loops(x, g, w):
    """Weight and input gradient of a 1x1 layer from patch means of side 2, and the exact ones."""
    n, _, h, width = x.shape
    gw, gx, exact_gw, exact_gx = (torch.zeros_like(t) for t in (w, x, w, x))
    kernel = w[:, :, 0, 0]
    for i in range(n):
        for top in range(0, h, 2):
            for left in range(0, width, 2):
                at = (i, slice(None), slice(top, top + 2), slice(left, left + 2))
                pixels = x[at].shape[1] * x[at].shape[2]  # of an edge patch fewer than 4
                mean = g[at].sum((1, 2)) / pixels
                gw[:, :, 0, 0] += mean[:, None] * x[at].sum((1, 2))
                gx[at] = (kernel.T @ mean)[:, None, None]
        for row in range(h):
            for column in range(width):
                at = (i, slice(None), row, column)
                exact_gw[:, :, 0, 0] += g[at][:, None] * x[at]
                exact_gx[at] = kernel.T @ g[at]
    return gw, gx, exact_gw, exact_gx


def expected(a, e):
    noise = float((a - e).square().sum())
    return (
        float((a * e).sum() / (a.norm() * e.norm())),
        10 * math.log10(float(e.square().sum()) / noise),
        float(a.norm() / e.norm()),
    )


@pytest.mark.parametrize("method", [gf.GradientFilter(patch=2), gf.GalerkinFilter(patch=2)])
@pytest.mark.parametrize("engine", [True, False])
def test_a_pointwise_layer_by_patch_means_in_a_loop(method, engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)).double()
    x, g = images(2, 5).double(), torch.randn(2, 2, 5, 5, dtype=torch.float64)
    between, kernel = model[0](x).detach(), model[1].weight.detach()
    gf.convert(model, {"1": method}, example=x if engine else None)
    found = gf.fidelity(model, x, lambda y: (y * g).sum())
    gw, gx, exact_gw, exact_gx = by_loops(between, g, kernel)
    row = found.layer("1")
    for ours, by_hand in (
        (row.weight, expected(gw, exact_gw)),
        (row.input, expected(gx, exact_gx)),
    ):
        assert (ours.cosine, ours.snr_db, ours.norm) == pytest.approx(by_hand, rel=1e-9)
    assert 0.1 < row.weight.cosine < 0.999 and (row.depth, row.dc) == (2, 1.0)
    # the layer before is exact by itself, but gets the filtered gradient: g with patch means
    _, _, exact_first, _ = by_loops(x, exact_gx, model[0].weight.detach())
    assert found.layer("0").input is None
    before = gx.flatten(2).transpose(0, 1).flatten(1) @ x.flatten(2).transpose(0, 1).flatten(1).T
    by_hand = expected(before, exact_first[:, :, 0, 0])
    ours = found.layer("0").weight
    assert (ours.cosine, ours.snr_db, ours.norm) == pytest.approx(by_hand, rel=1e-9)


def test_only_what_a_layer_hands_back_itself_counts():
    """x is read twice: the gradient of the branch that is exact has no error of the other."""

    class Bent(Fork):
        def forward(self, x):
            x = self.stem(x)
            return self.a(x).relu() + self.b(input=x).relu()

    model, x = Bent(), images()
    gf.convert(model, {"a": gf.GradientFilter(patch=3)})
    found = gf.fidelity(model, x, lambda y: y.square().mean())
    assert found.layer("b").input == found.layer("b").weight == EQUAL
    assert found.layer("a").input.cosine < 0.99 and found.layer("stem").weight.snr_db < 60


def test_rows_are_in_the_order_of_execution():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Conv2d(4, 2, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.last(self.first(x))

    found = gf.fidelity(Backwards(), images(), lambda y: y.sum())
    assert [(r.depth, r.name) for r in found.layers] == [(1, "first"), (2, "last")]


def test_frozen_layers_pass_gradients_on_or_are_left_out():
    model, x = small_cnn(), images()
    gf.convert(model, {"*": gf.GalerkinFilter(patch=3), "3": "frozen", "9": gf.Exact(),
                       "11": gf.Exact()})  # fmt: skip
    found = gf.fidelity(model, x, torch.tensor([0, 1]))
    assert found.layer("3").weight is None and found.layer("3").input.cosine < 1
    assert not found.layer("3").trained and " frozen " in found.table()
    gf.convert(model, gf.GalerkinFilter(patch=3), last=1)
    found = gf.fidelity(model, x, torch.tensor([0, 1]))
    assert [r.name for r in found.layers] == ["5", "9", "11"]
    assert found.layer("5").input is None and found.layer("5").depth == 3


def test_the_engine_is_measured_as_the_layer_level():
    x, t = images(), torch.tensor([0, 1])
    model = small_cnn().double().eval()
    found = []
    for example in (x.double(), None):
        gf.convert(model, gf.GalerkinFilter(patch=3), example=example)
        assert hasattr(model, "gf_engine") == (example is not None)
        found.append(gf.fidelity(model, x.double(), t))
    for engine, layer in zip(*(f.layers for f in found), strict=True):
        assert engine.weight.cosine == pytest.approx(layer.weight.cosine, abs=1e-9)
        assert engine.input == layer.input
    assert found[0].notes == found[1].notes == []


def test_an_engine_that_differs_is_told(monkeypatch):
    from gradfilter.region.run import Backward

    right = Backward.gradient

    def wrong(self, position, g):
        right(self, position, g * 1.5 if g.ndim == 4 else g)

    model, x = small_cnn().eval(), images()
    gf.convert(model, gf.GalerkinFilter(patch=1), example=x)
    monkeypatch.setattr(Backward, "gradient", wrong)
    found = gf.fidelity(model, x, torch.tensor([0, 1]))
    assert found.layer("3").weight.norm == pytest.approx(1.5, rel=1e-4)
    assert found.layer("3").input.norm == pytest.approx(1, rel=1e-4)
    assert "3 weight gradients differ from the engine's" in found.notes[0]
    assert "by 50.0%" in found.notes[0]


def test_layers_without_a_gradient_are_told():
    model = small_cnn()
    nn.init.zeros_(model[11].weight)
    found = gf.fidelity(model, images(), torch.tensor([0, 1]))
    assert found.layer("3").weight == Match(None, None, None)
    assert found.notes == ["exact weight gradient 0 (nothing to compare): 0, 3, 5, 9"]
    assert "0/0" in found.table() and found.layer("11").weight == EQUAL


# the model is left alone


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_model_is_left_as_it_was(method):
    model, x = nn.Sequential(*small_cnn()[:-1], nn.Dropout(0.5), small_cnn()[-1]).train(), images()
    model[2].eval()
    gf.convert(model, method, norm="batch", example=x)
    model(x).sum().backward()
    flags = [(m.training, type(m)) for m in model.modules()]
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    states = [(m.gf.before, m.gf.state) for m in model if hasattr(m, "gf")]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    rng = torch.get_rng_state()
    with torch.no_grad():
        found = gf.fidelity(model, x, torch.tensor([0, 1]))
    assert [(m.training, type(m)) for m in model.modules()] == flags
    assert all(torch.equal(v, tensors[k]) for k, v in model.state_dict().items())
    for p, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad and torch.equal(grad, value)
    assert [(m.gf.before, m.gf.state) for m in model if hasattr(m, "gf")] == states
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch.equal(rng, torch.get_rng_state())
    # dropout is off and the random numbers are the same: so is the answer
    assert gf.fidelity(model, x, torch.tensor([0, 1])) == found


def test_dropout_is_off():
    """With other masks on each side even exact gradients would differ."""
    model = nn.Sequential(*small_cnn()[:-1], nn.Dropout(0.5), small_cnn()[-1]).train()
    gf.convert(model, gf.Exact())
    found = gf.fidelity(model, images(), torch.tensor([0, 1]))
    assert found.total == EQUAL and all(r.weight == EQUAL for r in found.layers)


def test_the_exact_side_is_the_plain_model():
    """Batch norms with batch statistics: the loss and gradients of the model before conversion."""
    model, x, t = small_cnn().train(), images(), torch.tensor([0, 1])
    plain = copy.deepcopy(model)
    loss = nn.functional.cross_entropy(plain(x), t)
    gf.convert(model, gf.Exact(), norm="batch")
    found = gf.fidelity(model, x, t)
    assert found.loss == pytest.approx(loss.item(), rel=1e-6) and found.total == EQUAL


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x, t: (x.index_fill(1, torch.tensor(0), torch.nan), t), "the batch has NaN"),
        (lambda x, t: (x[:0], t[:0]), "the batch is empty"),
        (lambda x, t: (x[:, :1], t), r"the model cannot take \[2, 1, 12, 12\]"),
        (lambda x, t: (x, t + 100), r"the target has classes 100\.\.101, the model has 0\.\."),
        (lambda x, t: (x, t[:1]), "a batch of 2, but 1 targets"),
        (lambda x, t: (x, lambda y: y.sum() * torch.nan), "the loss of this batch is nan"),
    ],
)
def test_bad_input_is_refused_in_one_line(change, told):
    x, t = change(images(), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=told) as error:
        gf.fidelity(small_cnn(), x, t)
    assert str(error.value).startswith("fidelity: ") and "\n" not in str(error.value)


# what is printed, saved and drawn


def test_table_dictionary_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    model, x = small_cnn(), images()
    gf.convert(model, gf.GradientFilter(patch=2))
    found = gf.fidelity(model, x, torch.tensor([0, 1]))
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert saved["layers"][-1]["weight"] == {"cosine": 1.0, "snr_db": "inf", "norm": 1.0}
    assert saved["layers"][0]["input"] is None
    assert saved["weight_trend"]["layers"] == found.weight_trend.layers > 1
    lines = found.table().splitlines()
    assert lines[1].split()[:4] == ["depth", "layer", "method", "DC"]
    assert [line.split()[1] for line in lines[2:7]] == [r.name for r in found.layers]
    assert lines[-2].startswith("SNR of weight gradients ") and "dB a layer" in lines[-2]
    found.plot(tmp_path / "fidelity.png")
    assert (tmp_path / "fidelity.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("kind", ["photos", "scenes"])
def test_the_command(kind, request, tiny_networks, tmp_path, capsys):
    pytest.importorskip("torchvision")
    data = request.getfixturevalue(kind)
    words = ("--patch", 3, "--weights", "none", "--batch", 4, "--out", tmp_path)
    model = "squeezenet1_1" if kind == "photos" else "unet-resnet18"  # stands for the tiny one
    assert gradfilter("fidelity", model, "--data", data, *words) == 0
    told = capsys.readouterr().out
    assert "4 pictures, loss" in told and "SNR of weight gradients" in told
    saved = json.loads((tmp_path / "fidelity.json").read_text())
    assert saved["layers"][0]["method"] == "GalerkinFilter(patch=3)"
    assert 0 < saved["layers"][0]["weight"]["cosine"] < 1


def test_an_output_layer_of_zeros_is_woken():
    model = small_cnn()
    assert not trial.wake_head(model)
    nn.init.zeros_(model[11].weight)
    assert trial.wake_head(model) and model[11].weight.any()


def test_the_command_refuses_in_one_line(photos, tmp_path, capsys):
    pytest.importorskip("torchvision")
    for words, told in (
        (("squeezenet1_11", "--data", photos), "near names: squeezenet1_1"),
        (("alexnet", "--data", tmp_path, "--weights", "none"), f"{tmp_path}: needs two folders"),
        (("alexnet", "--data", photos, "--weights", "none", "--size", 16), "16x16 images: "),
    ):
        assert told in mistake(capsys, "fidelity", *words)

"""The profiler: times, peaks of a known size, a model that is left alone, and the command."""

import json

import pytest
import torch
from cases import small_cnn
from commands import gradfilter, mistake
from profiled import images, rows, two_convolutions
from torch import nn

import gradfilter as gf
from gradfilter import profiler, stopwatch
from gradfilter.profiler import EXACT, INFERENCE, PLAN

pytestmark = pytest.mark.usefixtures("quick_stopwatch")

MIB = 2**20


# time and memory


def test_times_are_of_every_phase():
    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=images())
    found = gf.profile(model, images(), repeats=3)
    assert [r.name for r in found.rivals] == [PLAN, EXACT, INFERENCE]
    for r in found.rivals:
        spreads = [s for s in (r.forward, r.backward, r.update) if s]
        assert len(spreads) == (1 if r.name == INFERENCE else 3)
        assert all(0 < s.min <= s.median <= s.max for s in (*spreads, r.step))
        assert sum(s.min for s in spreads) <= r.step.max * 1.001
        assert r.step.min <= sum(s.max for s in spreads) * 1.001


def test_rivals_take_turns_and_the_first_turn_does_not_count():
    called = []

    def step(name):
        return lambda: called.append(name) or {"step": float(len(called))}

    times = stopwatch.in_turns({"a": step("a"), "b": step("b")}, repeats=2)
    assert "".join(called) == "abbaab"
    assert times == {"a": {"step": [4.0, 5.0]}, "b": {"step": [3.0, 6.0]}}


def test_a_spread_by_hand():
    found = profiler.Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (found.min, found.median, found.max) == (1.0, 2.5, 10.0)
    assert profiler.Spread.of([]) is None and found.text() == "1.0 / 2.5 / 10.0"


class Big(nn.Module):
    """Makes a map of 64 MiB and lets it go."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.w + torch.ones(64 * MIB // 4).sum()


def test_the_peak_of_a_known_allocation():
    found = gf.profile(Big(), torch.ones(2), repeats=1)
    if any(note.startswith("no peak memory") for note in found.notes):
        pytest.skip("this system does not reset the peak")
    for r in found.rivals:
        assert 63 * MIB < r.peak.min <= r.peak.max < 80 * MIB


def test_no_peak_where_it_cannot_be_reset(monkeypatch):
    def refuse(step):
        raise PermissionError("clear_refs: not allowed")

    monkeypatch.setattr(stopwatch, "resident_peak", refuse)
    found = gf.profile(two_convolutions(), images(), repeats=1)
    assert all(r.peak is None for r in found.rivals)
    assert "no peak memory: this system does not reset it (clear_refs: not allowed)" in found.notes


# the model, and what cannot be measured


@pytest.mark.parametrize("engine", [True, False])
def test_the_model_is_left_as_it_was(engine):
    model, x = small_cnn().train(), images(2, 12)
    model[2].eval()
    gf.convert(model, gf.GalerkinFilter(patch=2), norm="batch", example=x if engine else None)
    model(x).sum().backward()
    flags = [m.training for m in model.modules()]
    classes = [type(m) for m in model.modules()]
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    rng = torch.get_rng_state()
    with torch.no_grad():  # a step is a training step all the same
        found = gf.profile(model, x, torch.tensor([0, 1]), repeats=1)
    assert found.rival(PLAN).kept > 0 and found.rival(EXACT).backward
    assert [m.training for m in model.modules()] == flags
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(v, tensors[k]) for k, v in model.state_dict().items())
    for p, (grad, value) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad and torch.equal(grad, value)
    assert torch.equal(rng, torch.get_rng_state())


def test_exact_training_trains_the_same_layers():
    model, x = two_convolutions(), images()
    gf.convert(model, gf.GalerkinFilter(patch=2), last=1, example=x)
    found = gf.profile(model, x, repeats=1)
    assert rows(found) == {("2", "conv"): 2 * 4 * 4 * 4 * 4}
    assert rows(found, EXACT) == {("2", "conv"): 2 * 4 * 8 * 8 * 4}


def test_the_loss_may_be_a_function_a_mask_or_shares():
    model, x = two_convolutions(), images()
    seen = []
    gf.profile(model, x, lambda y: seen.append(y.shape) or y.sum(), repeats=1)
    assert set(seen) == {(2, 2, 8, 8)}
    gf.profile(model, x, torch.zeros(2, 16, 16, dtype=torch.uint8), repeats=1)  # enlarged
    gf.profile(model, x, torch.full((2, 2, 8, 8), 0.5), repeats=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m, x: (m, x.index_fill(1, torch.tensor(1), torch.nan), None), "the batch has NaN"),
        (lambda m, x: (m, x / 0, None), "the batch has an infinite value"),
        (lambda m, x: (m, x[:0], None), r"the batch is empty: \[0, 3, 8, 8\]"),
        (lambda m, x: (m, x[:, :2], None), r"the model cannot take \[2, 2, 8, 8\]: .*channels"),
        (lambda m, x: (m.requires_grad_(False), x, None), "no parameter of this model is trained"),
        (lambda m, x: (m.to("meta"), x, None), "meta device cannot run"),
        (lambda m, x: (m, x, torch.zeros(3)), "a batch of 2, but 3 targets"),
        (lambda m, x: (m, x, torch.full((2, 8, 8), 2)), r"classes 2\.\.2, the model has 0\.\.1"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(change, told):
    model, x, target = change(two_convolutions(), images().abs() + 1)
    with pytest.raises(ValueError, match=told) as error:
        gf.profile(model, x, target, repeats=1)
    assert "\n" not in str(error.value)


def test_repeats_must_be_positive():
    with pytest.raises(ValueError, match="repeats"):
        gf.profile(two_convolutions(), images(), repeats=0)


# what is printed, saved and drawn


def test_table_dictionary_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=images())
    found = gf.profile(model, images(), repeats=1)
    kept = json.loads(json.dumps(found.to_dict()))
    assert kept["rivals"][0]["name"] == PLAN and kept["rivals"][2]["backward"] is None
    assert kept["kept"][PLAN][0] == {"name": "0", "kind": "conv", "bytes": 384}
    line = next(s for s in found.table().splitlines() if s.startswith("2 "))
    assert line.split() == ["2", "conv", "GalerkinFilter(patch=2)", "0.5", "2.0", "0.5"]
    assert "kept by module" not in found.table(modules=False)
    assert "gf.cost at the engine level: 2 of 2 convolutions agree" in found.table()
    found.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command(tmp_path, capsys):
    pytest.importorskip("torchvision")
    words = ("--size", 32, "--batch", 2, "--repeats", 1, "--last", 3, "--short", "--out", tmp_path)
    assert gradfilter("profile", "mobilenet_v3_small", *words) == 0
    told = capsys.readouterr().out
    assert "exact / plan: time" in told and "kept by kind" in told and "profile.png" in told
    saved = json.loads((tmp_path / "profile.json").read_text())
    assert saved["machine"]["input"] == "[2, 3, 32, 32]"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("mobilenet_v22",), "near names: mobilenet_v2"),
        (("alexnet", "--size", "16"), "alexnet cannot take 16x16 images: "),
        (("squeezenet1_1", "--size", "64", "--last", "99"), "last=99, but the model has"),
        (("squeezenet1_1", "--device", "abacus"), "no device is called 'abacus'"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, words, told):
    pytest.importorskip("torchvision")
    assert told in mistake(capsys, "profile", *words)

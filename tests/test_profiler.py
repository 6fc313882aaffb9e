"""The profiler: kept bytes by hand, the cost model held against them, peaks of a known size."""

import copy
import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
from cases import METHODS, small_cnn
from torch import nn

import gradfilter as gf
from gradfilter import cli, energy, kept, profiler, stopwatch
from gradfilter.demo import kept_bytes
from gradfilter.profiler import EXACT, INFERENCE, PLAN

MIB = 2**20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A full collection looks at all that the suite has imported."""
    monkeypatch.setattr(stopwatch.gc, "collect", lambda: 0)
    monkeypatch.setattr(stopwatch, "TURNS", 1)


def two_convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


def images(n=2, size=8):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def rows(found, name=PLAN):
    return {(r.name, r.kind): r.bytes for r in found.kept[name]}


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.a(x) + self.b(x)


# kept bytes


def test_kept_bytes_of_the_layer_level_by_hand():
    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2))
    found = gf.profile(model, images(), repeats=1)
    means = (2 * 3 * 4 * 4 * 4, 2 * 4 * 4 * 4 * 4)  # 4x4 patches of 4 bytes
    dense = 2 * 4 * 8 * 8 * 4
    assert rows(found) == {
        ("0", "conv"): means[0],
        ("1", "activation"): dense,
        ("2", "conv"): means[1],
    }
    # the map between is kept once, by the activation and by the layer, and is the layer's
    assert rows(found, EXACT) == {("0", "conv"): 2 * 3 * 8 * 8 * 4, ("2", "conv"): dense}
    assert found.rival(PLAN).kept == sum(means) + dense
    assert found.rival(INFERENCE).kept == 0


def test_kept_bytes_of_the_engine_by_hand():
    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=images())
    found = gf.profile(model, images(), repeats=1)
    assert rows(found) == {
        ("0", "conv"): 2 * 3 * 4 * 4 * 4,
        ("0", "activation"): 2 * 4 * 4 * 4 * 4,  # the mean slope of every patch
        ("2", "conv"): 2 * 4 * 4 * 4 * 4,
    }
    assert [(c.name, c.level) for c in found.checks if c.level == "engine"] == [
        ("0", "engine"),
        ("2", "engine"),
    ]
    assert found.disagreements == []
    assert "not comparable: beside the layers' inputs gf.cost counts 2.0 KB" in found.table()


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("engine", [True, False])
def test_cost_agrees_and_totals_are_what_autograd_keeps(method, engine):
    model, x = small_cnn().eval(), images(2, 12)
    gf.convert(model, method, example=x if engine else None)
    found = gf.profile(model, x, repeats=1)
    different = {(c.name, c.level, c.cost, c.kept): c.note for c in found.disagreements}
    if isinstance(method, gf.GradientFilter) and any(c.level == "engine" for c in found.checks):
        # the first layer has stride 2: blocks of 2 * patch at the layer level, patches in a region
        blocks, patches = (
            2 * 3 * (-(-12 // side)) ** 2 * 4 for side in (2 * method.patch, method.patch)
        )
        assert "blocks of patch times stride" in different.pop(("0", "engine", blocks, patches))
    assert different == {} and len(found.checks) > 6
    assert {c.name for c in found.checks} >= {r.name for r in gf.cost(model, x).layers}
    assert found.rival(PLAN).kept == kept_bytes(copy.deepcopy(model), x)
    gf.revert(model)
    assert found.rival(EXACT).kept == kept_bytes(model.eval(), x)


def test_a_lying_cost_model_is_found_out(monkeypatch):
    def lying(model, example):
        told = gf.cost(model, example)
        told.layers[:] = [
            replace(r, kept_bytes=r.kept_bytes + 4) if r.name == "2" else r for r in told.layers
        ]
        return told

    model = two_convolutions()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=images())
    monkeypatch.setattr(profiler, "cost", lying)
    found = gf.profile(model, images(), repeats=1)
    assert [(c.name, c.level, c.cost - c.kept) for c in found.disagreements] == [
        ("2", "layer", 4),
        ("2", "engine", 4),
    ]
    assert "2 (conv): 516 bytes by gf.cost, 512 measured at the engine level" in found.table()
    assert len(found.to_dict()["disagreements"]) == 2


def test_what_training_mode_keeps_beside_is_a_disagreement():
    model = nn.Sequential(*two_convolutions(), nn.Dropout(0.5)).train()
    gf.convert(model, gf.GalerkinFilter(patch=2))
    (found,) = gf.profile(model, images(), repeats=1).disagreements
    assert (found.name, found.cost, found.kept > 0) == ("3", 0, True)
    assert "evaluation mode" in found.note


def test_a_shared_input_is_kept_once_by_the_engine():
    model, x = Fork(), images()
    gf.convert(model, gf.GalerkinFilter(patch=2), example=x)
    found = gf.profile(model, x, repeats=1)
    (different,) = found.disagreements
    assert (different.name, different.level) == ("b", "engine")
    assert (different.cost, different.kept) == (2 * 4 * 4 * 4 * 4, 0)
    assert "reads the input of a" in different.note and different.note in found.table()


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


# energy


def powercap(folder, now, most=1000):
    for name in ("intel-rapl:0", "intel-rapl:0:0"):  # a package and a part of it
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "energy_uj").write_text(f"{now}\n")
        (folder / name / "max_energy_range_uj").write_text(f"{most}\n")


def test_rapl_counts_on_when_its_counter_starts_again(tmp_path):
    powercap(tmp_path, 900)
    read, told = energy.counter(torch.device("cpu"), tmp_path)
    assert read() == 0 and "1 CPU package" in told
    powercap(tmp_path, 950)
    assert read() == pytest.approx(50e-6)
    powercap(tmp_path, 30)
    assert read() == pytest.approx(130e-6)


def test_a_machine_without_counters_says_so(tmp_path):
    read, told = energy.counter(torch.device("cpu"), tmp_path)
    assert read is None and told == f"no energy: this machine has no RAPL counters ({tmp_path})"
    (tmp_path / "intel-rapl:0").mkdir()
    read, told = energy.counter(torch.device("cpu"), tmp_path)
    assert read is None and "cannot be read" in told


class Nvml:
    """A library whose GPU uses 2 J between two readings."""

    def __init__(self, works=True):
        self.millijoules, self.error = 0, 0 if works else 3

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, into):
        self.millijoules += 2000
        into._obj.value = self.millijoules
        return self.error


def test_nvml_counts_joules_or_says_why_not():
    read, _ = energy.nvml_counter(Nvml(), "GPU-1")
    assert read() - read() == -2.0
    assert energy.nvml_counter(Nvml(), "GPU-2")[0] is None
    read, told = energy.nvml_counter(Nvml(works=False), "GPU-1")
    assert read is None and "has no counter (NVML error 3)" in told


def test_joules_are_per_step(monkeypatch):
    used = [0.0]
    monkeypatch.setattr(energy, "counter", lambda device: (lambda: used[0], "energy: a test"))
    monkeypatch.setattr(stopwatch, "WINDOW", 0.0)

    def step():
        used[0] += 2.5

    found, told = stopwatch.joules_of({"plan": step}, torch.device("cpu"))
    assert found == {"plan": [2.5] * stopwatch.TURNS} and told == "energy: a test"


def test_energy_is_left_out_where_there_is_none(monkeypatch):
    monkeypatch.setattr(energy, "counter", lambda device: (None, "no energy: a test"))
    found = gf.profile(two_convolutions(), images(), repeats=1)
    assert all(r.joules is None for r in found.rivals)
    assert found.table().splitlines()[-1] == "no energy: a test"
    assert "energy, J" not in found.table()


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


def command(*words) -> int:
    return cli.main(["profile", *map(str, words)])


def test_the_command(tmp_path, capsys):
    pytest.importorskip("torchvision")
    words = ("--size", 32, "--batch", 2, "--repeats", 1, "--last", 3, "--short", "--out", tmp_path)
    assert command("mobilenet_v3_small", *words) == 0
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
    assert command(*words) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_nothing_of_the_forward_pass_outlives_the_look_at_it():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Sigmoid())
    weight = weakref.ref(model[0].weight)
    kept.measure(model, torch.randn(1, 3, 8, 8), {})
    kept_bytes(model, torch.randn(1, 3, 8, 8))
    del model
    gc.collect()
    assert weight() is None

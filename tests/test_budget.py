"""Plans within a budget: what they promise is measured, what cannot be is refused."""

import copy
import json

import pytest
import torch
from torch import nn

import gradfilter as gf
from gradfilter import cli, stopwatch
from gradfilter.plan import Plan, read
from gradfilter.planning import amounts, budget, choice, outcome, prices
from gradfilter.planning.budget import Survey
from gradfilter.planning.search import Search
from gradfilter.profiler import PLAN

MB = 2**20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A full collection looks at all that the suite has imported."""
    monkeypatch.setattr(stopwatch.gc, "collect", lambda: 0)
    monkeypatch.setattr(stopwatch, "TURNS", 1)


class Block(nn.Module):
    """Two convolutions beside a third one, which runs after them and reads what the first reads."""

    def __init__(self, channels, stride):
        super().__init__()
        wide = channels * stride
        self.one = unit(channels, wide, stride)
        self.two = unit(wide, wide)
        self.beside = nn.Conv2d(channels, wide, 1, stride)

    def forward(self, x):
        return torch.relu(self.two(self.one(x)) + self.beside(x))


def unit(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


def chained(wide=16):
    torch.manual_seed(0)
    body = [unit(3, 8, 2), unit(8, 8), unit(8, wide, 2), unit(wide, 16), unit(16, 32)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 5)]
    return nn.Sequential(*body, *tail)


def branched():
    torch.manual_seed(0)
    return nn.Sequential(
        unit(3, 8, 2), Block(8, 1), Block(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def images(n=4, size=32):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


TARGET = torch.tensor([0, 1, 2, 3])
# whole training keeps about 1 MB in these networks; the output layer alone takes a few KB
SIZES = ["8KB", "40KB", "100KB", "400KB", "4MB"]


# memory


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("network", [chained, branched])
@pytest.mark.parametrize("size", SIZES)
def test_memory_is_predicted_to_the_byte(network, size, copies):
    found = gf.plan(network(), images(), target=TARGET, memory=size, copies=copies)
    assert found.final.predicted == found.final.measured
    assert found.final.measured.total <= amounts.bytes_of(size) == found.memory
    assert len(found.attempts) == 1


@pytest.mark.parametrize("size", ["40KB", "100KB"])
def test_the_memory_of_layers_frozen_between_is_predicted_to_the_byte(size):
    found = gf.plan(chained(wide=64), images(), target=TARGET, memory=size)
    assert any(not r.trained for r in found.reasons)
    assert found.final.predicted == found.final.measured and len(found.attempts) == 1


def test_kept_bytes_are_those_that_the_profiler_measures():
    model, x = chained(), images()
    found = gf.plan(model, x, target=TARGET, memory="60KB", copies=0)
    assert found.final.measured.gradients == found.final.measured.state == 0
    gf.convert(model.train(), found, example=x)
    kept = gf.profile(model, x, TARGET, repeats=1).rival(PLAN).kept
    assert found.final.measured.kept == found.final.predicted.kept == kept


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_gradients_and_state_are_those_of_a_real_step(copies):
    model, x = chained(), images()
    found = gf.plan(model, x, target=TARGET, memory="100KB", copies=copies)
    gf.convert(model, found, example=x)
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    held = found.final.predicted
    assert (held.gradients, held.state) == (trained, (copies - 1) * trained)
    # Adam counts its steps, in 4 bytes for each parameter
    steps = 4 * sum(p.requires_grad for p in model.parameters()) if copies == 3 else 0
    assert found.final.measured.state == held.state + steps


def test_a_step_of_more_pictures_keeps_more():
    kwargs = {
        "target": TARGET,
        "memory": "1MB",
        "copies": 0,
        "methods": [gf.GalerkinFilter(grid=4)],
    }
    few, many = (gf.plan(chained(), images(), batch=n, **kwargs) for n in (4, 8))
    norms = 3 * 4 * (8 + 8 + 16 + 16 + 32)  # the folded batch norms do not grow
    assert many.final.measured.kept - norms == 2 * (few.final.measured.kept - norms)
    assert few.pictures == many.pictures == 4


def test_a_mix_of_exact_and_filtered_layers_is_predicted():
    methods = [gf.Exact(), gf.GalerkinFilter(grid=4)]
    survey = Survey(chained(), images(), target=TARGET, methods=methods, copies=0)
    sizes = range(40, 320, 40)
    found = [survey.plan(memory=1024 * size) for size in sizes]
    mixed = [f for f in found if f.converted and isinstance(f["4.0"].method, gf.Exact)]
    assert mixed, "a budget is to give exact layers behind filtered ones"
    # where the first layer lends the engine, the 96 bytes of its batch norm are shared out
    gaps = [f.final.predicted.kept - f.final.measured.kept for f in found]
    assert all(0 <= gap <= 96 for gap in gaps)


def test_a_survey_gives_the_plans_that_plan_gives():
    survey = Survey(branched(), images(), target=TARGET)
    for size in ("40KB", "100KB"):
        one, other = (
            survey.plan(memory=size),
            gf.plan(branched(), images(), target=TARGET, memory=size),
        )
        assert one.entries == other.entries and one.final == other.final
    with pytest.raises(ValueError, match="not timed"):
        survey.plan(time="1s")


# choice


def test_a_larger_budget_is_never_worth_less():
    values = [gf.plan(chained(), images(), target=TARGET, memory=s).value for s in SIZES]
    assert values == sorted(values) and values[0] < values[-1]


def test_with_room_for_everything_everything_is_exact():
    found = gf.plan(chained(), images(), target=TARGET, memory="1GB")
    assert not found.frozen and found.value == pytest.approx(1)
    assert found.measured_value == pytest.approx(1, abs=1e-3)
    assert all(r.measured > 0.999 for r in found.reasons)


def test_the_output_layer_is_trained_and_what_comes_before_the_first_is_frozen():
    model = chained()
    found = gf.plan(model, images(), target=TARGET, memory="8KB")
    assert found["8"].trained and "0.0" in found.frozen
    gf.convert(model, found, example=images())
    first = next(i for i, r in enumerate(found.reasons) if r.trained)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    kept = {r.name for r in found.reasons[first:] if r.trained}
    assert {n.rpartition(".")[0] for n in trained if n.endswith("weight")} >= kept
    assert not any(n.startswith("0.") for n in trained)


def test_a_layer_frozen_between_takes_its_batch_norm_along():
    model = chained(wide=64)
    found = gf.plan(model, images(), target=TARGET, memory="100KB")
    between = [r.name for r in found.reasons if not r.trained]
    assert between, "this budget is to freeze a layer between trained ones"
    gf.convert(model, found, example=images())
    for name in between:
        module = model.get_submodule(name.rpartition(".")[0] if name.endswith(".0") else name)
        assert not any(p.requires_grad for p in module.parameters())


def test_no_option_is_finer_than_the_layers_behind():
    survey = Survey(chained(), images(), target=TARGET)
    search = Search(survey.chain, survey.worths, survey.costs, {"memory": 1e9}, None, 2)
    checked = 0
    for option in (o for options in search.layers[1:] for o in options):
        for state, move in zip(search.states, option.moves, strict=True):
            finer = search.ranks[option.key[1]] < state.rank
            checked += finer
            assert (move is None) == finer
    assert checked


def test_methods_get_coarser_from_the_output_to_the_input():
    fine, coarse = gf.GalerkinFilter(grid=8), gf.GalerkinFilter(grid=2)
    found = gf.plan(
        chained(), images(), target=TARGET, memory="70KB", methods=[coarse, fine], copies=0
    )
    used = [r.method for r in found.reasons if r.name != "8"]
    assert set(used) == {repr(fine), repr(coarse)}
    assert used == sorted(used, key=[repr(coarse), repr(fine)].index)


def test_layers_below_the_least_fidelity_are_not_trained():
    kwargs = {"target": TARGET, "memory": "100KB", "methods": [gf.GradientFilter(patch=4)]}
    free = gf.plan(chained(), images(), **kwargs)
    worst = min(r.fidelity for r in free.reasons if r.trained)
    assert worst < 0.9
    strict = gf.plan(chained(), images(), fidelity=0.9, **kwargs)
    assert all(r.fidelity >= 0.9 for r in strict.reasons if r.trained)
    assert strict.value < free.value


def test_values_are_the_energies_of_the_exact_gradient():
    model, x = chained().eval(), images()
    nn.functional.cross_entropy(model(x), TARGET).backward()
    energy = {n: float(m.weight.grad.square().sum()) for n, m in model.named_modules()
              if isinstance(m, nn.Conv2d | nn.Linear)}  # fmt: skip
    found = gf.plan(chained(), x, target=TARGET, memory="1GB")
    for r in found.reasons:
        assert r.energy == pytest.approx(energy[r.name] / sum(energy.values()), rel=1e-3)


def test_what_the_user_froze_stays_frozen():
    model = chained()
    model[3].requires_grad_(False)
    found = gf.plan(model, images(), target=TARGET, memory="1GB")
    assert found.frozen == ["3.0"]
    gf.convert(model, found, example=images())
    assert not any(p.requires_grad for p in model[3].parameters())


def test_without_a_target_classes_come_from_the_model():
    found = gf.plan(chained(), images(), memory="100KB")
    assert "no target: classes drawn from the model's own output" in found.notes
    again = gf.plan(chained(), images(), memory="100KB")
    assert found.entries == again.entries and found.value == again.value


def test_an_output_layer_of_zeros_is_drawn_in_the_copy_alone():
    model = chained()
    nn.init.zeros_(model[8].weight)
    found = gf.plan(model, images(), target=TARGET, memory="100KB")
    assert budget.WOKEN in found.notes and not model[8].weight.any()
    assert any(r.energy > 0 for r in found.reasons[:-1])


def test_the_model_is_left_alone():
    model = chained().train()
    gf.convert(model, gf.GalerkinFilter(grid=4), last=2, example=images())
    before, state = copy.deepcopy(model), torch.get_rng_state()
    model(images()).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.set_rng_state(state)
    gf.plan(model, images(), target=TARGET, memory="100KB")
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in before.named_parameters()
    }
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if n in grads)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert model.training
    same = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


# time


@pytest.fixture
def clockwork(monkeypatch):
    """Steps take 10 ms, and 1 ms for each trained parameter; exact ones half more."""

    def seconds(step):
        exact = "Exact" in repr(step.model[1][0])
        count = sum(p.requires_grad for p in step.model.parameters())
        return (0.010 + 0.001 * count) * (1.5 if exact else 1.0)

    monkeypatch.setattr(stopwatch.Step, "__call__", lambda step: {"step": seconds(step)})
    monkeypatch.setattr(stopwatch, "peaks", lambda steps, device: ({}, []))
    return monkeypatch


def test_time_is_predicted_from_measured_steps(clockwork):
    methods = [gf.GalerkinFilter(grid=4)]
    found = gf.plan(chained(), images(), target=TARGET, time="1s", methods=methods)
    # every conv has 3 parameters (gamma, beta), the head 2
    assert found.final.predicted_seconds == pytest.approx(0.010 + 0.001 * (5 * 3 + 2))
    assert found.final.measured_seconds == pytest.approx(found.final.predicted_seconds)
    assert "time, ms" in found.table()


def test_a_time_budget_trains_fewer_layers(clockwork):
    methods = [gf.GalerkinFilter(grid=4)]
    kwargs = {"target": TARGET, "methods": methods}
    found = gf.plan(chained(), images(), time="20ms", **kwargs)
    assert found.frozen and found.final.measured_seconds <= 0.020
    both = gf.plan(chained(), images(), time="20ms", memory="20KB", **kwargs)
    assert both.final.measured.total <= 20 * 1024 and both.final.measured_seconds <= 0.020
    assert both.value < found.value


def test_a_plan_that_takes_longer_than_promised_is_sought_again(clockwork):
    right = outcome.Outcome.seconds
    clockwork.setattr(outcome.Outcome, "seconds", lambda self, model: 1.2 * right(self, model))
    found = gf.plan(
        chained(), images(), target=TARGET, time="24ms", methods=[gf.GalerkinFilter(grid=4)]
    )
    assert len(found.attempts) > 1
    assert found.attempts[0].measured_seconds > 0.024 >= found.final.measured_seconds
    assert found.final.factors["time"] == pytest.approx(1.2)
    assert found.final.predicted_seconds == pytest.approx(found.final.measured_seconds, rel=0.1)
    assert f"{len(found.attempts)} plans were measured" in found.table()


def test_a_plan_that_never_keeps_to_the_budget_says_so(clockwork):
    clockwork.setattr(outcome.Outcome, "seconds", lambda self, model: 1.0)
    found = gf.plan(
        chained(), images(), target=TARGET, time="24ms", methods=[gf.GalerkinFilter(grid=4)]
    )
    assert any("does not keep to the budget" in note for note in found.notes)


def test_without_a_time_budget_nothing_is_timed(monkeypatch):
    def refuse(*_):
        raise AssertionError("timed")

    monkeypatch.setattr(prices, "seconds", refuse)
    monkeypatch.setattr(outcome.Outcome, "seconds", refuse)
    assert gf.plan(chained(), images(), memory="100KB").final.predicted_seconds is None


# report


def test_the_report_as_table_dict_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    found = gf.plan(chained(), images(), target=TARGET, memory="40KB")
    told = found.table()
    assert str(found) == repr(found) == told
    assert all(r.name in told for r in found.reasons)
    assert "measured / budget" in told and "expected learning" in told
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["memory"] == 40 * 1024 and plain["attempts"][-1]["measured"]["kept"]
    assert list(plain["layers"]) == list(found)
    found.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_saved_plan_converts_as_the_plan_itself(tmp_path, name):
    pytest.importorskip("yaml")
    x = images()
    found = gf.plan(branched(), x, target=TARGET, memory="40KB")
    found.save(tmp_path / name)
    models = [branched(), branched()]
    plans = [gf.convert(models[0], found, example=x),
             gf.convert(models[1], read(tmp_path / name), example=x)]  # fmt: skip
    assert plans[0].entries == plans[1].entries
    assert isinstance(Plan.load(tmp_path / name), Plan)
    for model in models:
        nn.functional.cross_entropy(model(x), TARGET).backward()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert a.requires_grad == b.requires_grad
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


# errors


def refused(match, model=None, x=None, kind=ValueError, **kwargs):
    with pytest.raises(kind, match=match) as error:
        gf.plan(model or chained(), images() if x is None else x, **kwargs)
    assert "\n" not in str(error.value)


def test_an_impossible_budget_names_the_smallest_possible_one():
    with pytest.raises(ValueError, match="smallest possible is") as error:
        gf.plan(chained(), images(), target=TARGET, memory="1KB")
    smallest = str(error.value).split("smallest possible is ")[1].split(",")[0]
    found = gf.plan(chained(), images(), target=TARGET, memory=smallest.replace(" ", ""))
    assert [r.name for r in found.reasons if r.trained] == ["8"]
    assert "'8' alone" in str(error.value)


def test_an_impossible_time_names_the_smallest_possible_one(clockwork):
    with pytest.raises(ValueError, match="time budget of 5 ms is impossible: .* is 12 ms"):
        gf.plan(chained(), images(), target=TARGET, time="5ms", methods=[gf.GalerkinFilter()])


def test_bad_input_is_refused_in_one_line():
    x = images()
    x[1, 0, 3, 3] = float("nan")
    refused("plan: the batch has NaN", x=x, memory="1MB")
    refused("plan: the model cannot take", x=torch.randn(2, 4, 32, 32), memory="1MB")
    refused("give a budget")
    refused("'64XB' is not an amount like 64MB", memory="64XB")
    refused("memory must be above 0", memory=-3)
    refused("fidelity is a cosine", memory="1MB", fidelity=2)
    refused("batch must be a whole number", memory="1MB", batch=0)
    refused("give methods as", memory="1MB", methods=["galerkin"], kind=TypeError)
    refused("4, but 3 targets", memory="1MB", target=TARGET[:3])
    frozen = chained()
    frozen[8].requires_grad_(False)
    refused("output layer '8' is frozen", model=frozen, memory="1MB")


@pytest.mark.parametrize(
    ("text", "size"), [("64MB", 64 * MB), ("1.5 kb", 1536), ("2GiB", 2**31), (7, 7), ("12", 12)]
)
def test_amounts_of_memory(text, size):
    assert amounts.bytes_of(text) == size


def test_amounts_of_time_and_amounts_as_told():
    assert amounts.seconds_of("200ms") == pytest.approx(0.2)
    assert amounts.seconds_of(2) == 2
    assert amounts.told_bytes(1.234 * MB) == "1.24 MB"  # never less than it is
    assert amounts.told_seconds(0.1) == "100 ms"


# command


def run(command):
    return cli.main(["plan", *command.split()])


def test_the_command_plans_and_train_takes_the_plan(tiny_networks, photos, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "plan.yaml"
    data = f"--data {photos} --size 16 --device cpu"
    code = run(f"mobilenet_v2 --memory 30KB {data} --batch 4 --save {saved} --out {tmp_path}/o")
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "measured / budget" in out.out and str(saved) in out.out
    assert {p.name for p in (tmp_path / "o").iterdir()} == {
        "plan.yaml",
        "report.json",
        "report.png",
    }
    plan = Plan.load(saved)
    command = f"train --model mobilenet_v2 {data} --plan {saved} --epochs 1 --batch 6"
    assert cli.main([*command.split(), "--out", str(tmp_path / "run")]) == 0
    used = Plan.load(tmp_path / "run" / "plan.yaml")
    assert used.converted == plan.converted and used.frozen == plan.frozen


def test_the_command_without_data_says_what_it_weighs(capsys):
    pytest.importorskip("timm")
    code = run("squeezenet1_1 --memory 8MB --size 64 --batch 2 --pictures 2 --device cpu")
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "random weights, noise as pictures" in out.out


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("mobilenet_v2", "give a budget: --memory, --time or both"),
        ("mobilnet_v2 --memory 8MB", "near names: mobilenet_v2"),
        ("mobilenet_v2 --memory 8MB --data nowhere/", "nowhere"),
        ("mobilenet_v2 --memory 8MB --methods galerkin:grid=x", "NAME:KNOB=NUMBER"),
        ("mobilenet_v2 --memory 8MB --methods galerkn", "did you mean galerkin"),
        ("inception_v3 --memory 8MB --size 16", "cannot take 16x16 images"),
        ("squeezenet1_1 --memory 1KB --size 64 --pictures 2", "smallest possible is"),
    ],
)
def test_mistakes_are_told_in_one_line(command, told, capsys):
    pytest.importorskip("timm")
    assert run(command) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_an_amount_that_is_none_is_told_at_once(capsys):
    with pytest.raises(SystemExit) as end:
        run("mobilenet_v2 --memory 64XB")
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "64XB" in err and err.count("\n") == 1


def test_an_empty_folder_is_told(tmp_path, capsys):
    pytest.importorskip("timm")
    (tmp_path / "cats").mkdir()
    assert run(f"mobilenet_v2 --memory 8MB --data {tmp_path}") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_choice_is_a_plan():
    assert issubclass(choice.Choice, Plan)

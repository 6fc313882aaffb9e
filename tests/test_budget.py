"""Plans within a budget: what they promise is measured, what cannot be is refused."""

from dataclasses import replace

import pytest
import torch
from planned import SIZES, TARGET, branched, chained, images, unit

import gradfilter as gf
from gradfilter import stopwatch
from gradfilter.planning import amounts, budget, outcome, prices
from gradfilter.planning.budget import Survey
from gradfilter.planning.choice import EXAMPLE
from gradfilter.planning.search import Search
from gradfilter.profiler import PLAN

pytestmark = pytest.mark.usefixtures("quick_stopwatch")

MB = 2**20


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
    found = gf.plan(chained(wide=64), images(), target=TARGET, memory=size, gaps=True)
    assert any(not r.trained for r in found.reasons)
    assert found.final.predicted == found.final.measured and len(found.attempts) == 1


@pytest.mark.parametrize("size", ["40KB", "100KB"])
def test_the_last_layers_are_trained_one_and_all(size):
    found = gf.plan(chained(wide=64), images(), target=TARGET, memory=size, gaps=False)
    assert all(r.trained for r in found.reasons)
    assert found.final.predicted == found.final.measured and len(found.attempts) == 1
    gaps = gf.plan(chained(wide=64), images(), target=TARGET, memory=size, gaps=True)
    assert not found.over and found.value <= gaps.value


@pytest.mark.parametrize("enough, frozen", [(0.0, False), (1.0, True)])
def test_layers_between_are_frozen_where_much_is_lost_else(enough, frozen, monkeypatch):
    """By the share of what a plan with gaps promises that one without has to keep."""
    monkeypatch.setattr(budget, "ENOUGH", enough)
    survey = budget.Survey(chained(wide=64), images(), target=TARGET)
    found = survey.plan(memory="100KB")
    expected = survey.plan(memory="100KB", gaps=frozen)
    assert found.value == expected.value
    assert any(not r.trained for r in found.reasons) == frozen
    assert any("layers between are frozen" in note for note in found.notes) == frozen


def test_layers_that_take_no_method_are_part_of_a_plan():
    torch.manual_seed(0)
    up = torch.nn.ConvTranspose2d(8, 8, 2, 2)
    model = torch.nn.Sequential(unit(3, 8), unit(8, 8, 2), up, torch.nn.Conv2d(8, 5, 1))
    x, target = images(), torch.zeros(4, 32, 32, dtype=torch.long)
    found = gf.plan(model, x, target=target, memory="400KB", copies=0)
    assert found["2"].reason and found.converted
    gf.convert(model.train(), found, example=x)
    kept = gf.profile(model, x, target, repeats=1).rival(PLAN).kept
    assert found.final.measured.kept == found.final.predicted.kept == kept <= 400 * 1024


def test_kept_bytes_are_those_that_the_profiler_measures():
    model, x = chained(), images()
    found = gf.plan(model, x, target=TARGET, memory="60KB", copies=0)
    assert found.final.measured.gradients == found.final.measured.state == 0
    gf.convert(model.train(), found, example=x)
    kept = gf.profile(model, x, TARGET, repeats=1).rival(PLAN).kept
    assert found.final.measured.kept == found.final.predicted.kept == kept


def test_a_plan_for_the_engine_says_that_it_needs_an_example():
    methods, x = [gf.GalerkinFilter(grid=4)], images()
    found = gf.plan(chained(), x, target=TARGET, memory="1MB", methods=methods)
    assert EXAMPLE in found.table()
    without = chained().train()
    gf.convert(without, found)
    kept = gf.profile(without, x, TARGET, repeats=1).rival(PLAN).kept
    assert kept > 1.2 * found.final.measured.kept
    exact = gf.plan(chained(), x, target=TARGET, memory="4MB", methods=[gf.Exact()])
    assert EXAMPLE not in exact.table()


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
def test_gradients_and_state_are_those_of_a_real_step(copies):
    model, x = chained(), images()
    found = gf.plan(model, x, target=TARGET, memory="100KB", copies=copies)
    gf.convert(model, found, example=x)
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    held = found.final.predicted
    assert (held.gradients, held.state) == (trained, (copies - 1) * trained)
    # Adam counts its steps, in 4 bytes for each parameter
    steps = 4 * sum(p.requires_grad for p in model.parameters()) if copies >= 3 else 0
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
    assert found.over == {"time": pytest.approx(1.0 - 0.024)}
    told = "the plan is 976 ms of time over the budget of 24 ms (4066.7%), after 1 attempt"
    assert found.table().endswith(told) and found.to_dict()["over"] == found.over


def test_by_how_much_a_plan_is_over_each_budget(monkeypatch):
    held = outcome.Outcome.held
    more = lambda self, model: replace(held(self, model), kept=1024**2)  # noqa: E731
    monkeypatch.setattr(outcome.Outcome, "held", more)
    found = gf.plan(chained(), images(), target=TARGET, memory="40KB")
    assert found.over == {"memory": found.final.measured.total - 40 * 1024}
    assert "KB of memory over the budget of 40 KB" in found.table()
    monkeypatch.undo()
    found = gf.plan(chained(), images(), target=TARGET, memory="40KB")
    assert not found.over and "over the budget" not in found.table()


def test_without_a_time_budget_nothing_is_timed(monkeypatch):
    def refuse(*_):
        raise AssertionError("timed")

    monkeypatch.setattr(prices, "seconds", refuse)
    monkeypatch.setattr(outcome.Outcome, "seconds", refuse)
    assert gf.plan(chained(), images(), memory="100KB").final.predicted_seconds is None


# errors


def refused(match, model=None, x=None, kind=ValueError, **kwargs):
    with pytest.raises(kind, match=match) as error:
        gf.plan(model or chained(), images() if x is None else x, **kwargs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("memory", ["3KB", "10KB"])
def test_a_plan_of_the_output_layer_alone_names_the_budget_that_trains_more(memory):
    model, kwargs = chained(), {"target": TARGET}
    found = gf.plan(model, images(), memory=memory, **kwargs)
    (told,) = [note for note in found.notes if "only the output layer '8' is trained" in note]
    least = amounts.bytes_of(told.split("the next one needs a memory budget of ")[1])
    more, same = (gf.plan(model, images(), memory=m, **kwargs) for m in (least, 0.99 * least))
    assert [sum(r.trained for r in p.reasons) for p in (more, same)] == [2, 1]
    assert not any("output layer" in note for note in more.notes)


def test_which_of_two_budgets_has_to_grow_for_another_layer(clockwork):
    kwargs = {"target": TARGET, "methods": [gf.GalerkinFilter(grid=4)]}

    def told(**budget):
        return gf.plan(chained(), images(), **budget, **kwargs).notes[-1]

    assert "needs a memory budget of" in (lean := told(memory="3KB", time="1s"))
    assert "time" not in lean and "needs a time budget of" in (
        fast := told(memory="1MB", time="12ms")
    )
    assert "memory" not in fast
    both = told(memory="3KB", time="12ms")
    memory, time = both.split("the next one needs a memory budget of ")[1].split(
        " and a time budget of "
    )
    assert len(gf.plan(chained(), images(), memory=memory, time=time, **kwargs).frozen) < 5


def test_layers_that_no_budget_would_train():
    methods = [gf.GalerkinFilter(grid=4)]
    found = gf.plan(chained(), images(), target=TARGET, memory="4MB", methods=methods, fidelity=1.0)
    assert len(found.frozen) == 5
    assert found.notes[-1].endswith("no other layer would gain anything, whatever the budget")


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


def test_budgets_that_are_impossible_only_together_are_refused():
    model = torch.nn.Sequential(unit(3, 8), torch.nn.Conv2d(8, 5, 3, padding=1))
    lean, fast = gf.GalerkinFilter(grid=4), gf.Exact()
    survey = Survey(model, images(), methods=[lean, fast], timed=True)
    head = survey.costs.of[lean]
    head[-1] = replace(head[-1], seconds=1.0)
    free = Search(survey.chain, survey.worths, survey.costs, {"memory": 1, "time": 1}, None, 2)
    memory, time = (1.01 * least for least in free.smallest().values())
    with pytest.raises(ValueError, match=r"impossible together: .* '1' .* KB with .* ms, or ") as e:
        survey.plan(memory, time)
    lean_one, fast_one = str(e.value).split("smallest possible are ")[1].split(", or ")
    for pair in (lean_one, fast_one):
        kept, taken = pair.split(" with ")
        assert free.solve({"memory": amounts.bytes_of(kept), "time": amounts.seconds_of(taken)})


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
    refused("give methods as", memory="1MB", methods=gf.Exact(), kind=TypeError)
    refused("4, but 3 targets", memory="1MB", target=TARGET[:3])
    broken = chained()
    broken[8].weight.data[0] = float("nan")
    refused("the loss of this batch is nan", model=broken, memory="1MB", target=TARGET)
    refused("output of this batch has NaN", model=broken, memory="1MB")
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

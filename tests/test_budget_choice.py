"""What a plan within a budget chooses to train, and how it is reported and saved."""

import copy
import json

import pytest
import torch
from planned import SIZES, TARGET, branched, chained, images
from torch import nn

import gradfilter as gf
from gradfilter.plan import Plan, read
from gradfilter.planning import budget, choice
from gradfilter.planning.budget import Survey
from gradfilter.planning.search import Search
from gradfilter.planning.worth import likenesses

pytestmark = pytest.mark.usefixtures("quick_stopwatch")


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
    found = gf.plan(model, images(), target=TARGET, memory="100KB", gaps=True)
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
    assert worst < 0.95
    strict = gf.plan(chained(), images(), fidelity=0.95, **kwargs)
    assert all(r.fidelity >= 0.95 for r in strict.reasons if r.trained)
    assert strict.value < free.value


def test_a_gain_is_the_energy_less_that_of_the_error():
    a, e = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    left = e.square().sum() - (a - e).square().sum()
    (found,) = likenesses([a], [e])
    assert found.gain == pytest.approx(float(left / e.square().sum()), rel=1e-5)


def test_a_layer_whose_gradient_would_be_mostly_error_is_not_trained():
    kwargs = {"target": TARGET, "memory": "1GB", "methods": [gf.GradientFilter(patch=4)]}
    survey = Survey(chained(), images(), target=TARGET, methods=kwargs["methods"])
    found = survey.worths.likeness[gf.GradientFilter(patch=4)]
    pairs = zip(survey.chain.links, found, strict=True)
    harmful = {link.name for link, likeness in pairs if likeness.gain < 0}
    assert harmful  # or this test shows nothing
    chosen = gf.plan(chained(), images(), **kwargs)
    assert not harmful & {r.name for r in chosen.reasons if r.trained}


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


def test_choice_is_a_plan():
    assert issubclass(choice.Choice, Plan)


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

"""What cannot be measured is refused in one line, by all instruments alike."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from planned import TARGET, chained, images

import gradfilter as gf

pytestmark = pytest.mark.usefixtures("quick_stopwatch")

INSTRUMENTS = {
    "profile": lambda model, x, target: gf.profile(model, x, target, repeats=1),
    "fidelity": gf.fidelity,
    "plan": lambda model, x, target: gf.plan(model, x, target=target, memory="1MB"),
}


def apart(output):
    return F.cross_entropy(output, TARGET, reduction="none")


@pytest.mark.parametrize("instrument", INSTRUMENTS.values(), ids=INSTRUMENTS)
@pytest.mark.parametrize(
    "target, says",
    [
        (torch.zeros(4, 3, dtype=torch.long), r"output of \[4, 5\] the target must be \[4\], got"),
        (torch.zeros(4, 8, 8, dtype=torch.long), r"must be \[4\], got \[4, 8, 8\]"),
        (torch.rand(4, 3), r"must be \[4, 5\], got \[4, 3\]"),
        (torch.tensor(1), r"must be \[4\], got \[\]"),
        ([0, 1, 2, 3], "must be a tensor or a function of the output, got list"),
        (apart, r"must be a tensor of one number, got \[4\]"),
        (lambda output: 1.0, "must be a tensor of one number, got float"),
        (lambda output: output.detach().sum(), "depends on no trained parameter"),
    ],
)
def test_a_target_that_gives_no_loss_is_refused(instrument, target, says):
    with pytest.raises((ValueError, TypeError), match=says):
        instrument(chained(), images(), target)


def test_an_output_without_classes_needs_a_loss():
    model = torch.nn.Sequential(chained(), torch.nn.Linear(5, 1), torch.nn.Flatten(0))
    with pytest.raises(ValueError, match=r"\[4\] has no scores of classes: give the loss as"):
        gf.fidelity(model, images(), TARGET)


class Margin(torch.nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, output):
        return F.cross_entropy(self.scale * output, TARGET)


class Pictures(NamedTuple):
    x: torch.Tensor


def differentiable(leaf: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures that ask for a gradient, and the tensor that would get it."""
    x = images().requires_grad_(True)
    return (x, x) if leaf else (1.0 * x, x)


@pytest.mark.parametrize("leaf", [True, False], ids=["a leaf", "computed"])
@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), Pictures], ids="xtn")
@pytest.mark.parametrize("instrument", INSTRUMENTS.values(), ids=INSTRUMENTS)
def test_an_example_that_asks_for_a_gradient_gets_none(instrument, form, leaf):
    x, asks = differentiable(leaf)
    instrument(chained(), form(x), TARGET)
    assert asks.grad is None and x.requires_grad
    asks.grad = torch.ones_like(asks)
    instrument(chained(), form(x), TARGET)
    assert torch.equal(asks.grad, torch.ones_like(asks))


def test_the_gradient_of_the_example_is_part_of_what_is_measured():
    """The first layer keeps no input for it, but hands a gradient back."""
    plain, asked = (gf.fidelity(chained(), x, TARGET) for x in (images(), differentiable(True)[0]))
    assert plain.layers[0].input is None and asked.layers[0].input is not None


def test_a_plan_may_repeat_an_example_that_asks_for_a_gradient():
    model, (x, _) = chained(), differentiable(True)
    found = [gf.plan(model, e, target=TARGET, memory="1MB", batch=6) for e in (x, x.detach())]
    assert found[0].entries == found[1].entries
    assert found[0].final.measured == found[1].final.measured


@pytest.mark.parametrize("instrument", INSTRUMENTS.values(), ids=INSTRUMENTS)
def test_a_target_and_a_loss_with_parameters_get_no_gradient(instrument):
    shares, loss = torch.rand(4, 5).softmax(1).requires_grad_(True), Margin()
    for target in (shares, loss):
        instrument(chained(), images(), target)
    assert shares.grad is None and loss.scale.grad is None


@pytest.mark.parametrize("instrument", INSTRUMENTS.values(), ids=INSTRUMENTS)
def test_everything_else_is_left_alone_too(instrument):
    """A model that writes into its input, drops at random, and has modes and gradients of ours."""
    model = torch.nn.Sequential(torch.nn.ReLU(inplace=True), chained(), torch.nn.Dropout(0.5))
    model.train()[1][1].eval()
    model[1][0].requires_grad_(False)
    x = images()
    model(x.clone()).sum().backward()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    grads, values = [p.grad for p in model.parameters()], x.clone()
    numbers = [g if g is None else g.clone() for g in grads]
    instrument(model, x, TARGET)
    assert torch.equal(x, values) and torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    for p, old, grad, number in zip(
        model.parameters(), before.parameters(), grads, numbers, strict=True
    ):
        assert p.requires_grad == old.requires_grad and torch.equal(p, old)
        assert p.grad is grad and (grad is None or torch.equal(grad, number))
    for a, b in zip(model.buffers(), before.buffers(), strict=True):
        assert torch.equal(a, b)

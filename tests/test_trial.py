"""What cannot be measured is refused in one line, by all instruments alike."""

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

"""Steps as CUDA graphs: their update is the optimizer's; what cannot be recorded says so."""

import pytest
import tiny
import torch

from gradfilter import Exact, GalerkinFilter, Hosvd, Int8, SubspaceIteration, Svd
from gradfilter.recipes import capture
from gradfilter.recipes.datasets import open_data
from gradfilter.recipes.loading import InTurn, Shuffled, loader
from gradfilter.recipes.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tiny_networks")


def trainer(photos, **options):
    settings = tiny.settings(photos, None, **{"device": "cpu", **options})
    data = open_data(str(photos), download=False)
    return Trainer(settings, data.task, data.classes), data


def batches(trainer, data, count):
    order = Shuffled(len(data.train), trainer.batch, 0, range(count), trainer.world)
    return list(loader(trainer.changed(data.train, True), order, trainer.world, 0))


def take_both(photos, monkeypatch, replayed, **options):
    """The weights after a few steps, one by one and as recorded."""
    monkeypatch.setattr(capture, "refusal", lambda trainer: None)
    found = []
    for recorded in (False, True):
        one, data = trainer(photos, **options)
        step = replayed(capture.Captured(one)) if recorded else one.step
        for number, batch in enumerate(batches(one, data, 4)):
            step(batch, number, 0.1 / (number + 1))
        found.append((one.model.state_dict(), one.sums, one.optimizer.state_dict()["state"]))
    return found


@pytest.mark.parametrize("backbone", [1.0, 0.3])
def test_a_recorded_step_does_what_the_optimizer_does(photos, monkeypatch, backbone):
    def replayed(captured):
        def step(batch, number, rate):
            captured.trainer.seed(number)
            captured.rate.fill_(rate)
            captured.take(*captured.trainer.here(batch))

        return step

    (plain, sums, state), (ours, our_sums, our_state) = take_both(
        photos, monkeypatch, replayed, backbone_lr=backbone
    )
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(our_sums, sums)
    torch.testing.assert_close(our_state, state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["exact", "galerkin", "gradient-filter"])
def test_replayed_graphs_do_what_steps_do(photos, monkeypatch, method):
    options = {"device": "cuda", "method": method, "model": "still"}
    (plain, sums, _), (ours, our_sums, _) = take_both(
        photos, monkeypatch, lambda captured: captured.step, **options
    )
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_sums, sums)


@pytest.mark.parametrize(
    ("method", "same"),
    [
        (Exact(), True),
        (GalerkinFilter(grid=7), True),
        (Int8(GalerkinFilter(grid=7)), True),
        (Hosvd(energy=0.8), False),
        (Int8(Svd(energy=0.8)), False),
        (SubspaceIteration(rank=2), False),
    ],
    ids=repr,
)
def test_methods_that_do_the_same_for_every_batch(method, same):
    assert capture.same_for_all(method) == same


def test_what_cannot_be_recorded_says_why(photos):
    one, data = trainer(photos, capture=True)
    with pytest.raises(ValueError, match="needs a GPU, not cpu"):
        next(one.steps(data.train, range(1), 1))
    one.device = torch.device("cuda")
    assert capture.refusal(one) is None
    one, _ = trainer(photos, method="hosvd")
    one.device = torch.device("cuda")
    assert "Hosvd" in capture.refusal(one)
    one, _ = trainer(photos, norm="batch")
    one.device = torch.device("cuda")
    assert "statistics" in capture.refusal(one)


def test_resident_pictures_are_those_of_the_loader(photos):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from resident import Resident

    one, data = trainer(photos, batch=4)
    shown = Resident(one, data.train, data.test, epochs=2)
    for number, ((images,), targets) in enumerate(batches(one, data, 14)):
        (seen,), found = shown.batch(number, one.batch)
        assert torch.equal(seen, images) and torch.equal(found, targets)
    order = InTurn(len(data.test), one.batch, one.world)
    tests = loader(one.changed(data.test, False), order, one.world, 0)
    for ((images,), targets), ((seen,), found) in zip(tests, shown.tests(one.batch), strict=True):
        assert torch.equal(seen, images) and torch.equal(found, targets)

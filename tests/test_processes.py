"""Several processes train as one with all their pictures."""

import signal

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("rich")

import tiny  # noqa: E402

from gradfilter.recipes.loading import InTurn, Shuffled  # noqa: E402
from gradfilter.recipes.parallel import World, world  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("tiny_networks")


def test_processes_share_every_batch():
    whole = list(Shuffled(9, 4, 0, range(6), World(CPU)))
    shares = [list(Shuffled(9, 4, 0, range(6), World(CPU, rank, 2))) for rank in (0, 1)]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert batch[0::2] == first and batch[1::2] == second
    assert shares[1][2] == []  # the last batch of an epoch has one picture
    tested = [list(InTurn(9, 4, World(CPU, rank, 2))) for rank in (0, 1)]
    assert len(tested[0]) == len(tested[1]) == 3
    assert sorted(sum(tested[0] + tested[1], [])) == [(0, i) for i in range(9)]


@pytest.mark.parametrize("kind, each", [("photos", 9), ("scenes", 7)])
def test_two_processes_equal_one_with_the_double_batch(kind, each, request, tmp_path):
    """The last batch is short, and the masks of the scenes have unequal numbers of pixels."""
    data = request.getfixturevalue(kind)
    options = {"model": "still", "epochs": 4}
    one = tiny.go(data, tmp_path / "one", batch=6, **options)
    share = lambda rank: tiny.go(data, tmp_path / "two", batch=3, **options)  # noqa: E731
    assert tiny.forked(share, processes=2) == [0, 0]
    a, b = (tiny.weights(tmp_path / name) for name in ("one", "two"))
    start = torch.load(tmp_path / "one" / "last.pt", weights_only=True)
    assert start["step"] == len(range(0, 3 * each if kind == "photos" else each, 6)) * 4
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    rows = torch.load(tmp_path / "two" / "last.pt", weights_only=True)["rows"]
    for row, other in zip(one.rows, rows, strict=True):
        assert row["test_loss"] == pytest.approx(other["test_loss"], rel=1e-4)
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4, nan_ok=True)
    with pytest.raises(ValueError, match="this run has 2 processes, and now there are 1"):
        tiny.go_on(tmp_path / "two")


def test_gradients_that_only_some_processes_have(tmp_path):
    def share(rank):
        with world("cpu") as here:
            one, two, none = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
            two.grad = torch.full((2,), 1.0 + rank)
            if rank == 0:
                one.grad = torch.full((2,), 5.0)
            here.sum_gradients([one, two, none])
            torch.save([one.grad, two.grad, none.grad], tmp_path / f"{rank}.pt")

    assert tiny.forked(share, processes=2) == [0, 0]
    for rank in (0, 1):
        one, two, none = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert one.tolist() == [5, 5] and two.tolist() == [3, 3] and none is None


def test_two_processes_resume_to_the_same_bits(photos, tmp_path):
    options = {"method": "asi", "rank": 2, "save_every": 0.0, "batch": 3}
    share = lambda rank: tiny.go(photos, tmp_path / "whole", **options)  # noqa: E731
    assert tiny.forked(share, processes=2) == [0, 0]

    def die(rank):
        tiny.arm("step", 8)
        tiny.go(photos, tmp_path / "killed", **options)

    assert tiny.forked(die, processes=2) == [-signal.SIGKILL] * 2
    assert tiny.forked(lambda rank: tiny.go_on(tmp_path / "killed"), processes=2) == [0, 0]
    assert tiny.same(*(tiny.weights(tmp_path / name) for name in ("whole", "killed")))


@pytest.mark.slow
def test_torchrun(photos, tmp_path):
    common = ["--data", photos, "--model", "still", "--epochs", 2, "--no-tensorboard"]
    line = ["train", *common, "--no-compare"]
    done = tiny.run(*line, "--batch", 3, "--out", tmp_path / "two", processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("before training") == 1  # only one process speaks
    tiny.go(photos, tmp_path / "one", model="still", epochs=2, lr=0.05)
    for a, b in zip(*(tiny.weights(tmp_path / n).values() for n in ("one", "two")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

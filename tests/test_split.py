"""Parts of a data set: disjoint, complete, reproducible, and as unlike as asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradfilter.recipes.split import SPLITS, dirichlet, iid, shards

TEN = torch.arange(10).repeat(100)  # 100 pictures of each of 10 classes, mixed


def classes_in(part, labels=TEN):
    return len(labels[part].unique())


@pytest.mark.parametrize("name", SPLITS)
@settings(deadline=None, max_examples=40)
@given(
    labels=st.lists(st.integers(0, 6), min_size=20, max_size=60),
    parts=st.integers(1, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_are_disjoint_and_cover_everything(name, labels, parts, seed):
    cut = SPLITS[name](torch.tensor(labels), parts, seed=seed)
    assert len(cut) == parts and all(len(part) for part in cut)
    assert torch.cat(cut).sort().values.tolist() == list(range(len(labels)))
    for part in cut:
        assert part.dtype == torch.int64 and part.tolist() == sorted(part.tolist())


@pytest.mark.parametrize("name", SPLITS)
def test_equal_seeds_give_equal_parts(name):
    def cut(seed):
        return [part.tolist() for part in SPLITS[name](TEN, 4, seed=seed)]

    torch.manual_seed(5)
    first = cut(3)
    torch.manual_seed(6)
    assert cut(3) == first and cut(4) != first


def test_the_streams_stay_as_they_are():
    """A run that is taken up again with another NumPy must find its part unchanged."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    assert [p.tolist() for p in iid(labels, 2, seed=1)] == [[1, 2, 6, 7], [0, 3, 4, 5]]
    assert [p.tolist() for p in shards(labels, 2, seed=1)] == [[3, 5, 6, 7], [0, 1, 2, 4]]
    assert [p.tolist() for p in dirichlet(labels, 2, seed=1)] == [[3, 4, 5, 6], [0, 1, 2, 7]]


def test_iid_parts_are_alike():
    for part in iid(TEN, 4, seed=0):
        assert len(part) == 250 and classes_in(part) == 10
        assert TEN[part].bincount().min() > 10


def test_shards_hold_few_classes():
    cut = shards(TEN, 5, seed=0)  # ten shards, each exactly one class
    assert [len(part) for part in cut] == [200] * 5
    assert all(classes_in(part) == 2 for part in cut)
    assert all(classes_in(part) == 1 for part in shards(TEN, 10, seed=0, per_part=1))
    assert all(classes_in(part) > 5 for part in shards(TEN, 2, seed=0, per_part=20))


def test_two_halves_have_few_classes_in_common():
    for seed in range(5):
        first, second = (set(TEN[part].tolist()) for part in shards(TEN, 2, seed=seed))
        assert len(first & second) <= 2 and len(first | second) == 10


def test_shards_mix_the_pictures_of_a_class():
    labels = torch.zeros(100, dtype=torch.int64)
    first = shards(labels, 2, seed=0, per_part=1)[0]
    assert (first < 50).sum() not in (0, 50)


def test_alpha_sets_how_unlike_dirichlet_parts_are():
    def spread(alpha):
        """Share of the largest part in a class, on average over classes and seeds."""
        cuts = [dirichlet(TEN, 5, seed=seed, alpha=alpha) for seed in range(20)]
        tables = [torch.stack([TEN[p].bincount(minlength=10) for p in cut]) for cut in cuts]
        return torch.stack(tables).amax(1).double().mean().item() / 100

    assert spread(1e-4) > 0.97  # such gamma variates underflow when drawn plainly
    assert spread(1000) < 0.25
    # The mean largest of five shares at alpha 1 is (1 + 1/2 + 1/3 + 1/4 + 1/5) / 5.
    assert spread(1) == pytest.approx(0.457, abs=0.03)


def test_a_part_that_got_nothing_takes_a_picture():
    labels = torch.zeros(12, dtype=torch.int64)
    sizes = sorted(len(part) for part in dirichlet(labels, 6, seed=0, alpha=1e-3))
    assert sizes == [1, 1, 1, 1, 1, 7]


@pytest.mark.parametrize("name", SPLITS)
def test_impossible_parts_are_refused(name):
    with pytest.raises(ValueError, match="3 pictures are too few"):
        SPLITS[name](torch.tensor([0, 1, 2]), 4, seed=0)
    with pytest.raises(ValueError, match="1 part or more"):
        SPLITS[name](TEN, 0, seed=0)


def test_senseless_knobs_are_refused():
    with pytest.raises(ValueError, match="alpha"):
        dirichlet(TEN, 2, seed=0, alpha=0)
    with pytest.raises(ValueError, match="per_part"):
        shards(TEN, 2, seed=0, per_part=0)
    with pytest.raises(ValueError, match="at least 2000 pictures in 200 shards per part"):
        shards(TEN, 10, seed=0, per_part=200)

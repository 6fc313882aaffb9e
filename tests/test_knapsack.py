"""The optimiser against trying everything, on drawn instances."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradfilter.planning import knapsack
from gradfilter.planning.knapsack import Move, Option, solve

amounts = st.integers(0, 12)


@st.composite
def instances(draw, budgets=None):
    """A few layers with a few options each, in a few states, and budgets they may not all fit."""
    states, count = draw(st.integers(1, 3)), budgets or draw(st.integers(1, 2))
    move = st.none() | st.builds(
        Move,
        st.tuples(*[amounts] * count),
        st.integers(0, 9).map(float),
        st.integers(0, states - 1),
    )
    moves = st.tuples(*[move] * states)
    layers = draw(st.lists(st.lists(moves, min_size=1, max_size=3), min_size=1, max_size=5))
    named = [[Option((i, k), m) for k, m in enumerate(o)] for i, o in enumerate(layers)]
    return named, draw(st.tuples(*[st.integers(0, 40)] * count))


def tried(layers, budget):
    """The best value and its least costs, by all choices for all numbers of layers."""
    best = None
    for depth in range(1, len(layers) + 1):
        for options in itertools.product(*layers[:depth]):
            found = followed(options, len(budget))
            if found is None or any(c > b for c, b in zip(found[1], budget, strict=True)):
                continue
            rank = (-found[0], *found[1])
            best = rank if best is None else min(best, rank)
    return best


def followed(options, budgets):
    """Value and costs of a choice; None where a state does not allow it."""
    state, value, costs = 0, 0.0, [0] * budgets
    for option in options:
        move = option.moves[state]
        if move is None:
            return None
        value += move.value
        costs = [a + b for a, b in zip(costs, move.cost, strict=True)]
        state = move.then
    return value, costs


@settings(max_examples=300, deadline=None)
@given(instances())
def test_it_finds_what_trying_everything_finds(instance):
    layers, budget = instance
    found, best = solve(layers, budget), tried(layers, budget)
    if best is None:
        assert found is None
        return
    assert (-found.value, *found.cost) == best
    value, costs = followed(found.options, len(budget))
    assert value == found.value and tuple(costs) == found.cost
    assert [o.key[0] for o in found.options] == list(range(len(found.options)))


@settings(max_examples=150, deadline=None)
@given(instances(), st.integers(0, 10), st.integers(0, 10))
def test_a_larger_budget_is_never_worth_less(instance, more, other):
    layers, budget = instance
    larger = tuple(b + m for b, m in zip(budget, (more, other), strict=False))
    small, large = solve(layers, budget), solve(layers, larger)
    assert small is None or large.value >= small.value


@settings(max_examples=150, deadline=None)
@given(instances(budgets=1))
def test_the_frontier_is_the_answer_to_every_smaller_budget(instance):
    layers, budget = instance
    found = solve(layers, budget)
    if found is None:
        return
    for smaller in range(budget[0] + 1):
        best = tried(layers, (smaller,))
        within = [value for cost, value in found.frontier if cost <= smaller]
        assert (best is None and not within) or max(within) == -best[0]


def random_layers(count, options, budgets, seed=0):
    draw = np.random.default_rng(seed)
    return [
        [
            Option(k, (Move(tuple(draw.uniform(0, 1, budgets)), float(draw.uniform(0, 1)), 0),))
            for k in range(options)
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize(("budgets", "limit"), [(1, "LIMIT_ONE"), (2, "LIMIT_TWO")])
def test_what_is_thinned_out_costs_little(monkeypatch, budgets, limit):
    layers, budget = random_layers(12, 3, budgets), (4.0,) * budgets
    monkeypatch.setattr(knapsack, limit, 10**6)
    exact = solve(layers, budget)
    monkeypatch.setattr(knapsack, limit, 400)
    thin = solve(layers, budget)
    assert all(c <= b for c, b in zip(thin.cost, budget, strict=True))
    assert 0.97 * exact.value <= thin.value <= exact.value


def test_by_hand():
    keep = Option("keep", (Move((1.0,), 0.0, 0), Move((1.0,), 0.0, 1)))
    fine = Option("fine", (Move((6.0,), 5.0, 0), None))  # not behind a coarse one
    coarse = Option("coarse", (Move((2.0,), 3.0, 1), Move((2.0,), 3.0, 1)))
    layers = [[fine, coarse], [fine, coarse, keep], [fine, coarse, keep]]
    assert [o.key for o in solve(layers, (10.0,)).options] == ["fine", "coarse", "coarse"]
    assert [o.key for o in solve(layers, (7.0,)).options] == ["coarse", "coarse", "coarse"]
    assert [o.key for o in solve(layers, (3.0,)).options] == ["coarse"]
    assert solve(layers, (1.0,)) is None

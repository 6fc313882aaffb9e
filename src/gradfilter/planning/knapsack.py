"""The most valuable choice of one option per layer within one or two budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Partial choices kept for a layer and state. Up to so many the optimum is exact; beyond, the
# budgets are cut into about so many cells, of which each keeps its most valuable choice.
LIMIT_ONE, LIMIT_TWO = 4000, 900


class Move(NamedTuple):
    """What an option does in one state: takes of each budget, is worth, and leads to a state."""

    cost: tuple[float, ...]
    value: float
    then: int


@dataclass(frozen=True)
class Option:
    """One thing that can be done with a layer.

    Choices go through a few states, from state 0 on: `moves[s]` is what the option does in state
    s, None where it is not allowed there.
    """

    key: object
    moves: tuple[Move | None, ...]


@dataclass(frozen=True)
class Solution:
    """An option for each of the first layers; the layers after them are left out.

    `frontier` has, by increasing cost in the first budget, the best value for that cost or less.
    """

    options: list[Option]
    value: float
    cost: tuple[float, ...]
    frontier: list[tuple[float, float]]


class _Labels:
    """Partial choices that end in one state: costs [n, budgets], values [n], and how they began."""

    def __init__(self, cost, value, parent, option):
        self.cost, self.value, self.parent, self.option = cost, value, parent, option

    def __len__(self) -> int:
        return len(self.value)

    def only(self, index) -> _Labels:
        parts = (self.cost, self.value, self.parent, self.option)
        return _Labels(*(part[index] for part in parts))


def solve(layers: list[list[Option]], budget: tuple[float, ...]) -> Solution | None:
    """The options of the first k layers, for the best k >= 1, with the highest sum of values.

    No sum of costs exceeds the budget. Dynamic programming, layer by layer: of the choices that
    end in one state those are kept that no other beats in value at no more cost. None where not
    even the first layer fits. Of equal values the cheaper one is taken, in the order of the
    budgets.
    """
    states = len(layers[0][0].moves)
    nothing = np.zeros((1, len(budget))), np.zeros(1), np.zeros((1, 2), int), np.zeros(1, int)
    stage: list[_Labels | None] = [_Labels(*nothing), *[None] * (states - 1)]
    history = [stage]
    for options in layers:
        stage = [_pruned(parts, budget) for parts in _extended(stage, options, budget, states)]
        history.append(stage)
    return _best(layers, history)


def _extended(stage, options: list[Option], budget, states: int) -> list[list[_Labels]]:
    """Every choice so far with every option added to it, by the state it ends in."""
    found: list[list[_Labels]] = [[] for _ in range(states)]
    for s, labels in enumerate(stage):
        for k, option in enumerate(options if labels is not None else []):
            move = option.moves[s]
            if move is None:
                continue
            cost = labels.cost + np.asarray(move.cost, float)
            fits = np.flatnonzero((cost <= np.asarray(budget)).all(1))
            if len(fits):
                parent = np.column_stack([np.full(len(fits), s), fits])
                value = labels.value[fits] + move.value
                new = _Labels(cost[fits], value, parent, np.full(len(fits), k))
                found[move.then].append(new)
    return found


def _pruned(parts: list[_Labels], budget) -> _Labels | None:
    """One list of labels, without those that another one beats."""
    if not parts:
        return None
    names = ("cost", "value", "parent", "option")
    labels = _Labels(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))
    one = labels.cost.shape[1] == 1
    if one:
        labels = labels.only(_unbeaten_one(labels))
    limit = LIMIT_ONE if one else LIMIT_TWO
    if len(labels) > limit:
        labels = labels.only(_best_of_cells(labels, budget, limit))
    return labels if one else labels.only(_unbeaten_two(labels))


def _unbeaten_one(labels: _Labels) -> np.ndarray:
    """With one budget: by increasing cost, each worth more than all before."""
    order = np.lexsort((-labels.value, labels.cost[:, 0]))
    value = labels.value[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(value)[:-1]])
    return order[value > before]


def _unbeaten_two(labels: _Labels) -> np.ndarray:
    """With two budgets: those that none beats which takes no more of both and is worth as much."""
    order = np.lexsort((-labels.value, labels.cost[:, 1], labels.cost[:, 0]))
    second, value = labels.cost[order, 1], labels.value[order]
    beaten = (second[:, None] <= second) & (value[:, None] >= value)  # row beats column
    return order[~np.triu(beaten, 1).any(0)]


def _best_of_cells(labels: _Labels, budget, limit: int) -> np.ndarray:
    """The most valuable label of each cell of the budgets."""
    sides = limit if len(budget) == 1 else int(limit**0.5)
    scale = [sides / b if b > 0 else 0.0 for b in budget]
    cells = np.minimum((labels.cost * scale).astype(int), sides - 1)
    number = cells @ (sides ** np.arange(len(budget)))
    order = np.lexsort((*labels.cost.T[::-1], -labels.value, number))
    first = np.concatenate([[True], np.diff(number[order]) > 0])
    return order[first]


def _best(layers: list[list[Option]], history) -> Solution | None:
    """Follow the best label back to its options."""
    places = [
        (depth, s)
        for depth, stage in enumerate(history)
        for s, labels in enumerate(stage)
        if depth and labels is not None
    ]
    if not places:
        return None
    every = [history[depth][s] for depth, s in places]
    cost, value = (np.concatenate([getattr(e, name) for e in every]) for name in ("cost", "value"))
    owner = np.repeat(np.arange(len(every)), [len(e) for e in every])
    index = np.concatenate([np.arange(len(e)) for e in every])
    best = np.lexsort((*cost.T[::-1], -value))[0]
    (depth, s), i = places[owner[best]], index[best]
    options = []
    for d in range(depth, 0, -1):
        labels = history[d][s]
        options.append(layers[d - 1][labels.option[i]])
        s, i = labels.parent[i]
    spent = tuple(cost[best].tolist())
    return Solution(options[::-1], float(value[best]), spent, _frontier(cost[:, 0], value))


def _frontier(cost: np.ndarray, value: np.ndarray) -> list[tuple[float, float]]:
    labels = _Labels(cost[:, None], value, value, value)
    return [(float(cost[i]), float(value[i])) for i in _unbeaten_one(labels)]

"""The options of every layer within a budget, and the best choice among them."""

from __future__ import annotations

from typing import NamedTuple

from gradfilter.methods import Exact, Method
from gradfilter.planning.amounts import TOLD
from gradfilter.planning.chain import Chain
from gradfilter.planning.knapsack import Move, Option, Solution, solve
from gradfilter.planning.prices import Prices
from gradfilter.planning.worth import Likeness, Worth

Key = tuple[int, Method, bool]  # link, method, whether it is trained
Limits = dict[str, float]  # "memory" in bytes, "time" in seconds: those that are given


class State(NamedTuple):
    """What the layers behind mean for the next one, on the way from the output to the input.

    `rank` is that of the coarsest method so far. `reader` is the method of the layer that reads the
    next one's output, where that is trained: what it keeps, an activation before it need not keep
    again. `shared` says that a layer behind keeps an input which one further on reads too.
    """

    rank: int
    reader: Method | None
    shared: bool


class Search:
    """What can be done with every layer, what it takes and what it is worth.

    No layer further back gets a finer method than one behind it: it could not restore what was
    filtered off, and every change of method ends a region of the engine. Where only exact
    gradients can be had, they may come anywhere.
    """

    def __init__(
        self,
        chain: Chain,
        worths: Worth,
        costs: Prices,
        limits: Limits,
        fidelity: float | None,
        copies: int,
        gaps: bool = False,
    ):
        self.chain, self.worths, self.costs, self.limits = chain, worths, costs, limits
        self.fidelity, self.copies, self.gaps = fidelity or 0.0, copies, gaps
        self.last = len(chain.links) - 1
        self.open = self._open()
        coarse = [m for m in worths.likeness if not passes_exactly(m)]
        # rank 0 is that of methods that pass the gradient on exactly, then from fine to coarse
        self.ranks = {m: 0 for m in worths.likeness} | {
            m: k for k, m in enumerate(sorted(coarse, key=worths.total, reverse=True), start=1)
        }
        self.coarsest = [None, *(m for m, rank in self.ranks.items() if rank)]
        self.coarsest.sort(key=lambda m: self.ranks.get(m, 0))
        self.states = [
            State(rank, reader, shared)
            for rank, coarsest in enumerate(self.coarsest)
            for reader in dict.fromkeys([None, Exact(), coarsest])
            for shared in (False, True)
        ]
        self.number = {state: n for n, state in enumerate(self.states)}
        self.layers = [self._options(i) for i in range(self.last, -1, -1)]

    def _options(self, i: int) -> list[Option]:
        link = self.chain.links[i]
        keys = [(i, m, True) for m in link.methods if link.trainable]
        if i != self.last and (self.gaps or not link.trainable):
            passing = [m for m in link.methods if self.ranks[m]]
            keys += [(i, m, False) for m in (*passing, Exact())]
        return [Option(key, tuple(self._move(key, state) for state in self.states)) for key in keys]

    def _move(self, key: Key, state: State) -> Move | None:
        """What an option does in a state; None where it is not allowed."""
        i, method, trained = key
        rank = self.ranks[method]
        if rank < state.rank and any(self.ranks[m] for m in self.chain.links[i].methods):
            return None
        value = 0.0
        if trained:
            likeness = self.expected(i, method, state)
            if likeness.cosine < self.fidelity and i != self.last:
                return None
            value = self.worths.value(i, likeness)
        taken = {"memory": self.held(key, state), "time": self.seconds(key)}
        then = self.number[self._after(key, state)]
        return Move(tuple(taken[name] for name in self.limits), value, then)

    def _after(self, key: Key, state: State) -> State:
        i, method, trained = key
        link, rank = self.chain.links[i], max(self.ranks[method], state.rank)
        reader, shared = state.reader, state.shared
        if rank > state.rank:  # another region
            reader, shared = (Exact() if reader == Exact() else None), False
        tells = trained and method in (Exact(), self.coarsest[rank])
        if link.reads == i:
            return State(rank, method if tells else None, shared and self.open[i] != i)
        return State(rank, reader, tells or (shared and self.open[i] == link.reads))

    def _open(self) -> list[int | None]:
        """For each link the input that the nearest branch behind it reads, where that is earlier.

        Of branches within branches the outer one is forgotten: its input counts twice.
        """
        found: list[int | None] = []
        now = None
        for i in range(self.last, -1, -1):
            found.append(now)
            reads = self.chain.links[i].reads
            now = reads if reads < i else None if now == i else now
        return found[::-1]

    def held(self, key: Key, state: State) -> int:
        """Bytes that a link takes."""
        i, method, trained = key
        link, price = self.chain.links[i], self.costs.of[method][i]
        # between layers that pass the gradient on exactly, maps are dense, whatever the method
        teller = method if self.ranks[method] else Exact()
        passing = price.told if state.reader == teller else price.untold
        if not trained:
            return passing
        here = state.shared and self.open[i] == link.reads
        kept = here and self.ranks[method] == state.rank and method == teller
        return passing + (0 if kept else price.input) + self.copies * link.bytes

    def seconds(self, key: Key) -> float:
        """Seconds that a link adds to a step."""
        i, method, trained = key
        price = self.costs.of[method][i]
        return price.seconds if trained else price.seconds_frozen

    def expected(self, i: int, method: Method, state: State) -> Likeness:
        """What to expect of a layer's gradient.

        Each was measured with one method on all layers, and so with errors that add up from the
        output to the layer. A mixed plan is taken to be as good as the worse of two of those: of
        the layer's own method, and of the coarsest behind it.
        """
        coarsest = self.coarsest[state.rank] or method
        both = [self.worths.likeness[m][i] for m in (method, coarsest)]
        return min(both, key=lambda likeness: likeness.gain)

    def walk(self, solution: Solution) -> list[tuple[Key, State]]:
        """The options of a solution, each with the state it was taken in."""
        found, number = [], 0
        for option in solution.options:
            found.append((option.key, self.states[number]))
            number = option.moves[number].then
        return found

    def solve(self, limits: Limits) -> Solution | None:
        """The best choice within these limits, or None where nothing fits."""
        left = tuple(limits[name] - self.base[name] for name in limits)
        return None if min(left) < 0 else solve(self.layers, left)

    @property
    def base(self) -> Limits:
        """What is taken before any layer is chosen."""
        return {"memory": 0.0, "time": self.costs.base}

    def smallest(self) -> Limits:
        """The least of each budget that trains the output layer."""
        return {
            name: self.base[name] + min(o.moves[0].cost[k] for o in self.layers[0])
            for k, name in enumerate(self.limits)
        }

    def alone(self, factors: Limits) -> str:
        """What to say of a plan that trains the output layer alone: what would train another.

        `factors` are those by which plans miss their predictions.
        """
        head = f"only the output layer {self.chain.links[-1].name!r} is trained"
        found = [self._enough([name]) for name in self.limits]
        found += [] if any(found) else [self._enough(list(self.limits))]
        told = [
            " and ".join(f"a {n} budget of {TOLD[n](v * factors[n])}" for n, v in enough.items())
            for enough in found
            if enough
        ]
        if not told:
            return f"{head}: no other layer would gain anything, whatever the budget"
        return f"{head}, no other layer fits: the next one needs {', or '.join(told)}"

    def _enough(self, names: list[str]) -> Limits:
        """The least of these budgets, the others as they are, that trains another layer too.

        Both grow in proportion, where there are two; empty where no amount is enough.
        """
        low, high = 0.0, 2.0
        while not self._trains_more(self._scaled(names, high)):
            if all(self._scaled(names, high)[name] > self._most[name] for name in names):
                return {}
            low, high = high, 2 * high
        while high > 1.001 * low:
            middle = (low + high) / 2
            enough = self._trains_more(self._scaled(names, middle))
            low, high = (low, middle) if enough else (middle, high)
        return {name: self._scaled(names, high)[name] for name in names}

    def _scaled(self, names: list[str], by: float) -> Limits:
        return {k: v * by if k in names else v for k, v in self.limits.items()}

    @property
    def _most(self) -> Limits:
        """More than any plan takes."""
        moves = [[m.cost for o in options for m in o.moves if m] for options in self.layers]
        return {
            # a layer below the least fidelity has no move
            name: self.base[name] + sum(max((c[k] for c in costs), default=0.0) for costs in moves)
            for k, name in enumerate(self.limits)
        }

    def _trains_more(self, limits: Limits) -> bool:
        solution = self.solve(limits)
        return solution is not None and trained_links(solution) > {self.last}

    def refusal(self) -> str:
        """One line that says which budget is impossible, and the smallest possible one."""
        parts = [
            f"a {name} budget of {TOLD[name](self.limits[name])} is impossible: the smallest "
            f"possible is {TOLD[name](least)}"
            for name, least in self.smallest().items()
            if self.limits[name] < least
        ]
        head = self.chain.links[-1].name
        if not parts:
            both = " and ".join(f"a {n} budget of {TOLD[n](v)}" for n, v in self.limits.items())
            return (
                f"plan: {both} are impossible together: no method for the output layer {head!r} "
                f"keeps to both; the smallest possible are {self._corners()}"
            )
        return f"plan: {'; '.join(parts)}, which trains the output layer {head!r} alone"

    def _corners(self) -> str:
        """What each method of the output layer takes, those that another beats left out."""
        least: list[tuple[float, ...]] = []
        for cost in sorted({o.moves[0].cost for o in self.layers[0]}):
            if not least or cost[1] < least[-1][1]:
                least.append(cost)
        return ", or ".join(
            " with ".join(TOLD[n](self.base[n] + v) for n, v in zip(self.limits, c, strict=True))
            for c in least
        )


def trained_links(solution: Solution) -> set[int]:
    """The links that a solution trains."""
    return {i for i, _, trains in (option.key for option in solution.options) if trains}


def passes_exactly(method: Method) -> bool:
    """Whether a method hands back the exact gradient of a layer's input."""
    kind = type(method)
    return kind.filter is Method.filter and kind.grad_input is Method.grad_input

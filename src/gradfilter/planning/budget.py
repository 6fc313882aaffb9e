"""The best plan within a budget: which layers to train, and with which method each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradfilter import trial
from gradfilter.methods import Exact, GalerkinFilter, GradientFilter, Hosvd, Method
from gradfilter.planning.amounts import Amount, bytes_of, seconds_of
from gradfilter.planning.chain import Chain, sized
from gradfilter.planning.choice import Attempt, Choice
from gradfilter.planning.knapsack import Solution
from gradfilter.planning.outcome import Outcome
from gradfilter.planning.prices import prices
from gradfilter.planning.search import Limits, Search, trained_links
from gradfilter.planning.worth import own_labels, worth
from gradfilter.trial import Target

METHODS = (
    Exact(),
    GalerkinFilter(grid=14),
    GalerkinFilter(grid=7),
    GalerkinFilter(grid=4),
    GalerkinFilter(grid=2),
    GradientFilter(patch=2),
    Hosvd(energy=0.8),
)
ATTEMPTS = 4  # plans measured at most; the last is handed out as it is
MARGIN = 0.98  # of the budget, once a plan has broken it
ENOUGH = 0.75  # of what a plan with gaps promises, for one without to be preferred
WOKEN = "the output layer was all 0, which hands back no gradient: it was drawn at random"

Tell = Callable[[str], None]


def plan(
    model: nn.Module,
    example,
    *,
    target: Target = None,
    memory: Amount | None = None,
    time: Amount | None = None,
    fidelity: float | None = None,
    batch: int | None = None,
    methods: Sequence[Method] | None = None,
    copies: int = 2,
    gaps: bool | None = None,
    tell: Tell | None = None,
) -> Choice:
    """The plan that promises most learning within a budget; `convert` takes it, `save` writes it.

    Trained are the last layers in the order of execution, as many as pay, each by one of `methods`;
    with `gaps` some between may be frozen, where their parameters cost more than they promise.
    Such plans have learned less than they promise, so by default there are gaps only where a plan
    without any promises much less. The output layer is always trained. Batch-norm statistics are
    fixed.

    **Memory** (bytes, or "64MB"; a MB is 2**20 bytes) is what training holds beyond the weights
    and beyond what inference needs: the bytes kept from forward to backward, and for every trained
    parameter `copies` tensors of its size (2: gradient and momentum; 3 for Adam; 0 to bound kept
    bytes alone). These can be predicted and measured to the byte. The working maps of a forward
    pass come on top, whatever is trained; the choice reports the measured peak of a step and of
    inference. **Time** (seconds, or "200ms") is that of a whole step: processor time where one
    thread does the work, else wall time. It is predicted from a short measurement.

    **Expected learning** is the sum over trained layers of |e|^2 - |a - e|^2: the energy of the
    layer's exact weight gradient e on this batch, less that of the approximate one's error. Errors
    add up as a gradient goes back, so a layer's is the worse one of two that were measured with one
    method on all layers: its own method's, and that of the coarsest method that any layer behind it
    has. `fidelity` is the least cosine with which a layer may be trained.

    `target` is as in `gradfilter.fidelity`; without it classes are drawn from the model's own
    output. `batch` is the number of pictures in a step, where it is not that of the example.

    The plan is then measured; where it breaks the budget, the predictions are corrected by what
    was measured and the best plan is sought again, a few times at most. Should the last be over the
    budget too, its `over` says by how much. An impossible budget is refused with the smallest one.
    What was measured is what `convert(model, plan, example=x)` has: without an example no engine
    runs the layers on the grid, and a step holds more, often several times as much.
    """
    limits = _limits(memory, time, fidelity)
    options = {"target": target, "batch": batch, "methods": methods, "copies": copies}
    survey = Survey(model, example, timed=time is not None, tell=tell, **options)
    return survey.plan(limits.get("memory"), limits.get("time"), fidelity, gaps)


class Survey:
    """All that was measured of a model for plans, of which `plan` makes one for each budget.

    For several budgets of one model, where `gradfilter.plan` would measure everything again; with
    `timed` for budgets of time. The arguments are those of `gradfilter.plan`.
    """

    def __init__(
        self,
        model: nn.Module,
        example,
        *,
        target: Target = None,
        batch: int | None = None,
        methods: Sequence[Method] | None = None,
        copies: int = 2,
        timed: bool = False,
        tell: Tell | None = None,
    ):
        candidates = _checked(batch, methods, copies)
        self.device = trial.check("plan", model, example, target)
        example, target = trial.apart(example, target)
        example = trial.mapped(example, Tensor.detach)  # pictures are not trained
        self.copies, self.tell = copies, tell or (lambda stage: None)
        with trial.same_chance(self.device):
            own = trial.exact_copy(model).eval()  # or batch norms would move their statistics
            with torch.no_grad():
                trial.forward("plan", own, example)
            self.notes = [WOKEN] if trial.wake_head(own) else []
            if target is None:
                target, told = own_labels(own, example)
                self.notes.append(told)
            self.batch, self.step = (example, target), _sized(example, target, batch)
            self.chain = Chain(own, example, candidates)
            if not self.chain.links[-1].trainable:
                head = self.chain.links[-1].name
                raise ValueError(f"plan: the output layer {head!r} is frozen: thaw it")
            self._measure(candidates, timed)

    def _measure(self, candidates: tuple[Method, ...], timed: bool) -> None:
        taken = [m for m in candidates if any(m in x.methods for x in self.chain.links)]
        used = list(dict.fromkeys([*taken, Exact()]))
        self.tell("gradients by every method")
        self.worths = worth(self.chain, *self.batch, used)
        self.tell("memory and time of every method" if timed else "memory of every method")
        self.costs = prices(self.chain, *self.step, used, self.device, timed)

    def plan(
        self,
        memory: Amount | None = None,
        time: Amount | None = None,
        fidelity: float | None = None,
        gaps: bool | None = None,
    ) -> Choice:
        """The best plan within this budget."""
        limits = _limits(memory, time, fidelity)
        if "time" in limits and not self.costs.base:
            raise ValueError("plan: a survey that was not timed has no plan for a time budget")
        search, notes = self._search(limits, fidelity, gaps)
        outcome = Outcome(search, self.batch, self.step, self.device)
        with trial.same_chance(self.device):
            solution, attempts = _settle(search, outcome, self.tell)
            if trained_links(solution) == {search.last} and search.last:
                notes.append(search.alone(attempts[-1].factors))
            return outcome.choice(solution, attempts, notes)

    def _search(self, limits: Limits, fidelity, gaps: bool | None) -> tuple[Search, list[str]]:
        """With gaps or without, and what to say of it."""
        options = self.chain, self.worths, self.costs, limits, fidelity, self.copies
        if gaps is not None:
            return Search(*options, gaps), list(self.notes)
        closed, open_ = Search(*options, False), Search(*options, True)
        without, best = closed.solve(limits), open_.solve(limits)
        if without is None or best is None:
            return closed, list(self.notes)
        alone = trained_links(without) == {closed.last}
        share = without.value / best.value if best.value else 1.0
        if share >= ENOUGH and not alone:
            return closed, list(self.notes)
        told = f"layers between are frozen: without that {share:.0%} is left"
        return open_, [*self.notes, *([told] if share < 1 else [])]


def _settle(search: Search, outcome: Outcome, tell: Tell) -> tuple[Solution, list[Attempt]]:
    """Solve and measure; after a plan that breaks the budget, again with corrected predictions."""
    factors, attempts, solution = dict.fromkeys(search.limits, 1.0), [], None
    for _ in range(ATTEMPTS):
        tell("the best plan")
        margin = MARGIN if attempts else 1.0
        found = search.solve({k: margin * v / factors[k] for k, v in search.limits.items()})
        if found is None:
            break
        solution = found
        tell("measuring the plan")
        attempts.append(outcome.attempt(solution, factors))
        if not attempts[-1].over(search.limits):
            return solution, attempts
        factors = {k: max(1.0, f * attempts[-1].missed(k)) for k, f in factors.items()}
    if solution is None:
        raise ValueError(search.refusal())
    return solution, attempts


def _limits(memory: Amount | None, time: Amount | None, fidelity: float | None) -> Limits:
    """What is given of a budget; refuses what is none."""
    if fidelity is not None and not 0 <= fidelity <= 1:
        raise ValueError(f"plan: fidelity is a cosine between 0 and 1, got {fidelity!r}")
    try:
        found = {} if memory is None else {"memory": bytes_of(memory)}
        found |= {} if time is None else {"time": seconds_of(time)}
    except (TypeError, ValueError) as error:
        raise type(error)(f"plan: {error}") from error
    if not found:
        raise ValueError("plan: give a budget: memory, time or both")
    return found


def _checked(batch, methods, copies) -> tuple[Method, ...]:
    """The candidates; refuses options that make no sense."""
    for name, value, least in (("batch", batch, 1), ("copies", copies, 0)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < least):
            raise ValueError(f"plan: {name} must be a whole number >= {least}, got {value!r}")
    alone = isinstance(methods, Method)
    candidates = () if alone else tuple(METHODS if methods is None else methods)
    if not candidates or not all(isinstance(m, Method) for m in candidates):
        raise TypeError(f"plan: give methods as [GalerkinFilter(grid=7)], got {methods!r}")
    return tuple(dict.fromkeys(candidates))


def _sized(example, target: Target, batch: int | None) -> tuple[object, Target]:
    """Example and target of a step with so many pictures."""
    if batch is None or batch == len(next(iter(trial.tensors(example)), ())):
        return example, target
    # a loss that is a function knows the targets of its own pictures only
    known = isinstance(target, Tensor)
    return sized(example, batch), sized(target, batch) if known else None

"""What a training step of every contender costs, and how good its gradients are, by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradfilter import kept, stopwatch, trial
from gradfilter.cost import Cost, cost
from gradfilter.fidelity import Fidelity, Match, fidelity
from gradfilter.order import call
from gradfilter.profiler import Spread
from gradfilter.recipes.datasets import Pictures
from gradfilter.recipes.trainer import Trainer
from gradfilter.stopwatch import Step

PICTURES = 8  # of a step on a CPU, where a whole batch would take long
JUDGED = 16  # pictures that gradients are compared on
REPEATS = 5
ELSEWHERE = "(elsewhere)"
INFERENCE = "inference"

Advance = Callable[[], None]


@dataclass(frozen=True)
class Layer:
    """One layer: what it costs, norms and activations up to the next layer included.

    `kept_bytes` is of its own input, `beside_bytes` of those others. `weight` and `input` say how
    good its gradients are; None where it has none, or where all of the plan is exact.
    """

    name: str
    kind: str
    method: str
    trained: bool
    forward_macs: int
    backward_macs: int
    kept_bytes: int
    beside_bytes: int
    weight: Match | None = None
    input: Match | None = None


@dataclass(frozen=True)
class Measured:
    """A step of so many pictures. `gradient` is over all weights; None where all is exact.

    Bytes are measured on the network as it runs, `peak_bytes` over the weights; multiply-adds are
    counted at the layer level.
    """

    pictures: int
    seconds: Spread
    peak_bytes: Spread | None
    kept_bytes: int
    forward_macs: int
    backward_macs: int
    layers: list[Layer]
    gradient: Match | None = None
    judged: int = 0  # pictures that gradients were compared on
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Look:
    """What is known of a contender before anything is timed."""

    counted: Cost
    held: kept.Found
    judged: Fidelity | None
    notes: list[str]


def total(contenders: int) -> int:
    """How often `measure` says that it has got on."""
    return 2 * contenders + (1 + REPEATS + stopwatch.TURNS) * (1 + contenders)


def measure(
    trainers: dict[str, Trainer], pictures: Pictures, count: int, advance: Advance
) -> tuple[dict[str, Measured], Spread]:
    """Costs of a step of `count` pictures by name, and seconds of an inference on them.

    All that is timed takes turns, so that a busy machine is as busy for one as for another. The
    networks are not for training afterwards: an output layer that is all 0 is drawn at random.
    """
    looks = {name: _look(t, pictures, count, advance) for name, t in trainers.items()}
    batches = {name: _batch(t, pictures, count) for name, t in trainers.items()}
    steps = {n: Step(t.model, *batches[n], t.device, trains=True) for n, t in trainers.items()}
    first, (x, _) = next(zip(trainers.values(), batches.values(), strict=True))
    plain = trial.exact_copy(first.model).eval()
    steps[INFERENCE] = Step(plain, x, None, first.device, trains=False)
    turns = {name: _told(step, first, advance) for name, step in steps.items()}
    times = {n: Spread.of(t["step"]) for n, t in stopwatch.in_turns(turns, REPEATS).items()}
    peaks, about = stopwatch.peaks(turns, first.device)
    found = {
        name: _measured(look, len(x), times[name], Spread.of(peaks.get(name, [])), about)
        for name, look in looks.items()
    }
    return found, times[INFERENCE]


def _told(step: Step, trainer: Trainer, advance: Advance) -> Callable[[], dict[str, float]]:
    """A step as the trainer would take it, that says when it is done."""

    def run() -> dict[str, float]:
        with trainer.autocast():
            taken = step()
        advance()
        return taken

    return run


def _batch(trainer: Trainer, pictures: Pictures, count: int) -> tuple[Tensor, Callable]:
    """Training pictures from all over, as they are tested, and the loss of an output for them."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    found = trainer.changed(pictures, False).__getitems__([(0, i) for i in order[:count].tolist()])
    if isinstance(found, Exception):
        raise found
    (images,), target = found
    trainer.task.check(target)
    target = target.to(trainer.device)

    def loss(output: Tensor) -> Tensor:
        summed, number = trainer.task.loss(output, target)
        return summed / number.clamp(min=1)

    return trainer.network.prepare(images.to(trainer.device)), loss


def _look(trainer: Trainer, pictures: Pictures, count: int, advance: Advance) -> _Look:
    """Gradients first: a warm-started method must not have seen these pictures yet."""
    torch.manual_seed(trainer.settings.seed)
    woken = trial.wake_head(trainer.model)
    judged = None
    if trainer.plan.converted:
        judged = fidelity(trainer.model, *_batch(trainer, pictures, JUDGED))
    advance()
    x, _ = _batch(trainer, pictures, count)
    counted, run = cost(trainer.model, x), trial.planned_copy(trainer.model)
    with trainer.autocast(), torch.enable_grad():
        call(run, x)  # an engine traces its program
        held = kept.measure(run, x, {r.name: r.kind for r in counted.layers})
    advance()
    notes = ["the output layer was all 0 and was drawn at random"] if woken and judged else []
    return _Look(counted, held, judged, notes + (judged.notes if judged else []))


def _measured(
    look: _Look, pictures: int, seconds: Spread, peak: Spread | None, about: list[str]
) -> Measured:
    sums, judged = look.counted.total, look.judged
    return Measured(
        pictures,
        seconds,
        peak,
        look.held.total,
        sums.forward_macs,
        sums.backward_macs,
        _layers(look),
        judged and judged.total,
        judged.pictures if judged else 0,
        look.notes + about,
    )


def _layers(look: _Look) -> list[Layer]:
    """The layers in their order; what is kept by no module that is counted comes last."""
    held = look.held.by_module()
    judged = {r.name: r for r in look.judged.layers} if look.judged else {}
    found: list[Layer] = []
    for row in look.counted.layers:
        size = held.pop(row.name, 0)
        if row.kind in kept.LAYERS:
            match = judged.get(row.name)
            gradients = (match.weight, match.input) if match else ()
            macs = row.forward_macs, row.backward_macs
            about = row.name, row.kind, row.method, row.trained
            found.append(Layer(*about, *macs, size, 0, *gradients))
        elif found:
            found[-1] = _with(found[-1], row.forward_macs, row.backward_macs, size)
        else:
            held[row.name] = size
    rest = sum(held.values())
    return [*found, *([Layer(ELSEWHERE, "other", "", True, 0, 0, 0, rest)] if rest else [])]


def _with(layer: Layer, forward: int, backward: int, size: int) -> Layer:
    """A layer with the cost of a norm or activation behind it."""
    return replace(
        layer,
        forward_macs=layer.forward_macs + forward,
        backward_macs=layer.backward_macs + backward,
        beside_bytes=layer.beside_bytes + size,
    )

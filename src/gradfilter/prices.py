"""What a layer takes of a budget, with each method: bytes kept, bytes of gradients, seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradfilter import kept, stopwatch
from gradfilter.chain import Chain, mapped
from gradfilter.convert import FrozenNorm
from gradfilter.cost import cost
from gradfilter.methods import Method
from gradfilter.order import call
from gradfilter.trial import Target

REPEATS = 4  # timed steps of each configuration, in turns; the best counts
BRACKETS = 3  # parts of the chain whose time is measured; within one it is shared out


@dataclass(frozen=True)
class Price:
    """What a link takes with a method: bytes, and seconds that it adds to a step.

    `input` is kept of a trained layer's input, for the gradient of its weight. What the gradient
    needs to pass the link, trained or not, is `told` where the layer that reads its output is
    trained and keeps that, and `untold` elsewhere: much of it is the sign of that output.
    """

    input: int
    told: int
    untold: int
    seconds: float = 0.0
    seconds_frozen: float = 0.0


@dataclass(frozen=True)
class Prices:
    """By method and link; `base` is the time of a step that trains the last link alone."""

    of: dict[Method, list[Price]]
    base: float = 0.0


def kept_bytes(chain: Chain, model: nn.Module, example) -> list[tuple[int, int, int]]:
    """Of each link: bytes of its input, told and untold (see `Price`), by two forward passes.

    In one all links are trained; in the other all are frozen, and the gradient goes to the input.
    """
    chain.train(set(range(len(chain.links))))
    of_inputs, told = _by_link(chain, model, example)
    chain.train(set())
    _, untold = _by_link(chain, model, mapped(example, _differentiable))
    # what two layers read is kept once, and was charged to one of them
    most: dict[int, int] = {}
    for link, size in zip(chain.links, of_inputs, strict=True):
        most[link.reads] = max(size, most.get(link.reads, 0))
    inputs = [most[link.reads] for link in chain.links]
    return list(zip(inputs, told, map(max, told, untold), strict=True))


def _differentiable(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(True) if x.is_floating_point() else x


def _by_link(chain: Chain, model: nn.Module, example) -> tuple[list[int], list[int]]:
    """What layers keep of their inputs, and what else is kept, by link."""
    kinds = {x.name: x.kind for x in chain.links}
    with torch.enable_grad():
        call(model.train(), chain.one)  # an engine makes its program now
    inputs, others = ([0.0] * len(chain.links) for _ in range(2))
    for row in kept.measure(model, example, kinds).rows:
        for i, share in _shares(chain, row):
            (inputs if row.kind in kept.LAYERS else others)[i] += share * row.bytes
    return [round(s) for s in inputs], [round(s) for s in others]


def _shares(chain: Chain, row: kept.Kept) -> list[tuple[int, float]]:
    """The links a row is charged to, with the share of each.

    What a module with layers inside keeps itself is charged to the last of them; but the folded
    batch norms of a region to theirs, by channels.
    """
    inside = chain.inside(row.name)
    if not inside or row.kind in kept.LAYERS:
        owner = chain.owner[row.name]
        return [] if owner is None else [(owner, 1.0)]
    channels = {i: _channels(chain, i) for i in inside} if row.kind == "norm" else {}
    total = sum(channels.values())
    return [(i, n / total) for i, n in channels.items()] if total else [(inside[-1], 1.0)]


def _channels(chain: Chain, i: int) -> int:
    modules = (chain.exact.get_submodule(n) for n in chain.links[i].modules)
    return sum(m.num_features for m in modules if isinstance(m, FrozenNorm))


def prices(
    chain: Chain, example, target: Target, methods: list[Method], device: torch.device, timed: bool
) -> Prices:
    """Measure what every link takes with every method; seconds only where `timed`."""
    models = {m: chain.uniform(m) for m in methods}
    held = {m: kept_bytes(chain, model, example) for m, model in models.items()}
    if not timed:
        return Prices({m: [Price(*bytes) for bytes in held[m]] for m in methods})
    taken, base = seconds(chain, models, example, target, device)
    return Prices(
        {
            m: [Price(*bytes, *times) for bytes, times in zip(held[m], taken[m], strict=True)]
            for m in methods
        },
        base,
    )


def seconds(chain: Chain, models: dict[Method, nn.Module], example, target: Target, device):
    """Seconds that each link adds to a step, trained and frozen, by method; those of the last.

    Steps are timed that train the last link alone, and the last third, two thirds and all of the
    chain. What a third adds is shared out among its links, half by multiply-adds of the backward
    pass and half by the size of their outputs. Where a method makes even the frozen layers slower
    (it has no engine), that too is shared out, among all links.
    """
    count = len(chain.links)
    starts = sorted({round(k * count / BRACKETS) for k in range(BRACKETS)} - {count} | {count - 1})
    steps = {
        (m, s): _Timed(chain, model, set(range(s, count)), example, target, device)
        for m, model in models.items()
        for s in starts
    }
    times = stopwatch.in_turns(steps, REPEATS)
    best = {place: min(found["step"]) for place, found in times.items()}
    base = min(best[m, count - 1] for m in models)
    found = {}
    for m, model in models.items():
        weights, passing = _weights(chain, model, example)
        gap = best[m, count - 1] - base
        extra = [gap * w / sum(weights) for w in weights]
        for start, end in zip(starts, starts[1:], strict=False):
            part = max(0.0, best[m, start] - best[m, end])
            total = sum(weights[start:end])
            for i in range(start, end):
                extra[i] += part * weights[i] / total
        extra[-1] = 0.0  # in the base
        found[m] = [(t, t * p) for t, p in zip(extra, passing, strict=True)]
    return found, base


def _weights(chain: Chain, model: nn.Module, example) -> tuple[list[float], list[float]]:
    """How the time of several links is shared out; and the share of it that frozen ones take."""
    count = len(chain.links)
    chain.train(set(range(count)))
    rows = {r.name: r for r in cost(model, example).layers}
    chain.train(set())
    frozen = {r.name: r for r in cost(model, mapped(example, _differentiable)).layers}
    macs = [rows[x.name].backward_macs if x.name in rows else 0 for x in chain.links]
    passing = [frozen[x.name].backward_macs if x.name in rows else 0 for x in chain.links]
    sizes = _outputs(chain, example)
    weights = [
        a / max(1, sum(macs)) + b / max(1, sum(sizes)) for a, b in zip(macs, sizes, strict=True)
    ]
    shares = [p / m if m else 1.0 for p, m in zip(passing, macs, strict=True)]
    return [max(w, 1e-12) for w in weights], shares


def _outputs(chain: Chain, example) -> list[int]:
    """Elements of every link's output."""
    found = [0] * len(chain.links)

    def watch(i: int, layer: nn.Module):
        def note(module, inputs, output):
            found[i] += output.numel()

        return layer.register_forward_hook(note)

    hooks = [watch(i, chain.model.get_submodule(x.name)) for i, x in enumerate(chain.links)]
    try:
        with torch.no_grad():
            call(chain.model, example)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _Timed:
    """A step that trains some of the links."""

    def __init__(self, chain: Chain, model: nn.Module, chosen: set[int], example, target, device):
        self.chain, self.chosen = chain, chosen
        chain.train(chosen)
        self.step = stopwatch.Step(
            model.train(), example, target, device, trains=True, clock=clock(device)
        )

    def __call__(self) -> dict[str, float]:
        self.chain.train(self.chosen)
        return self.step()


def clock(device: torch.device):
    """Processor time where one thread does the work, which others on the machine disturb less."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter

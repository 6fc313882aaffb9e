"""What a layer takes of a budget, with each method: bytes kept, bytes of gradients, seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradfilter import kept, stopwatch
from gradfilter.convert import FrozenNorm
from gradfilter.cost import cost
from gradfilter.methods import Method
from gradfilter.order import call, evaluating
from gradfilter.planning.chain import Chain
from gradfilter.region.grid import takes
from gradfilter.trial import Target, mapped

REPEATS = 3  # timed steps of each configuration, in turns; the best counts
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


Bytes = list[tuple[int, int, int]]  # of each link: input, told, untold


def kept_bytes(chain: Chain, method: Method, example) -> Bytes:
    """What each link keeps with a method (see `Price`).

    Without a layer on the grid no engine runs the model, and all of it keeps something else than
    before: the anchor, which is the last layer to get another method, is charged for that.
    """
    found = _kept(chain, chain.anchored(method), example)
    if takes(method) or chain.anchor is None:
        return found
    plain = _kept(chain, chain.uniform(method), example)
    others = [i for i in range(len(found)) if i != chain.anchor]
    more = sum(plain[i][0] + plain[i][1] - found[i][0] - found[i][1] for i in others)
    own = plain[chain.anchor]
    found[chain.anchor] = own[0], own[1] + more, own[2] + more
    return found


def _kept(chain: Chain, model: nn.Module, example) -> Bytes:
    """By two forward passes: all links trained; all frozen, with the gradient to the input."""
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
    """A copy that asks for a gradient, and that a model may write into, as into no leaf."""
    return x.detach().requires_grad_(True).clone() if x.is_floating_point() else x


def _by_link(chain: Chain, model: nn.Module, example) -> tuple[list[int], list[int]]:
    """What layers keep of their inputs, and what else is kept, by link."""
    kinds = {x.name: x.kind for x in chain.links}
    with torch.enable_grad():
        call(model.train(), chain.one)  # an engine makes its program now
    inputs, others = ([0.0] * len(chain.links) for _ in range(2))
    found = kept.measure(model, example, kinds)
    for row in found.rows:
        sums = inputs if row.kind in kept.LAYERS else others
        for i, size in _shares(chain, row, found.after[row.name, row.kind]):
            sums[i] += size
    return [round(s) for s in inputs], [round(s) for s in others]


def _shares(chain: Chain, row: kept.Kept, after: dict[str, int]) -> list[tuple[int | None, float]]:
    """The links a row is charged to, with the bytes of each.

    What a module with layers inside keeps itself is charged to the layers called before it was
    saved; but the folded batch norms of a region to theirs, by channels.
    """
    inside = chain.inside(row.name)
    if not inside or row.kind in kept.LAYERS:
        owner = chain.owner[row.name]
        return [] if owner is None else [(owner, row.bytes)]
    channels = {i: _channels(chain, i) for i in inside} if row.kind == "norm" else {}
    total = sum(channels.values())
    if total:
        return [(i, row.bytes * n / total) for i, n in channels.items()]
    return [(chain.owner[layer], size) for layer, size in after.items() if layer]


def _channels(chain: Chain, i: int) -> int:
    modules = (chain.exact.get_submodule(n) for n in chain.links[i].modules)
    return sum(m.num_features for m in modules if isinstance(m, FrozenNorm))


def prices(
    chain: Chain, example, target: Target, methods: list[Method], device: torch.device, timed: bool
) -> Prices:
    """Measure what every link takes with every method; seconds only where `timed`."""
    held = {m: kept_bytes(chain, m, example) for m in methods}
    if not timed:
        return Prices({m: [Price(*bytes) for bytes in held[m]] for m in methods})
    taken, base = seconds(chain, methods, example, target, device)
    return Prices(
        {
            m: [Price(*bytes, *times) for bytes, times in zip(held[m], taken[m], strict=True)]
            for m in methods
        },
        base,
    )


def seconds(chain: Chain, methods: list[Method], example, target: Target, device):
    """Seconds that each link adds to a step, trained and frozen, by method; those of the last.

    Steps are timed that train the last link alone, and the last third, two thirds and all of the
    chain. What a third adds is shared out among its links, half by multiply-adds of the backward
    pass and half by the size of their outputs. Where a method makes even the frozen layers slower
    (it has no engine), that too is shared out, among all links.
    """
    count = len(chain.links)
    steps = {}
    for m in methods:
        for start in _starts(chain, m):
            frozen = chain.anchor is not None and start > chain.anchor
            model = chain.anchored(m) if frozen else chain.uniform(m)
            links = set(range(start, count))
            steps[m, start] = _Timed(chain, model, links, example, target, device)
    times = stopwatch.in_turns(steps, REPEATS)
    best = {place: min(found["step"]) for place, found in times.items()}
    base = min(best[m, count - 1] for m in methods)
    return {m: _shared_out(chain, m, best, base, example) for m in methods}, base


def _starts(chain: Chain, method: Method) -> list[int]:
    """The first trained links of the steps that are timed."""
    count = len(chain.links)
    found = {round(k * count / BRACKETS) for k in range(BRACKETS)} | {count - 1}
    if chain.anchor is not None and not takes(method):
        found |= {chain.anchor, chain.anchor + 1}  # between them the engine goes
    return sorted(i for i in found if i < count)


def _shared_out(
    chain: Chain, method: Method, best: dict, base: float, example
) -> list[tuple[float, float]]:
    """Seconds of each link with a method, trained and frozen, from those of whole steps."""
    starts = _starts(chain, method)
    weights, passing = _weights(chain, chain.uniform(method), example)
    gap = best[method, starts[-1]] - base
    extra = [gap * w / sum(weights) for w in weights]
    for start, end in zip(starts, starts[1:], strict=False):
        part = max(0.0, best[method, start] - best[method, end])
        total = sum(weights[start:end])
        for i in range(start, end):
            extra[i] += part * weights[i] / total
    extra[-1] = 0.0  # in the base
    return [(t, t * p) for t, p in zip(extra, passing, strict=True)]


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
        with torch.no_grad(), evaluating(chain.model):
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

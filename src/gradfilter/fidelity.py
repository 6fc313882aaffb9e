"""How good the approximate gradient of every layer is, against the exact one on the same batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from gradfilter import tables, trial
from gradfilter.convert import Converted
from gradfilter.order import call, execution_order
from gradfilter.trial import Target

Place = tuple[str, int]  # layer, number of its call
Sink = Callable[[Place, Tensor], None]

# Rounding can push a value across the kink of an activation, which moves a layer's gradient by
# about a thousandth; what differs by less than this is as good as equal.
EXACT_DB = 50.0
GAP = 1e-2  # between the engine and the layer level, relative to a layer's gradient


@dataclass(frozen=True)
class Match:
    """An approximate tensor a against the exact e.

    `cosine` of the angle between them; `snr_db` = 10 log10(|e|^2 / |a - e|^2), infinite where they
    are equal; `norm` = |a| / |e|. All None where e is 0, and the cosine where a is.
    """

    cosine: float | None
    snr_db: float | None
    norm: float | None


class Sums:
    """The sums that a `Match` is made of; they add up over several tensors."""

    def __init__(self):
        self.ae = self.aa = self.ee = self.dd = 0.0

    def add(self, a: Tensor, e: Tensor) -> None:
        a, e = a.detach().double().flatten(), e.detach().double().flatten()
        self.ae += float(a @ e)
        self.aa += float(a @ a)
        self.ee += float(e @ e)
        self.dd += float((a - e).square().sum())

    def match(self) -> Match:
        if self.ee == 0:
            return Match(None, None, None)
        cosine = None
        if self.aa > 0:
            # equal tensors have exactly 1, whatever the roots round to
            cosine = 1.0 if self.dd == 0 else self.ae / math.sqrt(self.aa * self.ee)
        snr = math.inf if self.dd == 0 else 10 * math.log10(self.ee / self.dd)
        return Match(cosine, snr, math.sqrt(self.aa / self.ee))


@dataclass(frozen=True)
class LayerFidelity:
    """One layer. `depth` is its place in the forward pass, 1 for the first layer.

    `weight` is None where the weight is frozen, `input` where no gradient is passed on. `dc` is the
    share of the kernel's energy at frequency 0, sum over channels of (sum of taps)^2 / taps over
    the sum of squares: 1 for a 1x1 kernel, None for a Linear layer.
    """

    depth: int
    name: str
    kind: str
    method: str
    trained: bool
    weight: Match | None
    input: Match | None
    dc: float | None


@dataclass(frozen=True)
class Trend:
    """How SNR changes as the gradient goes back, over the layers below `EXACT_DB`.

    `per_layer` is the slope of a straight line, in dB for each layer towards the input (below 0:
    SNR falls); `near` and `far` are medians of the third of those layers nearest to the loss and
    farthest from it.
    """

    layers: int
    per_layer: float | None
    near: float | None
    far: float | None

    @classmethod
    def of(cls, points: list[tuple[int, float]]) -> Trend:
        """From (depth, SNR in dB)."""
        points = sorted(((d, s) for d, s in points if s < EXACT_DB), reverse=True)
        if not points:
            return cls(0, None, None, None)
        third = max(1, len(points) // 3)
        near, far = (
            statistics.median(s for _, s in part) for part in (points[:third], points[-third:])
        )
        if len(points) < 2:
            return cls(1, None, near, far)
        back, snr = [-d for d, _ in points], [s for _, s in points]
        slope = statistics.linear_regression(back, snr).slope
        return cls(len(points), slope, near, far)

    def __str__(self) -> str:
        if self.per_layer is None:
            return "too few layers with an error"
        word = "falls" if self.per_layer < 0 else "rises"
        return (
            f"{word} by {abs(self.per_layer):.2f} dB a layer going back ({self.layers} layers): "
            f"median {self.near:.1f} dB near the loss, {self.far:.1f} dB near the input"
        )


@dataclass(frozen=True)
class Fidelity:
    """Rows in the order of execution; `total` is over the weights of all trained layers."""

    layers: list[LayerFidelity]
    total: Match
    loss: float
    pictures: int
    notes: list[str] = field(default_factory=list)

    def layer(self, name: str) -> LayerFidelity:
        return next(r for r in self.layers if r.name == name)

    @property
    def weight_trend(self) -> Trend:
        return Trend.of([(r.depth, r.weight.snr_db) for r in self._with("weight")])

    @property
    def input_trend(self) -> Trend:
        return Trend.of([(r.depth, r.input.snr_db) for r in self._with("input")])

    def _with(self, what: str) -> list[LayerFidelity]:
        """The layers that have a gradient of this kind, other than 0."""
        return [r for r in self.layers if (m := getattr(r, what)) and m.snr_db is not None]

    def to_dict(self) -> dict:
        trends = {"weight_trend": self.weight_trend, "input_trend": self.input_trend}
        return tables.plain(self) | tables.plain(trends)

    def table(self) -> str:
        """One line a layer, the total, and how SNR changes with depth."""
        head = ("cosine", "SNR dB", "norm")
        heads = (f"{which} {what}" for which in ("gW", "gx") for what in head)
        rows = [("depth", "layer", "method", "DC", *heads)]
        for r in self.layers:
            dc = "-" if r.dc is None else f"{r.dc:.2f}"
            method = r.method if r.trained else "frozen"
            cells = (*_cells(r.weight), *_cells(r.input))
            rows.append((str(r.depth), r.name or "(the model itself)", method, dc, *cells))
        rows.append(("", "all weights", "", "", *_cells(self.total), "", "", ""))
        told = [
            f"{self.pictures} pictures, loss {self.loss:.4f}",
            tables.aligned(rows, left=3),
            f"SNR of weight gradients {self.weight_trend}",
            f"SNR of input gradients {self.input_trend}",
        ]
        return "\n".join([*told, *self.notes])

    __str__ = table

    def plot(self, path: str | Path) -> None:
        """SNR and cosine over depth, with each kernel's share of DC energy."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 8), dpi=150, layout="constrained")
        snr, cosine, dc = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 1.2))
        for what, style, label in (("weight", "o-", "weight"), ("input", "s--", "input")):
            rows = self._with(what)
            depths = [r.depth for r in rows]
            finite = [(r.depth, s) for r in rows if (s := getattr(r, what).snr_db) < EXACT_DB]
            options = {"markersize": 4, "linewidth": 1, "label": f"gradient of the {label}"}
            snr.plot([d for d, _ in finite], [s for _, s in finite], style, **options)
            cosine.plot(depths, [getattr(r, what).cosine for r in rows], style, **options)
        filters = [r for r in self.layers if r.dc is not None]
        dc.bar([r.depth for r in filters], [r.dc for r in filters], color="0.55")
        snr.set(ylabel="SNR, dB")
        snr.set_title(_title(self), fontsize=10)
        cosine.set(ylabel="cosine")
        dc.set(ylabel="DC share of\nkernel energy", ylim=(0, 1.02))
        dc.set(xlabel="layer, from the input (left) to the loss (right)")
        for axes in (snr, cosine, dc):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        snr.legend(frameon=False)
        figure.savefig(path)


def _cells(match: Match | None) -> tuple[str, str, str]:
    if match is None:
        return "-", "-", "-"
    values = (match.cosine, match.snr_db, match.norm)
    forms = ("{:.3f}", "{:.1f}", "{:.3f}")
    return tuple("0/0" if v is None else f.format(v) for v, f in zip(values, forms, strict=True))


def _title(found: Fidelity) -> str:
    equal = sum(
        m.snr_db >= EXACT_DB
        for r in found.layers
        for m in (r.weight, r.input)
        if m and m.snr_db is not None
    )
    beside = f"; SNR panel without {equal} of {EXACT_DB:.0f} dB or more" if equal else ""
    return f"Approximate against exact gradients, {found.pictures} pictures{beside}"


def fidelity(model: nn.Module, batch, target: Target) -> Fidelity:
    """Compare the gradients of the plan on `model` with the exact ones, layer by layer.

    `batch` is what the model takes, `target` the classes or masks for the cross-entropy, or a
    function of the output that gives the loss. Weight gradients are those that the model as it
    stands gives, engine and all; they carry the errors of all layers between theirs and the loss,
    and so do input gradients. The input gradient of a layer is what it alone hands back, not what
    others add; a region has none at full size, so it is taken at the layer level, and a note says
    where that level gives other weight gradients than the engine. A filtered input gradient is
    compared pixel by pixel: constant on its patches, it misses all that varies inside them.

    Everything runs on copies with dropout off and batch norms in the modes they are in: gradients,
    modes, buffers and random numbers of the model and gradients of the batch are left alone. The
    exact input gradients of all layers are held at once.
    """
    device = trial.check("fidelity", model, batch, target)
    batch, target = trial.apart(batch, target)
    with trial.same_chance(device):
        exact = _steady(trial.exact_copy(model))
        with torch.no_grad():
            trial.forward("fidelity", exact, batch)
        names = _names(exact, batch)
        inputs: dict[Place, Tensor] = {}
        loss = _run(exact, batch, target, names, inputs.__setitem__)
        of_inputs = _Against(inputs)
        layered = _steady(trial.layer_copy(model))
        _run(layered, batch, target, names, of_inputs.add)
        run, notes = layered, []
        if trial.has_engine(model):
            run = _steady(trial.planned_copy(model))
            _run(run, batch, target, [], None)
            notes = _engine_notes(run, layered, names)
    rows, total = _rows(run, exact, names, of_inputs)
    pictures = len(next(iter(trial.tensors(batch)), ()))
    return Fidelity(rows, total, loss, pictures, notes + _zero_notes(rows))


def _steady(model: nn.Module) -> nn.Module:
    """Nothing random, so that all copies compute the same; batch norms stay as they are."""
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            module.training = False
    return model


def _names(model: nn.Module, batch) -> list[str]:
    """The layers that a forward pass calls, in its order."""
    order = execution_order(model, batch)
    layers = {m: n for n, m in model.named_modules() if isinstance(m, _ConvNd | nn.Linear)}
    return [layers[m] for m in sorted(set(layers) & set(order), key=order.get)]


def _run(model: nn.Module, batch, target: Target, names: list[str], sink: Sink | None) -> float:
    """Forward and backward; `sink` gets every layer's input gradient. The loss."""
    hooks = [_watch(model.get_submodule(name), name, sink) for name in names]
    try:
        with torch.enable_grad():
            try:
                loss = trial.loss_of(call(model, batch), target)
            except ValueError as error:
                raise ValueError(f"fidelity: {error}") from error
            if not bool(loss.isfinite()):
                raise ValueError(f"fidelity: the loss of this batch is {loss.item()}")
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return float(loss.detach())


def _watch(module: nn.Module, name: str, sink: Sink):
    """Hand over the gradient that the layer gives its input: that of an alias only it reads."""
    calls = 0

    def enter(_, args, kwargs):
        nonlocal calls
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(x, Tensor) and x.requires_grad):
            return None
        place, x = (name, calls), x.view_as(x)
        calls += 1
        x.register_hook(lambda g: sink(place, g.detach()))
        return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): x})

    return module.register_forward_pre_hook(enter, with_kwargs=True)


class _Against:
    """Sums by layer of what comes in against the exact tensors, which are let go."""

    def __init__(self, exact: dict[Place, Tensor]):
        self.exact = exact
        self.sums: dict[str, Sums] = {}

    def add(self, place: Place, a: Tensor) -> None:
        self.sums.setdefault(place[0], Sums()).add(a, self.exact.pop(place))


def _rows(run: nn.Module, exact: nn.Module, names: list[str], inputs: _Against):
    """One row for every layer that gets a gradient, and the match of all weights together."""
    rows, everything = [], Sums()
    for depth, name in enumerate(names, start=1):
        ours, theirs = run.get_submodule(name), exact.get_submodule(name)
        a, e = _weight_gradient(ours), _weight_gradient(theirs)
        weight = None
        if e is not None:
            a = torch.zeros_like(e) if a is None else a
            sums = Sums()
            sums.add(a, e)
            everything.add(a, e)
            weight = sums.match()
        passed = inputs.sums[name].match() if name in inputs.sums else None
        if weight or passed:
            kind = "linear" if isinstance(theirs, nn.Linear) else "conv"
            method = repr(ours.gf.method) if isinstance(ours, Converted) else "Exact()"
            share = None if kind == "linear" else dc_share(theirs.weight.detach())
            row = (depth, name, kind, method, e is not None, weight, passed, share)
            rows.append(LayerFidelity(*row))
    return rows, everything.match()


def _weight_gradient(module: nn.Module) -> Tensor | None:
    w = module._parameters.get("weight")
    return None if w is None else w.grad


def dc_share(w: Tensor) -> float | None:
    """The share of a kernel's energy [O, C, taps...] that is constant over its taps."""
    taps = w.double().flatten(2)  # [O, C, taps]
    energy = float(taps.square().sum())
    return float(taps.sum(2).square().sum()) / (taps.shape[2] * energy) if energy else None


def _engine_notes(run: nn.Module, layered: nn.Module, names: list[str]) -> list[str]:
    """Where the engine gives other weight gradients than the layer level, if anywhere."""
    far = []
    for name in names:
        a, e = (_weight_gradient(m.get_submodule(name)) for m in (run, layered))
        if a is None or e is None:
            continue
        size = float(e.norm())
        gap = float((a - e).norm()) / size if size else 0.0
        if gap > GAP:
            far.append((gap, name))
    if not far:
        return []
    gap, name = max(far)
    return [
        f"input gradients are of the layer level, where {len(far)} weight gradients differ from "
        f"the engine's, {name} most, by {gap:.1%}"
    ]


def _zero_notes(rows: list[LayerFidelity]) -> list[str]:
    none = [r.name for r in rows if r.weight and r.weight.norm is None]
    if not none:
        return []
    return [f"exact weight gradient 0 (nothing to compare): {', '.join(none)}"]

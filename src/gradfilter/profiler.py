"""What a training step really takes, beside exact training and inference."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from gradfilter import kept, stopwatch, tables, trial
from gradfilter.convert import Converted
from gradfilter.cost import Cost, cost
from gradfilter.kept import Found, Kept
from gradfilter.methods import GradientFilter
from gradfilter.order import call
from gradfilter.trial import Target

PLAN, EXACT, INFERENCE = "plan", "exact", "inference"
PHASES = ("forward", "backward", "update")
MIB = 2**20


@dataclass(frozen=True)
class Spread:
    """The least, the median and the largest of several measurements."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        return cls(min(values), statistics.median(values), max(values)) if values else None

    def text(self, unit: float = 1.0, digits: int = 1) -> str:
        return " / ".join(f"{v / unit:.{digits}f}" for v in (self.min, self.median, self.max))


@dataclass(frozen=True)
class Rival:
    """One way to run the model: seconds by phase and in all, bytes, joules a step.

    Inference has a forward pass alone. `peak` is over the weights, gradients included; None where
    it cannot be measured.
    """

    name: str
    forward: Spread
    backward: Spread | None
    update: Spread | None
    step: Spread
    peak: Spread | None
    kept: int
    joules: Spread | None


@dataclass(frozen=True)
class Check:
    """Kept bytes of one module: what `gradfilter.cost` says and what was measured, at one level.

    At the "layer" level everything can be compared. In a region of the "engine" only the patch
    statistics of a convolution's input can: cost does not count what a region keeps in place of
    the maps of batch norms, activations and pools.
    """

    name: str
    kind: str
    level: str
    cost: int
    kept: int
    note: str = ""

    @property
    def agrees(self) -> bool:
        return self.cost == self.kept


@dataclass(frozen=True)
class Profile:
    """What `profile` measured; `kept` has a list of rows for the plan and for exact training."""

    machine: dict[str, object]
    rivals: list[Rival]
    kept: dict[str, list[Kept]]
    methods: dict[str, str]
    checks: list[Check]
    notes: list[str] = field(default_factory=list)

    def rival(self, name: str) -> Rival:
        return next(r for r in self.rivals if r.name == name)

    @property
    def disagreements(self) -> list[Check]:
        """The modules for which `gradfilter.cost` says something else than was measured."""
        return [c for c in self.checks if not c.agrees]

    def to_dict(self) -> dict:
        return tables.plain(self) | {"disagreements": tables.plain(self.disagreements)}

    def table(self, modules: bool = True) -> str:
        """Time and memory, kept bytes by kind and (unless `modules` is False) by module."""
        parts = [self._times(), self._ratios(), self._kinds()]
        if modules:
            parts.append(self._modules())
        parts.append("\n".join([*self._agreement(), *self.notes]))
        return "\n\n".join(parts)

    __str__ = table

    def _times(self) -> str:
        head = ("", *(f"{p}, ms" for p in (*PHASES, "step")), "peak, MiB", "kept, MiB")
        rows = [head if not self._joules() else (*head, "energy, J")]
        for r in self.rivals:
            spreads = (r.forward, r.backward, r.update, r.step)
            cells = [s.text(1e-3) if s else "-" for s in spreads]
            cells.append(r.peak.text(MIB) if r.peak else "?")
            cells.append(f"{r.kept / MIB:.2f}")
            if self._joules():
                cells.append(r.joules.text(digits=3) if r.joules else "?")
            rows.append((r.name, *cells))
        m = self.machine
        where = f"{m['device']}" + (f", {m['threads']} threads" if m["device"] == "cpu" else "")
        told = f"{m['repeats']} steps each, in turns: min / median / max; {m['input']} on {where}"
        return f"{told}\n{tables.aligned(rows)}"

    def _joules(self) -> bool:
        return any(r.joules for r in self.rivals)

    def _ratios(self) -> str:
        plan, exact, inference = map(self.rival, (PLAN, EXACT, INFERENCE))
        told = [
            f"exact / plan: time {exact.step.median / plan.step.median:.2f}, "
            f"kept {exact.kept / max(1, plan.kept):.1f}"
        ]
        if plan.peak and exact.peak and plan.peak.median > 0:
            told[0] += f", peak {exact.peak.median / plan.peak.median:.1f}"
        told.append(f"plan / inference: time {plan.step.median / inference.step.median:.2f}")
        return "; ".join(told) + " (medians)"

    def _kinds(self) -> str:
        plan, exact = (Found(self.kept[name]).by_kind() for name in (PLAN, EXACT))
        rows = [("kept by kind, KB", PLAN, EXACT)]
        rows += [(k, _kb(plan.get(k, 0)), _kb(exact.get(k, 0))) for k in {**exact, **plan}]
        return tables.aligned(rows)

    def _modules(self) -> str:
        by = {n: {(r.name, r.kind): r.bytes for r in rows} for n, rows in self.kept.items()}
        said = {(c.name, c.kind): c.cost for c in self.checks if c.level == "layer"}
        places = dict.fromkeys([*by[EXACT], *by[PLAN], *said])
        order = {name: i for i, name in enumerate(self.methods)}
        rows = [("kept by module, KB", "kind", "method", PLAN, EXACT, "gf.cost")]
        for place in sorted(places, key=lambda p: order.get(p[0], -1)):
            name, kind = place
            method = self.methods.get(name, "") if kind in kept.LAYERS else ""
            cost = _kb(said[place]) if place in said else "-"
            counts = (_kb(by[n].get(place, 0)) for n in (PLAN, EXACT))
            rows.append((name or "(the model itself)", kind, method, *counts, cost))
        return tables.aligned(rows, left=3)

    def _agreement(self) -> list[str]:
        lines = []
        for level in ("layer", "engine"):
            checks = [c for c in self.checks if c.level == level]
            if checks:
                right = sum(c.agrees for c in checks)
                what = "modules" if level == "layer" else "convolutions"
                lines.append(f"gf.cost at the {level} level: {right} of {len(checks)} {what} agree")
        return lines + [
            f"  {c.name or '(the model itself)'} ({c.kind}): {c.cost} bytes by gf.cost, {c.kept} "
            f"measured at the {c.level} level" + (f": {c.note}" if c.note else "")
            for c in self.disagreements
        ]

    def plot(self, path: str | Path) -> None:
        """Time by phase, peak and kept memory, and kept bytes by kind."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 4.2), dpi=150, layout="constrained")
        times, memory, kinds = figure.subplots(1, 3)
        self._plot_times(times)
        self._plot_memory(memory)
        self._plot_kinds(kinds)
        for axes in (times, memory, kinds):
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{self.machine['input']} on {self.machine['device']}", fontsize=10)
        figure.savefig(path)

    def _plot_times(self, axes) -> None:
        names = [r.name for r in self.rivals]
        bottom = [0.0] * len(names)
        for phase in PHASES:
            spreads = [getattr(r, phase) for r in self.rivals]
            values = [1e3 * s.median if s else 0.0 for s in spreads]
            axes.bar(names, values, 0.6, bottom=bottom, label=phase)
            bottom = [b + v for b, v in zip(bottom, values, strict=True)]
        steps = [r.step for r in self.rivals]
        ends = [[1e3 * abs(e - s.median) for s in steps for e in (getattr(s, end),)]
                for end in ("min", "max")]  # fmt: skip
        medians = [1e3 * s.median for s in steps]
        axes.errorbar(names, medians, ends, fmt="none", ecolor="0.2", capsize=4)
        axes.set_ylabel("ms")
        axes.set_title("Time per step: medians; whiskers min and max", fontsize=10)
        axes.legend(frameon=False)

    def _plot_memory(self, axes) -> None:
        names = [r.name for r in self.rivals]
        peaks = [r.peak.median / MIB if r.peak else 0.0 for r in self.rivals]
        held = [r.kept / MIB for r in self.rivals]
        for shift, values, label in ((-0.2, peaks, "peak over the weights"), (0.2, held, "kept")):
            places = [i + shift for i in range(len(names))]
            bars = axes.bar(places, values, 0.38, label=label)
            axes.bar_label(bars, [f"{v:.1f}" for v in values], fontsize=8)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("MiB")
        axes.set_ylim(0, 1.25 * max([*peaks, *held]) or 1)  # room for the legend
        axes.set_title("Memory", fontsize=10)
        axes.legend(frameon=False)

    def _plot_kinds(self, axes) -> None:
        found = {n: Found(self.kept[n]).by_kind() for n in (PLAN, EXACT)}
        bottom = [0.0, 0.0]
        for kind in {**found[EXACT], **found[PLAN]}:
            values = [found[n].get(kind, 0) / MIB for n in (PLAN, EXACT)]
            axes.bar([PLAN, EXACT], values, 0.6, bottom=bottom, label=kind)
            bottom = [b + v for b, v in zip(bottom, values, strict=True)]
        axes.set_ylabel("MiB")
        axes.set_title("Kept for the backward pass, by kind", fontsize=10)
        axes.legend(frameon=False)


def _kb(size: int) -> str:
    return f"{size / 1024:.1f}"


def profile(model: nn.Module, example, target: Target = None, *, repeats: int = 5) -> Profile:
    """Measure a training step of the plan on `model`, exact training of the same layers, inference.

    Everything runs on copies, in the modes that the modules are in, in turns; model and example are
    left as they were. A step is a forward pass with the loss, a backward pass and an update by
    plain SGD (of rate 0, so that all steps are alike). `target` gives the loss: classes or masks
    for the cross-entropy, or a function of the output; without it the loss is the output's mean
    square.

    Inference is the plain model in evaluation mode, its batch norms not folded. Peak memory is what
    the process (CPU) or the allocator (CUDA) holds at most, over the weights. Kept bytes are what
    autograd holds from forward to backward: they are compared with `gradfilter.cost`, see `Check`.
    """
    if repeats < 1:
        raise ValueError(f"profile: repeats must be a whole number >= 1, got {repeats!r}")
    device = trial.check("profile", model, example, target)
    example, target = trial.apart(example, target)
    with trial.same_chance(device):
        models = {PLAN: trial.planned_copy(model), EXACT: trial.exact_copy(model)}
        models[INFERENCE] = trial.exact_copy(model).eval()
        with torch.no_grad():
            trial.forward("profile", models[EXACT], example)
        found, checks = _kept(model, models, example)
        steps = {
            name: stopwatch.Step(m, example, target, device, trains=name != INFERENCE)
            for name, m in models.items()
        }
        times = stopwatch.in_turns(steps, repeats)
        peaks, about_peaks = stopwatch.peaks(steps, device)
        joules, about_energy = stopwatch.joules_of(steps, device)
    rivals = [
        _rival(name, times[name], peaks.get(name, []), found.get(name), joules.get(name, []))
        for name in models
    ]
    methods = {name: _method(m) for name, m in model.named_modules()}
    rows = {name: f.rows for name, f in found.items()}
    notes = [*_notes(found[PLAN], checks), *about_peaks, about_energy]
    return Profile(_machine(device, example, repeats), rivals, rows, methods, checks, notes)


def _method(module: nn.Module) -> str:
    layer = isinstance(module, nn.modules.conv._ConvNd | nn.Linear)
    if not layer:
        return ""
    return repr(module.gf.method) if isinstance(module, Converted) else "Exact()"


def _rival(name: str, times: dict, peaks: list, found: Found | None, joules: list) -> Rival:
    phases = [Spread.of(times.get(phase, [])) for phase in (*PHASES, "step")]
    return Rival(name, *phases, Spread.of(peaks), found.total if found else 0, Spread.of(joules))


def _machine(device: torch.device, example, repeats: int) -> dict[str, object]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "input": " and ".join(trial.shape(x) for x in trial.tensors(example)),
        "repeats": repeats,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _kept(model: nn.Module, models: dict, example) -> tuple[dict[str, Found], list[Check]]:
    """What the plan and exact training keep, and how that agrees with the cost model."""
    said, exact_said = cost(models[PLAN], example), cost(models[EXACT], example)
    kinds = {r.name: r.kind for r in (*exact_said.layers, *said.layers)}
    layered = kept.measure(trial.layer_copy(model), example, kinds)
    found = {PLAN: layered, EXACT: kept.measure(trial.exact_copy(model), example, kinds)}
    checks = _checks(said, layered, dict(model.named_modules()))
    if trial.has_engine(model):
        run = trial.planned_copy(model)
        with torch.enable_grad():
            call(run, example)  # traces the program
        found[PLAN] = kept.measure(run, example, kinds)
        checks += _engine_checks(said, found[PLAN], dict(model.named_modules()))
    return found, checks


def _checks(said: Cost, found: Found, modules: dict[str, nn.Module]) -> list[Check]:
    """Every module at the layer level, in the order of execution."""
    rows = {r.name: r for r in said.layers}
    measured = found.by_module()
    kinds = {r.name: r.kind for r in found.rows}
    checks = []
    for name in dict.fromkeys([*rows, *measured]):
        kind = rows[name].kind if name in rows else kinds[name]
        size = rows[name].kept_bytes if name in rows else 0
        check = Check(name, kind, "layer", size, measured.get(name, 0))
        moded = kind in ("norm", "other") and not list(modules[name].children())
        if not check.agrees and modules[name].training and moded:
            note = "gf.cost counts evaluation mode, the step ran it in training mode"
            check = replace(check, note=note)
        checks.append(check)
    return checks


def _engine_checks(said: Cost, found: Found, modules: dict[str, nn.Module]) -> list[Check]:
    """The convolutions that run in regions: what is kept of their inputs."""
    measured = found.by_module("conv")
    checks = []
    for row in said.layers:
        if row.name in found.engine:
            check = Check(row.name, row.kind, "engine", row.kept_bytes, measured.get(row.name, 0))
            if not check.agrees:
                check = replace(check, note=_engine_note(modules[row.name], found.shared, row.name))
            checks.append(check)
    return checks


def _engine_note(layer: Converted, shared: dict[str, str], name: str) -> str:
    """Why a region keeps something else of a layer's input than the layer by itself would."""
    if name in shared:
        return f"reads the input of {shared[name]}, whose patch means are kept once"
    method = getattr(layer.gf.method, "inner", layer.gf.method)
    if isinstance(method, GradientFilter) and layer.gf.shape.op.stride != (1, 1):
        return "a region keeps its input by patches, gf.cost counts blocks of patch times stride"
    if not layer.weight.requires_grad:
        return "its weight is frozen, but the batch norm folded into it is trained"
    return ""


def _notes(found: Found, checks: list[Check]) -> list[str]:
    if not found.engine:
        return []
    beside = sum(c.cost for c in checks if c.level == "layer" and c.kind not in kept.LAYERS)
    engine = sum(r.bytes for r in found.rows if r.kind not in kept.LAYERS)
    return [
        "not comparable: beside the layers' inputs gf.cost counts "
        f"{_kb(beside)} KB of dense maps at the layer level; the engine keeps "
        f"{_kb(engine)} KB in place of them"
    ]

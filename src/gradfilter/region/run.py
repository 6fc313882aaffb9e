"""Run a region: one autograd function, a fused forward pass and a backward pass on the grid."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradfilter import kernels
from gradfilter.patches import upsample
from gradfilter.region import grid
from gradfilter.region.conv import Conv, Placed
from gradfilter.region.fold import Folded, FoldedGradients, Folding
from gradfilter.region.kept import Kept
from gradfilter.region.lower import Region
from gradfilter.region.plain import Plain
from gradfilter.region.record import SHORTEST
from gradfilter.region.record_backward import BackwardTape
from gradfilter.region.record_forward import ForwardTape
from gradfilter.region.step import Parameter, Step
from gradfilter.region.steps import Gate
from gradfilter.region.wiring import Wiring

SIZES = 256  # image sizes that a region remembers
WIRINGS = 64  # and sets of trained parameters
_shape = attrgetter("shape")


class Tapes(NamedTuple):
    """The tapes of a region for one size of inputs, by where they begin; None: there is none."""

    forward: dict[int, ForwardTape | None]
    backward: dict[tuple[int, frozenset[int]], BackwardTape | None]  # and by the gradients there


class Runner:
    """A region with its list of parameters, ready to run on any batch and image size."""

    def __init__(self, region: Region):
        self.region, self.told = region, False
        self._begin()

    def _begin(self) -> None:
        """What follows from the steps and the shapes of their parameters."""
        region = self.region
        self.parameters: list[Parameter] = []
        seen = set()
        for step in region.steps:
            for module, name in step.parameters():
                if (id(module), name) not in seen:
                    seen.add((id(module), name))
                    self.parameters.append((module, name))
        self.position = {(id(m), n): i for i, (m, n) in enumerate(self.parameters)}
        self.shapes = list(map(_shape, self._tensors()))
        norms = [
            (s, getattr(s, "module", None), s.norm)
            for s in region.steps
            if getattr(s, "norm", None) is not None
        ]
        # as the program was made: the modes may change before a backward pass
        self.batched = {id(n) for *_, n in norms if n.training or n.running_mean is None}
        folded = [part for part in norms if id(part[2]) not in self.batched]
        self.folding = Folding(folded, self.position) if folded else None
        self.places: dict[tuple, dict[int, Placed]] = {}  # by size of the inputs, by convolution
        self.last_use = {v: i for i, s in enumerate(region.steps) for v in s.inputs}
        self.wirings: dict[tuple[bool, ...], Wiring] = {}
        self.tapes: dict[tuple, Tapes] = {}
        self.fitting: dict[tuple, bool] = {}  # by the shapes of the inputs
        convs = (s for s in region.steps if isinstance(s, Conv))
        self.weights = [self.position[id(s.module), "weight"] for s in convs]
        gates = [s for s in region.steps if isinstance(s, Gate)]
        read = [v for s in region.steps for v in (s.inputs[:1] if s in gates else s.inputs)]
        factors = {s.inputs[1] for s in gates}
        self.factors = factors.difference(read, region.outputs)  # may be the same for all images

    def _tensors(self) -> list[Tensor]:
        return [m._parameters[n] for m, n in self.parameters]

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        tensors = self._tensors()
        if list(map(_shape, tensors)) != self.shapes:  # replaced by others
            self._begin()
        device = inputs[0].device.type
        cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if cast else inputs[0].dtype
        if not self._fits(inputs) or not (cast or self._agree(dtype, tensors)):
            return self._by_layers(inputs)
        if inputs[0].dtype == torch.float64:  # autocast leaves it alone
            dtype = torch.float64
        inputs = [x.to(dtype).contiguous(memory_format=torch.channels_last) for x in inputs]
        with torch.autocast(device, enabled=False) if cast else nullcontext():
            flags = tuple([t.requires_grad for t in (*inputs, *tensors)])
            if torch.is_grad_enabled() and any(flags):
                return list(_RegionFunction.apply(self, flags, len(inputs), *inputs, *tensors))
            return Forward(self, inputs, tensors, self.wiring((False,) * len(flags))).run()

    def _agree(self, dtype: torch.dtype, tensors: list[Tensor]) -> bool:
        """Whether the weights are of the type of the maps, or no convolution takes them."""
        return all([tensors[i].dtype is dtype for i in self.weights])

    def _by_layers(self, inputs: list[Tensor]) -> list[Tensor]:
        """What PyTorch makes of such inputs, or says of them."""
        found = Plain(self.region)(inputs)
        if not self.told and all(map(len, inputs)):
            self.told = True
            shapes = ", ".join(str(list(x.shape)) for x in inputs)
            warnings.warn(
                f"a region of {len(self.weights)} convolutions was made for maps that differ from "
                f"{shapes} in more than their number and size, so it runs at the layer level "
                "instead of by the engine",
                stacklevel=2,
            )
        return found

    def _fits(self, inputs: list[Tensor]) -> bool:
        """Whether all steps can read maps of these shapes.

        They were written for those of the example. Where these differ in more than their number and
        size, PyTorch knows what to do, or what to say.
        """
        key = tuple([x.shape for x in inputs])
        found = self.fitting.get(key)
        if found is None:
            if len(self.fitting) >= SIZES:
                self.fitting.clear()
            found = self.fitting[key] = self._shapes_fit(key)
        return found

    def _shapes_fit(self, shapes: tuple[torch.Size, ...]) -> bool:
        known = {v: tuple(s) for v, s in zip(self.region.inputs, shapes, strict=True)}
        if any(len(s) != 4 or s[0] == 0 for s in shapes):
            return False
        images = max(s[0] for s in shapes)
        if any(s[0] not in (images, v in self.factors or images) for v, s in known.items()):
            return False
        for step in self.region.steps:
            shape = step.shape_of(*(known[v] for v in step.inputs))
            if shape is None:
                return False
            known[step.out] = shape
        return True

    def wiring(self, flags: tuple[bool, ...]) -> Wiring:
        found = self.wirings.get(flags)
        if found is None:
            if len(self.wirings) >= WIRINGS:
                self.wirings.clear()
                self.tapes.clear()  # which go by wirings
            found = Wiring(self.region, self.parameters, self.folding, self.position, flags)
            self.wirings[flags] = found
        return found

    def placed(self, inputs: list[Tensor]) -> dict[int, Placed]:
        """The convolutions that were worked out for inputs of this size, type and device."""
        key = (inputs[0].dtype, inputs[0].device, *(x.shape[2:] for x in inputs))
        if key not in self.places and len(self.places) >= SIZES:
            self.places.clear()
        return self.places.setdefault(key, {})

    def taped(self, inputs: list[Tensor], wiring: Wiring) -> Tapes | None:
        """The tapes for inputs of this size, where the C kernels can play them."""
        if not kernels.joined(inputs[0]):
            return None
        key = (id(wiring), *(x.shape[1:] for x in inputs))
        if key not in self.tapes and len(self.tapes) >= SIZES:
            self.tapes.clear()
        return self.tapes.setdefault(key, Tapes({}, {}))


class _State:
    """What the steps see in either direction."""

    def __init__(self, runner: Runner, tensors, wiring: Wiring):
        self.runner, self.tensors, self.wiring = runner, tensors, wiring
        self.method, self.needs = runner.region.method, wiring.needs
        self.wanted, self.trained = wiring.wanted, wiring.trains

    def parameter(self, module: nn.Module, name: str) -> Tensor:
        return self.tensors[self.runner.position[id(module), name]]

    def weight(self, module: nn.Module, like: Tensor) -> Tensor:
        """The weight of a convolution in the type of the maps."""
        w = self.tensors[self.runner.position[id(module), "weight"]]
        return w if w.dtype is like.dtype else w.to(like.dtype)

    def optional(self, module: nn.Module, name: str) -> Tensor | None:
        i = self.runner.position.get((id(module), name))
        return None if i is None else self.tensors[i]

    def batch_norm(self, norm: nn.Module) -> bool:
        """Whether a batch norm uses the statistics of the batch."""
        return id(norm) in self.runner.batched


class Forward(_State):
    """The forward pass: dense maps live as long as a step reads them."""

    def __init__(self, runner: Runner, inputs, tensors, wiring: Wiring):
        super().__init__(runner, tensors, wiring)
        self.dense: dict[int, Tensor] = dict(zip(runner.region.inputs, inputs, strict=True))
        self.saved = Kept({}, {})
        self.notes: dict[object, object] = {}
        self.images = max(map(len, inputs))
        self.folded = Folded(runner.folding, tensors) if runner.folding else None
        self.places, self.tapes = runner.placed(inputs), runner.taped(inputs, wiring)
        self.here = 0

    def run(self) -> list[Tensor]:
        region = self.runner.region
        for v in region.inputs:
            if v in self.wanted:
                x = self.dense[v]
                self.saved[v, "mean"] = self._mean(x)
        while self.here < len(region.steps):
            tape = self._tape()
            if tape is not None and tape.play(self):
                self.here = tape.end
            else:
                self._step(region.steps[self.here])
                self.here += 1
        return [self.dense[v] for v in region.outputs]

    def _step(self, step: Step) -> None:
        step.forward(self)
        for v in step.inputs:
            if self.runner.last_use[v] == self.here and v not in self.runner.region.outputs:
                self.dense.pop(v, None)

    def _tape(self) -> ForwardTape | None:
        """The tape that goes on from here, if there is one; written once."""
        if self.tapes is None:
            return None
        if self.here not in self.tapes.forward:
            tape = ForwardTape(self, self.here)
            self.tapes.forward[self.here] = tape if tape.steps >= SHORTEST else None
        return self.tapes.forward[self.here]

    def write(self, value: int, x: Tensor, mean: Tensor | None) -> None:
        """The map of a value; its patch mean too where the backward pass wants it."""
        self.dense[value] = x
        if value in self.wanted:
            self.saved[value, "mean"] = self._mean(x) if mean is None else mean

    def _mean(self, x: Tensor) -> Tensor:
        return kernels.patch_mean(x, grid.side(self.method, tuple(x.shape[-2:])))

    def affine(self, step: Step, conv: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
        """Scale and shift that follow a convolution: its bias and its frozen batch norm."""
        if step.norm is None:
            return None, None if conv is None else self.optional(conv, "bias")
        return self.folded.affine(step)

    def current_mean(self, value: int) -> Tensor | None:
        return self.saved.get((value, "mean"))

    def consume(self, step: Step, value: int) -> Tensor:
        """A map that the step may overwrite."""
        x = self.dense[value]
        outside = value in self.runner.region.inputs or value in self.runner.region.outputs
        if outside or self.runner.last_use[value] != self.here:
            return x.clone(memory_format=torch.channels_last)
        return x

    def place(self, step: Conv, x: Tensor) -> Placed:
        """The convolution for this size of input; worked out once per size."""
        found = self.places.get(step.out)
        if found is None:
            found = self.places[step.out] = step.place(self.method, x)
        return found

    def keep(self, step: Step, name: str, x: Tensor) -> None:
        if step.out in self.needs:
            self.saved[step.out, name] = x

    def note(self, step: Step, name: str, value) -> None:
        self.notes[step.out, name] = value


class Backward(_State):
    """The backward pass: every gradient is a map of patch means."""

    def __init__(self, ctx, tensors, saved: Kept, folded):
        super().__init__(ctx.runner, tensors, ctx.wiring)
        self.places, self.tapes, self.notes = ctx.places, ctx.tapes, ctx.notes
        self.images = max(shape[0] for shape in ctx.x_shapes)
        self.folded = FoldedGradients(ctx.wiring.folding, folded) if folded else None
        self.saved = saved
        self.grads: dict[int, Tensor] = {}
        self.parameter_grads: list[Tensor | None] = [None] * len(tensors)

    def run(self) -> None:
        steps = self.runner.region.steps
        here = len(steps) - 1
        while here >= 0:
            tape = self._tape(here)
            if tape is not None and tape.play(self):
                here = tape.end
                continue
            g = self.grads.pop(steps[here].out, None)
            if g is not None and steps[here].out in self.needs:
                steps[here].backward(self, g)
            here -= 1
        if self.folded is not None:
            self.folded.hand_out(self)

    def _tape(self, here: int) -> BackwardTape | None:
        """The tape that goes on from here, if there is one; written once."""
        if self.tapes is None:
            return None
        key = here, frozenset(self.grads)
        if key not in self.tapes.backward:
            tape = BackwardTape(self, here)
            self.tapes.backward[key] = tape if tape.steps >= SHORTEST else None
        return self.tapes.backward[key]

    def add(self, value: int, g: Tensor) -> None:
        if value in self.needs:
            before = self.grads.get(value)
            self.grads[value] = g if before is None else before + g

    def parameter_gradient(self, module: nn.Module, name: str, g: Tensor) -> None:
        self.gradient(self.runner.position.get((id(module), name)), g)

    def gradient(self, i: int | None, g: Tensor) -> None:
        """A gradient of the i-th parameter."""
        if i not in self.wiring.positions:
            return
        if g.dtype is not self.tensors[i].dtype:
            g = g.to(self.tensors[i].dtype)
        before = self.parameter_grads[i]
        self.parameter_grads[i] = g if before is None else before + g

    def kept(self, step: Step, name: str) -> Tensor | None:
        return self.saved.get((step.out, name))

    def mean(self, value: int) -> Tensor:
        return self.saved[value, "mean"]

    def noted(self, step: Step, name: str):
        return self.notes[step.out, name]


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, runner: Runner, flags, count: int, *tensors):
        inputs, parameters = tensors[:count], tensors[count:]
        wiring = runner.wiring(flags)
        f = Forward(runner, inputs, parameters, wiring)
        outputs = f.run()
        folded = f.folded.kept(wiring.before) if wiring.folding else []
        ctx.runner, ctx.wiring, ctx.notes = runner, wiring, f.notes
        ctx.places, ctx.tapes = f.places, f.tapes
        ctx.set_materialize_grads(False)  # what no gradient reaches gets none, not zeros
        ctx.saved_keys, ctx.blocks = list(f.saved.tensors), list(f.saved.blocks)
        ctx.folded = len(folded)
        ctx.x_shapes = [tuple(x.shape) for x in inputs]
        kept = *f.saved.tensors.values(), *f.saved.blocks.values()
        ctx.save_for_backward(*kept, *folded, *parameters)
        ctx.mark_non_differentiable(
            *(t for v, t in zip(runner.region.outputs, outputs, strict=True) if v not in f.needs)
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        region, needs = ctx.runner.region, ctx.wiring.needs
        tensors = iter(ctx.saved_tensors)
        saved = dict(zip(ctx.saved_keys, tensors, strict=False))
        blocks = dict(zip(ctx.blocks, tensors, strict=False))
        folded = list(islice(tensors, ctx.folded))
        b = Backward(ctx, list(tensors), Kept(saved, blocks), folded)
        for v, g in zip(region.outputs, grads, strict=True):
            if g is not None and v in needs:
                g = g.contiguous(memory_format=torch.channels_last)
                b.add(v, kernels.patch_mean(g, grid.side(b.method, tuple(g.shape[-2:]))))
        b.run()
        inputs = [
            _dense(b.grads.get(v), b.method, shape)
            for v, shape in zip(region.inputs, ctx.x_shapes, strict=True)
        ]
        return None, None, None, *inputs, *b.parameter_grads


def _dense(g: Tensor | None, method, shape) -> Tensor | None:
    """The gradient of a region's input at full resolution."""
    if g is None:
        return None
    size = tuple(shape[-2:])
    return upsample(g, size, grid.side(method, size))

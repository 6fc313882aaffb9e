"""Steps onto tapes: what a run of convolutions does in either direction, as calls of the C kernels.

A tape is written from where a pass has come to, as far as it can be; played, it does what the steps
would do one by one (`Step.forward`, `Step.backward`), which remain for all other steps and wherever
the C kernels cannot run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradfilter.kernels.cpu import ACTS
from gradfilter.kernels.eager import IDEMPOTENT
from gradfilter.region import grid
from gradfilter.region.conv import Conv, Placed
from gradfilter.region.step import Step
from gradfilter.region.steps import Add
from gradfilter.region.tape import FREE, Map, Shape, Spot, Tape

SHORTEST = 2  # steps that are worth a tape
Find = Callable[[object], Tensor]  # the tensor of a slot, from the pass that plays the tape


class _Recorded:
    """A tape, the tensors of its slots, and the steps it does: all before or after `end`."""

    def __init__(self, c):
        self.c = c  # the pass it is written in, let go when that is done
        self.tape = Tape()
        self.slots: dict[object, int] = {}
        self.finds: list[Find] = []
        self.parameters: list[int] = []  # the positions of those it reads
        self.steps = 0

    def slot(self, name: object, find: Find) -> int:
        if name not in self.slots:
            self.slots[name] = self.tape.slot()
            self.finds.append(find)
        return self.slots[name]

    def parameter(self, module: nn.Module, name: str) -> Spot:
        position = self.c.runner.position[id(module), name]
        self.parameters.append(position)
        return Spot(self.slot(("parameter", position), lambda c: c.tensors[position]))

    def constant(self, name: object, t: Tensor) -> Spot:
        return Spot(self.slot(name, lambda c: t))

    def finish(self, in_turns: bool) -> None:
        self.tape.finish(in_turns)
        del self.c

    def run(self, c, images: int) -> list[Tensor] | None:
        """Play the tape; the tensors of the slots, or None where the kernels cannot read them."""
        parameters = [c.tensors[position] for position in self.parameters]
        if not all([_plain(t) and t.is_contiguous() for t in parameters]):
            return None
        tensors = [find(c) for find in self.finds]
        self.tape.play(tensors, images)
        return tensors


class ForwardTape(_Recorded):
    """Steps of a forward pass up to `end`."""

    def __init__(self, c, start: int):
        super().__init__(c)
        self.values: dict[int, Map] = {}
        self.means: dict[int, Map] = {}
        self.slopes: dict[tuple, Map] = {}
        steps, last = c.runner.region.steps, c.runner.last_use
        self.end = start
        while self.end < len(steps) and self._take(steps[self.end]):
            self.end += 1
        self.steps = self.end - start
        lasting = {v for v in self.values if last.get(v, -1) >= self.end}
        lasting.update(c.runner.region.outputs)
        written = {s.out for s in steps[start : self.end]}
        self.outputs = {v: self.values[v] for v in written & lasting}
        self.spent = [v for v in self.values if v not in written | lasting]
        for v, y in self.outputs.items():
            y.slot = self.slot(("value", v), lambda c, v=v: c.dense[v])
        for v, mean in self.means.items():
            mean.slot = self.slot(("mean", v), lambda c, v=v: c.means[v])
        for key, slope in self.slopes.items():
            slope.slot = self.slot(key, lambda c, key=key: c.saved[key])
        self.finish(in_turns=True)

    def play(self, c) -> bool:
        """Do the steps; False where the kernels cannot."""
        images = c.images
        for own, maps in (
            (c.dense, self.outputs), (c.means, self.means), (c.saved, self.slopes)
        ):  # fmt: skip
            own.update((key, _new(images, m.shape)) for key, m in maps.items())
        if self.run(c, images) is None:
            return False
        for v in self.spent:
            c.dense.pop(v, None)
        return True

    def _take(self, step: Step) -> bool:
        inputs = [self._value(v) for v in step.inputs]
        if None in inputs:
            return False
        if isinstance(step, Conv):
            return self._convolution(step, *inputs)
        return isinstance(step, Add) and self._sum(step, *inputs)

    def _value(self, v: int) -> Map | None:
        """A map that is written here, or one that is there already."""
        if v not in self.values:
            x = self.c.dense[v]
            if not _plain(x) or len(x) != self.c.images:
                return None
            slot = self.slot(("value", v), lambda c: _channels_last(c.dense[v]))
            self.values[v] = Map(tuple(x.shape[1:]), slot)
        return self.values[v]

    def _convolution(self, step: Conv, x: Map, residual: Map | None = None) -> bool:
        c, weight = self.c, self.c.parameter(step.module, "weight")
        batch = step.norm is not None and c.batch_norm(step.norm)
        if step.pool is not None or step.shape.mode != "zeros" or batch or not _plain(weight):
            return False
        place, channels = c.place(step, torch.empty((0, *x.shape))), len(weight)
        op = place.op
        depthwise = op.groups > 1 and op.groups == channels == x.shape[0] and residual is None
        if not (depthwise or place.pointwise):
            return False
        y = self.values[step.out] = Map((channels, *place.size))
        w, (scale, shift) = self.parameter(step.module, "weight"), self._affine(step)
        mean, slope = self._statistics(step, place, y)
        act = ACTS[step.act[0]], float(step.act[1])
        if depthwise:
            top, _, left, _ = op.padding
            geometry = torch.tensor([*op.kernel, *op.stride, top, left, *op.dilation])
            self.tape.call(
                "depthwise", (x, w, scale, shift, y, mean, slope, self.constant(op, geometry)),
                *x.shape[1:], channels, *place.size, *place.side, *act,
            )  # fmt: skip
        else:
            self.tape.call(
                "pointwise", (x, w, residual, scale, shift, y, mean, slope),
                *x.shape[1:], x.shape[0], channels, *place.side, *act,
            )  # fmt: skip
        if step.out in c.wanted and step.out not in self.means:
            self._mean(step.out, y, place.side)
        return True

    def _affine(self, step: Conv) -> tuple[Spot | None, Spot | None]:
        """Scale and shift that follow a convolution."""
        if step.norm is None:
            bias = self.c.optional(step.module, "bias")
            return None, None if bias is None else self.parameter(step.module, "bias")
        at = self.c.folded.begin[step.out]
        return (
            Spot(self.slot("scale", lambda c: c.folded.scale), at),
            Spot(self.slot("shift", lambda c: c.folded.shift), at),
        )

    def _statistics(self, step: Conv, place: Placed, y: Map) -> tuple[Map | None, Map | None]:
        """Where the patch means of the output and of the slope go, as far as any is kept."""
        c, act = self.c, step.act[0]
        mean = _patches(y, place.side)
        slope = None if act == "none" else _patches(y, place.side)
        keeps_mean = step.out in c.needs and step.out in c.wanted
        told = keeps_mean and place.side == (1, 1) and act in IDEMPOTENT
        keeps_slope = step.out in c.needs and slope is not None and not told
        if keeps_mean:
            self.means[step.out] = mean
        if keeps_slope:
            self.slopes[step.out, "slope"] = slope
        return (mean, slope) if keeps_mean or keeps_slope else (None, None)

    def _sum(self, step: Add, a: Map, b: Map) -> bool:
        if a.shape != b.shape:
            return False
        total = self.values[step.out] = Map(a.shape)
        self.tape.call("add", (a, b, total), a.size)
        if step.out in self.c.wanted:
            self._mean(step.out, total, grid.side(self.c.method, total.shape[1:]))
        return True

    def _mean(self, value: int, x: Map, side: tuple[int, int]) -> None:
        self.means[value] = _patches(x, side)
        self.tape.call("patch_mean", (x, self.means[value]), *x.shape[1:], x.shape[0], *side)


class BackwardTape(_Recorded):
    """Steps of a backward pass down to `end`, that one left out."""

    def __init__(self, c, start: int):
        super().__init__(c)
        self.before = frozenset(c.grads)  # the values that have a gradient already
        self.read: set[int] = set()  # those of them that are used up
        self.grads: dict[int, Map] = {}
        self.made: list[tuple[int, int]] = []  # parameters, by position, and their gradients' slots
        self.folded: list[int] = []  # steps whose sums and dots are written
        steps, self.end = c.runner.region.steps, start
        while self.end >= 0 and self._take(steps[self.end]):
            self.end -= 1
        for v, g in self.grads.items():
            if g.slot is None:
                g.slot = self.slot(("new", v), lambda c, shape=g.shape: _new(c.images, shape))
        self.finish(in_turns=False)

    def play(self, c) -> bool:
        """Do the steps; False where the kernels cannot."""
        tensors = self.run(c, c.images)
        if tensors is None:
            return False
        for v in self.read:
            del c.grads[v]
        for v, g in self.grads.items():
            c.grads[v] = tensors[g.slot - FREE]
        for position, slot in self.made:
            c.gradient(position, tensors[slot - FREE])
        if self.folded:
            c.folded.reached.update(self.folded)
        return True

    def _take(self, step: Step) -> bool:
        c = self.c
        if step.out not in c.needs or (step.out not in self.grads and step.out not in self.before):
            return True  # no gradient comes this way
        if isinstance(step, Add):
            g = self._gradient(step.out)
            for v in step.inputs:
                self._add(v, g)
        elif isinstance(step, Conv) and self._possible(step):
            self._convolution(step, self._gradient(step.out))
        else:
            return False
        self.steps += 1
        return True

    def _gradient(self, v: int) -> Map:
        """The gradient of a value, which is used up by it."""
        if v in self.grads:
            return self.grads.pop(v)
        self.read.add(v)
        slot = self.slot(("gradient", v), lambda c: _channels_last(c.grads[v]))
        return Map(tuple(self.c.grads[v].shape[1:]), slot)

    def _add(self, v: int, g: Map) -> None:
        if v not in self.c.needs:
            return
        if v in self.grads or (v in self.before and v not in self.read):
            before, total = self._gradient(v), Map(g.shape)
            self.tape.call("add", (before, g, total), g.size)
            g = total
        self.grads[v] = g

    def _possible(self, step: Conv) -> bool:
        c, w = self.c, self.c.parameter(step.module, "weight")
        place, wants = c.places[step.out], c.wiring.of[step.out]
        batch = step.norm is not None and c.batch_norm(step.norm)
        if step.pool is not None or batch or not _plain(w) or (wants.bias and step.norm):
            return False
        if place.factors:
            return True
        depthwise = 1 < place.op.groups == len(w) and w.shape[1] == 1 and step.residual is None
        return isinstance(place.grid, grid.Galerkin) and (depthwise or _matched(place))

    def _convolution(self, step: Conv, g: Map) -> None:
        c, place = self.c, self.c.places[step.out]
        weight, wants = c.parameter(step.module, "weight"), c.wiring.of[step.out]
        w, (slope, act) = self.parameter(step.module, "weight"), self._slope(step, place)
        scale, sums, dots = self._fold(step, wants)
        x = self._kept(step.inputs[0], "mean") if wants.gw else None
        gw = self._made(step, "weight") if wants.gw else None
        z = None
        if step.residual in c.needs:
            z = g if slope is None else Map(g.shape)
        own = None if z is g else z
        if place.factors:
            gx = Map((weight.shape[1], *g.shape[1:])) if wants.gx else None
            places = g, slope, scale, own, sums, x, w, gx, gw, dots
            self._products(places, place.area, *place.factors, act)
        elif _matched(place):
            s = self._sloped(step, place, g, slope, scale, sums, act, own)
            gx = self._matched(step, place, s, x, w, gw, dots, weight.shape[1], wants.gx)
        else:
            s = self._sloped(step, place, g, slope, scale, sums, act)
            gx = self._depthwise(step, place, s, x, w, gw, wants.gx)
            if dots is not None:
                self.tape.call("row_dots", (gw, w, dots), len(weight), weight[0].numel())
        if z is not None:
            self._add(step.residual, z)
        if gx is not None:
            self._add(step.inputs[0], gx)

    def _fold(self, step: Conv, wants) -> tuple[Spot | None, Spot | None, Spot | None]:
        """Scale, and where sums and dots go."""
        if step.norm is None:
            return None, self._made(step, "bias") if wants.bias else None, None
        at = self.c.folded.begin[step.out]
        self.folded.append(step.out)
        return (
            Spot(self.slot("scale", lambda c: c.folded.scale), at),
            Spot(self.slot("sums", lambda c: c.folded.sums), at) if wants.sums else None,
            Spot(self.slot("dots", lambda c: c.folded.dots), at) if wants.gamma else None,
        )

    def _products(self, places: tuple, area: float, into_gx: float, into_gw: float, act=0):
        """Both gradients of a 1x1 layer, or one of them."""
        g, like_x = places[0], places[7] or places[5] or places[0]
        sizes = g.shape[1] * g.shape[2], like_x.shape[0], g.shape[0]
        self.tape.call("pointwise_backward", places, area, into_gx, into_gw, *sizes, act)

    def _matched(self, step, place, s: Map, x, w, gw, dots, channels: int, need_gx) -> Map | None:
        """A 1x1 layer on patches that match one to one but are not all whole."""
        conv, gx, nothing = place.grid, None, (None,) * 4
        if need_gx:
            gx = Map((channels, *s.shape[1:]))
            self._products((s, *nothing, None, w, gx, None, None), 1.0, 1.0, 1.0)
            self._weigh(step, "gx", gx, conv.diagonal / conv.area, gx)
        if gw is not None:
            weighed = Map(s.shape)
            self._weigh(step, "gw", s, conv.diagonal, weighed)
            self._products((weighed, *nothing, x, w, None, gw, dots), 1.0, 1.0, 1.0)
        return gx

    def _weigh(self, step: Conv, name: str, x: Map, factors: Tensor | float, y: Map) -> None:
        """Every patch of x times its factor."""
        one = isinstance(factors, float)
        if y is x and (factors == 1 if one else bool((factors == 1).all())):
            return
        own = None if one else self.constant((name, step.out), factors.contiguous())
        number = factors if one else 0.0
        self.tape.call("weigh", (x, own, y), number, x.shape[1] * x.shape[2], x.shape[0])

    def _sloped(
        self, step: Conv, place: Placed, g: Map, slope, scale, sums, act: int, z: Map | None = None
    ) -> Map:
        """g times slope and scale; sums, and where it is wanted g times slope (z), on the way."""
        changed = slope is not None or scale is not None
        if not changed and sums is None:
            return g
        if scale is None and changed:
            z = z or Map(g.shape)
        scaled = None if scale is None else Map(g.shape)
        one = isinstance(place.area, float)
        area = None if one else self.constant(("area", step.out), place.area.contiguous())
        self.tape.call(
            "slope_backward", (g, slope, scale, area, z, scaled, sums),
            place.area if one else 0.0, g.shape[1] * g.shape[2], g.shape[0], act,
        )  # fmt: skip
        return scaled or z or g

    def _depthwise(self, step: Conv, place: Placed, g: Map, x, w, gw, need_gx: bool) -> Map | None:
        conv = place.grid
        patches = tuple(t.shape[2] for t in conv.taps)
        gx = Map((g.shape[0], *patches)) if need_gx else None
        if gx is None and gw is None:
            return None
        taps = [self.constant(("taps", step.out, i), t) for i, t in enumerate(conv.taps)]
        x = g if x is None else x  # then not read
        self.tape.call(
            "grid_backward", (g, x, w, *taps, gx, gw), *g.shape, *patches, *place.op.kernel
        )
        if gx is not None:
            self._weigh(step, "gx", gx, 1 / conv.area, gx)
        return gx

    def _slope(self, step: Conv, place: Placed) -> tuple[Map | None, int]:
        """Where the slope is; or the output that tells it, and by which activation."""
        act = step.act[0]
        if act == "none":
            return None, ACTS["none"]
        if step.out in self.c.wanted and place.side == (1, 1) and act in IDEMPOTENT:
            return self._kept(step.out, "mean"), ACTS[act]
        return self._kept(step.out, "slope"), ACTS["none"]

    def _kept(self, value: int, name: str) -> Map:
        """What the forward pass kept."""
        if name == "mean":
            find, t = lambda c: _channels_last(c.means[value]), self.c.means[value]
        else:
            find, t = lambda c: _channels_last(c.saved[value, name]), self.c.saved[value, name]
        return Map(tuple(t.shape[1:]), self.slot((name, value), find))

    def _made(self, step: Conv, name: str) -> Spot:
        """A parameter's gradient."""
        position = self.c.runner.position[id(step.module), name]
        shape = self.c.tensors[position].shape
        slot = self.slot(("made", step.out, name), lambda c: torch.empty(shape))
        self.made.append((position, slot))
        return Spot(slot)


def _patches(x: Map, side: tuple[int, int]) -> Map:
    """A map of x's patches."""
    return Map((x.shape[0], *(-(-s // r) for s, r in zip(x.shape[1:], side, strict=True))))


def _matched(place: Placed) -> bool:
    """Whether both gradients are products, patch by patch."""
    return place.op.groups == 1 and place.op.pointwise and place.grid.diagonal is not None


def _plain(t: Tensor) -> bool:
    return t.dtype is torch.float32 and t.is_cpu


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _new(images: int, shape: Shape) -> Tensor:
    c, h, w = shape
    return torch.empty_strided((images, c, h, w), (c * h * w, 1, w * c, c))

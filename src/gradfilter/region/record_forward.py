"""A forward pass onto a tape, see `record`."""

from __future__ import annotations

import torch

from gradfilter.kernels.cpu import ACTS
from gradfilter.kernels.cpu_library import FLOATS
from gradfilter.kernels.eager import IDEMPOTENT
from gradfilter.region import grid
from gradfilter.region.conv import Conv, Placed
from gradfilter.region.kept import Key, blocks_of
from gradfilter.region.record import Recorded, channels_last, light, new, plain
from gradfilter.region.step import Step
from gradfilter.region.steps import Add
from gradfilter.region.tape import Map, Spot


class ForwardTape(Recorded):
    """Steps of a forward pass up to `end`."""

    def __init__(self, c, start: int):
        super().__init__(c)
        self.values: dict[int, Map] = {}
        self.kept: dict[Key, Map] = {}
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
        self.makes = blocks_of(self.kept)
        for block in self.makes:
            for key in block.places:
                self.kept[key].slot = self.block(block)
        self.finish(in_turns=True)

    def play(self, c) -> bool:
        """Do the steps; False where the kernels cannot."""
        if not self.readable(c):
            return False
        c.dense.update((v, new(c.images, y.shape)) for v, y in self.outputs.items())
        c.saved.blocks.update((block, block.new(c.images)) for block in self.makes)
        self.run(c)
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
            if not plain(x) or len(x) != self.c.images:
                return None
            slot = self.slot(("value", v), lambda c: channels_last(c.dense[v]))
            self.values[v] = Map(tuple(x.shape[1:]), slot)
        return self.values[v]

    def _convolution(self, step: Conv, x: Map, residual: Map | None = None) -> bool:
        c, weight = self.c, self.c.parameter(step.module, "weight")
        batch = step.norm is not None and c.batch_norm(step.norm)
        if step.pool is not None or step.shape.mode != "zeros" or batch or not plain(weight):
            return False
        place, channels = c.place(step, torch.empty((0, *x.shape), **FLOATS)), len(weight)
        op = place.op
        depthwise = op.groups > 1 and op.groups == channels == x.shape[0] and residual is None
        stem = op.groups == 1 and residual is None and light(weight) and not place.pointwise
        if not (depthwise or place.pointwise or stem):
            return False
        y = self.values[step.out] = Map((channels, *place.size))
        scale, shift = self._affine(step)
        mean, slope = self._statistics(step, place, y)
        act = ACTS[step.act[0]], float(step.act[1])
        w = self.taps(step.module) if stem else self.parameter(step.module, "weight")
        if depthwise or stem:
            top, _, left, _ = op.padding
            numbers = *op.kernel, *op.stride, top, left, *op.dilation
            geometry = torch.tensor(numbers, device="cpu")
            sizes = *x.shape[1:], *([x.shape[0]] if stem else []), channels
            self.tape.call(
                "convolve" if stem else "depthwise",
                (x, w, scale, shift, y, mean, slope, self.constant(op, geometry)),
                *sizes, *place.size, *place.side, *act,
            )  # fmt: skip
        else:
            self.tape.call(
                "pointwise", (x, w, residual, scale, shift, y, mean, slope),
                *x.shape[1:], x.shape[0], channels, *place.side, *act,
            )  # fmt: skip
        if step.out in c.wanted and (step.out, "mean") not in self.kept:
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
            self.kept[step.out, "mean"] = mean
        if keeps_slope:
            self.kept[step.out, "slope"] = slope
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
        mean = self.kept[value, "mean"] = _patches(x, side)
        self.tape.call("patch_mean", (x, mean), *x.shape[1:], x.shape[0], *side)


def _patches(x: Map, side: tuple[int, int]) -> Map:
    """A map of x's patches."""
    return Map((x.shape[0], *(-(-s // r) for s, r in zip(x.shape[1:], side, strict=True))))

"""A backward pass onto a tape, see `record`."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter.kernels.cpu import ACTS
from gradfilter.kernels.cpu_library import FLOATS
from gradfilter.kernels.eager import IDEMPOTENT
from gradfilter.region import grid
from gradfilter.region.conv import Conv, Placed
from gradfilter.region.record import Recorded, channels_last, light, new, plain
from gradfilter.region.step import Step
from gradfilter.region.steps import Add
from gradfilter.region.tape import FREE, Map, Spot


class BackwardTape(Recorded):
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
                g.slot = self.slot(("new", v), lambda c, shape=g.shape: new(c.images, shape))
        self.finish(in_turns=False)

    def play(self, c) -> bool:
        """Do the steps; False where the kernels cannot."""
        if not self.readable(c):
            return False
        tensors = self.run(c)
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
        slot = self.slot(("gradient", v), lambda c: channels_last(c.grads[v]))
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
        if step.pool is not None or batch or not plain(w) or (wants.bias and step.norm):
            return False
        if place.factors:
            return True
        depthwise = 1 < place.op.groups == len(w) and w.shape[1] == 1 and step.residual is None
        small = all(n.shape[1] <= grid.SMALL for n in getattr(place.grid, "taps", ()))
        first = place.op.groups == 1 and not wants.gx and light(w) and small
        return isinstance(place.grid, grid.Galerkin) and (depthwise or first or _matched(place))

    def _convolution(self, step: Conv, g: Map) -> None:
        c, place = self.c, self.c.places[step.out]
        weight, wants = c.parameter(step.module, "weight"), c.wiring.of[step.out]
        slope, act = self._slope(step, place)
        scale, sums, dots = self._fold(step, wants)
        x = self._kept(step.inputs[0], "mean") if wants.gw else None
        by_taps = not (place.factors or _matched(place) or place.op.groups > 1)
        w = self.taps(step.module) if by_taps else self.parameter(step.module, "weight")
        gw = self._made(step, "weight", by_taps) if wants.gw else None
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
        elif by_taps:
            s = self._sloped(step, place, g, slope, scale, sums, act, own)
            gx = self._first(step, place, s, x, w, gw, dots)
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

    def _first(self, step: Conv, place: Placed, s: Map, x, w, gw, dots) -> None:
        """A dense layer whose input wants no gradient: one product with what each tap sees of x."""
        if gw is None:
            return
        (kh, p, q), (kw, r, t) = (n.shape for n in place.grid.taps)
        seen = Map((kh * kw * x.shape[0], p, r))
        taps = [self.constant(("taps", step.out, i), n) for i, n in enumerate(place.grid.taps)]
        self.tape.call("windows", (x, *taps, seen), x.shape[0], p, r, q, t, kh, kw)
        self._products((s, *(None,) * 4, seen, w, None, gw, dots), 1.0, 1.0, 1.0)

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
        key = value, name
        block = self.c.saved.block_of(key)
        if block is None:
            slot = self.slot(key, lambda c: channels_last(c.saved[key]))
            return Map(tuple(self.c.saved[key].shape[1:]), slot)
        self.blocks.add(block)
        offset, shape = block.places[key]
        return Map(shape, self.block(block), offset)

    def _made(self, step: Conv, name: str, by_taps: bool = False) -> Spot:
        """A parameter's gradient."""
        position = self.c.runner.position[id(step.module), name]
        shape = self.c.tensors[position].shape
        order = torch.channels_last if by_taps else torch.contiguous_format
        strides = torch.empty(shape, memory_format=order).stride()
        slot = self.slot(
            ("made", step.out, name), lambda c: torch.empty_strided(shape, strides, **FLOATS)
        )
        self.made.append((position, slot))
        return Spot(slot)


def _matched(place: Placed) -> bool:
    """Whether both gradients are products, patch by patch."""
    return place.op.groups == 1 and place.op.pointwise and place.grid.diagonal is not None

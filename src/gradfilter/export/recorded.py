"""The kernels of the patch grid as single operators, so that a trace shows them whole.

`kernels.using(recorded)` runs these. Their bodies are those of `eager`; the graph that is written
from the trace has better forms of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradfilter.kernels import eager
from gradfilter.layers import ConvOp
from gradfilter.region.engine import Engine
from gradfilter.region.grid import GridConv
from gradfilter.region.run import Runner

Pair = tuple[int, int]

_library = torch.library.Library("gradfilter_export", "DEF")
_library.define("patch_mean(Tensor x, int[] side) -> Tensor")
_library.define(
    "epilogue(Tensor y, Tensor? scale, Tensor? shift, str act, float parameter, int[] side, "
    "Tensor? residual, bool stats) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "grid_backward(Tensor g, Tensor? x, Tensor w, int conv, bool gx, bool gw) -> (Tensor, Tensor)"
)
ops = torch.ops.gradfilter_export
_convolutions: list[GridConv] = []  # by the number that an operator has of them


def _patch_mean(x: Tensor, side: list[int]) -> Tensor:
    mean = eager.patch_mean(x, tuple(side))
    return mean.clone() if mean is x else mean


def _epilogue(y, scale, shift, act, parameter, side, residual, stats):
    found = eager.epilogue(y, scale, shift, (act, parameter), tuple(side), residual, stats)
    a = found[0].clone() if found[0] is y else found[0]
    return a, *(y.new_empty(0) if t is None else t for t in found[1:])


def _grid_backward(g, x, w, conv, gx, gw):
    found = _convolutions[conv].backward(g, x, w, gx, gw)
    return tuple(g.new_empty(0) if t is None else t.contiguous() for t in found)


for _body in (_patch_mean, _epilogue, _grid_backward):
    _library.impl(_body.__name__[1:], _body, "CompositeExplicitAutograd")


def patch_mean(x: Tensor, side: Pair) -> Tensor:
    return ops.patch_mean(x, list(side))


def convolve(x: Tensor, w: Tensor, op: ConvOp) -> Tensor:
    return op.forward(x, w, None)


def epilogue(y, scale, shift, act, side, residual=None, stats=True):
    name, parameter = eager.activation(act)
    a, mean, slope = ops.epilogue(y, scale, shift, name, parameter, list(side), residual, stats)
    if not stats:
        return a, None, None
    return a, mean, None if name == "none" else slope


def depthwise(x, w, scale, shift, act, stride, padding, dilation, side, stats=True):
    y = ConvOp(tuple(w.shape[2:]), stride, padding, dilation, len(w)).forward(x, w, None)
    return epilogue(y, scale, shift, act, side, None, stats)


class Recorded(GridConv):
    """A convolution on the grid whose two gradients are one operator."""

    def __init__(self, conv: GridConv):
        self.conv, self.number = conv, len(_convolutions)
        _convolutions.append(conv)

    def backward(self, g, x, w, need_gx, need_gw):
        if not (need_gx or need_gw):
            return None, None
        gx, gw = ops.grid_backward(g, x if need_gw else None, w, self.number, need_gx, need_gw)
        return gx if need_gx else None, gw if need_gw else None


@contextmanager
def recording(model: nn.Module) -> Iterator[list[GridConv]]:
    """The grid convolutions that the engine has worked out for a model, as operators.

    The model must have run on inputs of the size that is to be traced.
    """
    engines = [m.gf_engine for m in model.modules() if hasattr(m, "gf_engine")]
    for placed in _placed(engines):
        placed.grid = Recorded(placed.grid)
    try:
        yield _convolutions
    finally:
        for placed in _placed(engines):
            placed.grid = placed.grid.conv
        _convolutions.clear()


def _placed(engines: list[Engine]):
    for engine in engines:
        for program in engine.programs.values():
            for runner in getattr(program, "runners", ()):
                if isinstance(runner, Runner):
                    for places in runner.places.values():
                        yield from places.values()

"""From a trace of a training step to an ONNX graph, operator by operator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradfilter.export import arithmetic, convolutions, maps, onthegrid, shapes
from gradfilter.export.graph import Batch, Graph, Value
from gradfilter.export.pieces import Pieces, elementwise
from gradfilter.export.trace import Call, NoForm, Result, Trace
from gradfilter.region.grid import GridConv

# name of an operator of PyTorch, without what follows the dot -> its body here
OPERATORS = {
    **arithmetic.OPERATORS,
    **shapes.OPERATORS,
    **maps.OPERATORS,
    **convolutions.OPERATORS,
    **onthegrid.OPERATORS,
}


class Lowering:
    """Walks the calls of a trace once and writes them to a graph.

    A result that depends on no input is computed here and becomes a constant. `shaped` if the trace
    has the shapes of what is to be computed, which every result is then held to.
    """

    def __init__(self, graph: Graph, convolutions: list[GridConv], shaped: bool = True):
        self.graph, self.convolutions, self.shaped = graph, convolutions, shaped
        self.values: dict[Call, tuple] = {}

    def run(self, trace: Trace, inputs: list[Value]) -> list:
        """Write all calls; gives what the step gives."""
        self.values = {call: (x,) for call, x in zip(trace.inputs, inputs, strict=True)}
        for call in trace.calls:
            try:
                found = self._call(call)
                found = tuple(found) if isinstance(found, tuple | list) else (found,)
                if self.shaped:
                    _check_shapes(call, found)
            except ValueError as error:
                raise NoForm(str(error), call.where) from error
            self.values[call] = found
        return [self.whole(self.value(x)) for x in trace.outputs]

    def value(self, x):
        """What the graph has for a result of a call."""
        return self.values[x.call][x.place] if isinstance(x, Result) else x

    def whole(self, x):
        return x.whole(self.graph) if isinstance(x, Pieces) else x

    def _call(self, call: Call):
        args, kwargs = tree_map(self.value, (tuple(call.args), call.kwargs))
        if call.fixed and not _computed((args, kwargs)):
            return call.target(*tree_map(_own, args), **kwargs)
        if call.name not in OPERATORS:
            raise ValueError(f"export: there is no ONNX form of {call.target} here")
        body = OPERATORS[call.name]
        if call.name in arithmetic.PIECEWISE and any(isinstance(a, Pieces) for a in args):

            def apply(*own):
                return self._applied(body, call, own, kwargs)

            found = elementwise(self.graph, apply, args)
            if found is not None:
                return found
        if call.name not in shapes.PIECES:
            args = tree_map(self.whole, args)
        return body(self, call, *args, **kwargs)

    def _applied(self, body, call: Call, args, kwargs):
        if not _computed((args, kwargs)):
            return call.target(*tree_map(_own, args), **kwargs)
        return body(self, call, *args, **kwargs)


def _check_shapes(call: Call, found: tuple) -> None:
    """Refuse a form of an operator that would not give what it gives in PyTorch."""
    for i, x in enumerate(found):
        if i in call.read and x is not None and tuple(x.shape) != tuple(call.shapes[i]):
            told = f"{call.target} gave {tuple(call.shapes[i])}, its ONNX form {tuple(x.shape)}"
            raise ValueError(f"export: {told}")


def _computed(tree) -> bool:
    """Whether a tree of arguments has a value of the graph, or a size that is not known."""
    return any(isinstance(x, Value | Pieces | Batch) for x in tree_leaves(tree))


def _own(x):
    """A constant that an operator may write to."""
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x

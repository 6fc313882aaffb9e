"""A step as a flat list of operators, by running it and writing down what it runs.

What autograd does is seen as well, that of `torch.autograd.Function`s too. Nothing in the list
writes in place: where an operator does, its result is a new value, and so is that of every other
tensor that shares its memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from gradfilter import kernels
from gradfilter.export import recorded
from gradfilter.export.where import Where
from gradfilter.region import engine

aten = torch.ops.aten
# PyTorch would write these with indices, for which there are matrices here
WHOLE = {aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default}
SAME = {aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default}
STRIDED = {aten.as_strided.default, aten.as_strided_.default}
RESHAPES = {
    aten._unsafe_view.default: aten.view.default,
    aten._reshape_alias.default: aten.view.default,
}


class NoForm(ValueError):
    """Something that a step does and a static graph cannot do; with the module that does it."""

    def __init__(self, told: str, where: str = ""):
        super().__init__(f"{told}, in module {where!r}" if where else told)
        self.where = where


@dataclass(eq=False, repr=False)
class Call:
    """An operator that was run; in its arguments, `Result`s stand for what others gave."""

    target: object
    args: tuple
    kwargs: dict
    shapes: list = field(default_factory=list)  # of its results
    dtypes: list = field(default_factory=list)
    where: str = ""  # the module that made it, "" where that is not known
    fixed: bool = True  # whether nothing in it depends on the number of images
    read: dict[int, int] = field(default_factory=dict)  # result -> how often it is read

    @property
    def shape(self):
        return self.shapes[0]

    @property
    def name(self) -> str:
        """`mul` for aten.mul.Tensor, and for aten.mul_.Tensor too."""
        if self.target is None:
            return "input"
        name = self.target._schema.name.rpartition("::")[2]
        return name.removesuffix("_") if name[-1] == "_" else name


@dataclass(frozen=True)
class Result:
    """One result of a call."""

    call: Call
    place: int = 0


@dataclass
class Trace:
    """The calls of a function in order, its inputs and what it gave."""

    inputs: list[Call]
    calls: list[Call]
    outputs: list[Result | Tensor]


def traced(function: Callable, tensors: list[Tensor], model: nn.Module | None = None) -> Trace:
    """What a function runs on these tensors, which it gives a tuple of tensors for.

    It runs twice: what is worked out once for each size must not be part of the trace. Its calls
    know the module of `model` that made them.
    """
    recorder = Recorder(Where(model))
    inputs = [recorder.input(t) for t in tensors]
    with kernels.using(recorded), engine.traced():
        function(*tensors)
        with recorder, recorder.where.noted():
            outputs = function(*tensors)
    return _living(Trace(inputs, recorder.calls, [recorder.value(t) for t in outputs]))


class Recorder(TorchDispatchMode):
    """Writes down the operators that run while it is on."""

    def __init__(self, where: Where):
        super().__init__()
        self.where = where
        self.calls: list[Call] = []
        self.values = WeakIdKeyDictionary()  # tensor -> Result

    def input(self, t: Tensor) -> Call:
        call = Call(None, (), {}, [tuple(t.shape)], [t.dtype])
        self.values[t] = Result(call)
        return call

    def value(self, x):
        """What stands for a tensor; one that nothing here has made is a constant."""
        return self.values.get(x, x) if isinstance(x, Tensor) else x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in decompositions():
            with self:
                return decompositions()[func](*args, **kwargs)
        if (plain := _plain(func)) in decompositions():
            with self:
                return args[0].copy_(decompositions()[plain](*args, **kwargs))
        if func not in WHOLE:
            with self:  # what is made of other operators is seen as those
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NoForm(f"export: the step draws random numbers ({func})", self.where.now)
        known = tree_map(self.value, (args, kwargs))
        before = _order(args[0]) if func in STRIDED else None
        found = func(*args, **kwargs)
        if before is not None and before == _order(found):
            func, known = aten.view.default, ((known[0][0], list(found.shape)), {})
        if func is aten._local_scalar_dense.default and isinstance(known[0][0], Result):
            told = "export: the step reads a number out of a tensor, and goes by it"
            raise NoForm(told, self.where.now)
        self._note(func, known, args, found)
        return found

    def _note(self, func, known, args, found) -> None:
        results = [t for t in (found if isinstance(found, tuple | list) else (found,))]
        if not any(isinstance(t, Tensor) for t in results):
            return
        if func in SAME and isinstance(known[0][0], Result):
            self.values[found] = known[0][0]
            return
        call = self.add(RESHAPES.get(func, func), *known, results)
        if not func._schema.is_mutable:
            for i, t in enumerate(results):
                if isinstance(t, Tensor):
                    self.values[t] = Result(call, i)
            return
        if func.namespace != "aten" or len(results) != 1 or results[0] is not args[0]:
            told = f"export: {func} writes in place in a way that is not known here"
            raise NoForm(told, self.where.now)
        self._written(args[0], Result(call))

    def add(self, func, args, kwargs, results) -> Call:
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else None for t in results]
        dtypes = [t.dtype if isinstance(t, Tensor) else None for t in results]
        self.calls.append(Call(func, args, kwargs, shapes, dtypes, self.where.now))
        return self.calls[-1]

    def _written(self, t: Tensor, value: Result) -> None:
        """A tensor has a new value, and with it all that share its memory."""
        memory = t.untyped_storage()._cdata
        for other in list(self.values.keys()):
            if other is not t and other.untyped_storage()._cdata == memory:
                self.values[other] = self._after(other, t, value)
        self.values[t] = value

    def _after(self, other: Tensor, t: Tensor, value: Result) -> Result:
        """The value of a tensor after another one, in the same memory, got a new one."""
        before = self.values[other]
        if other.data_ptr() == t.data_ptr() and other.numel() == t.numel():
            if other.stride() == t.stride() and other.shape == t.shape:
                return value
            if other.is_contiguous() and t.is_contiguous():
                return self._call(aten.view.default, value, list(other.shape), like=other)
        if (place := _part(t, other)) is not None:
            return self._call(aten.slice_scatter.default, before, value, *place, like=other)
        if (place := _part(other, t)) is not None:
            return self._call(aten.slice.Tensor, value, *place, like=other)
        if _apart(other, t):
            return before
        told = "export: a part of a map is written in place in a way not known here"
        raise NoForm(told, self.where.now)

    def _call(self, func, *args, like: Tensor) -> Result:
        return Result(self.add(func, args, {}, [like]))


def _order(t: Tensor) -> tuple[int, int] | None:
    """Tells whether two tensors are the same elements in the same order; None where not known."""
    return (t.storage_offset(), t.numel()) if t.is_contiguous() else None


def _plain(func):
    """aten.silu for aten.silu_, which writes in place; None for what does not."""
    name = func._schema.name.rpartition("::")[2]
    packet = getattr(aten, name[:-1], None) if name[-1] == "_" else None
    return getattr(packet, func._overloadname, None)


def _part(t: Tensor, whole: Tensor) -> tuple[int, int, int] | None:
    """(dim, start, end) where t is consecutive slices of `whole` along one axis."""
    if t.ndim != whole.ndim or t.stride() != whole.stride():
        return None
    differ = [d for d in range(t.ndim) if t.shape[d] != whole.shape[d]]
    if len(differ) != 1:
        return None
    (d,) = differ
    start, rest = divmod(t.storage_offset() - whole.storage_offset(), whole.stride(d))
    if rest or start < 0 or start + t.shape[d] > whole.shape[d]:
        return None
    return d, start, start + t.shape[d]


def _apart(a: Tensor, b: Tensor) -> bool:
    """Whether two parts of one memory have nothing in common."""
    if a.numel() == 0 or b.numel() == 0:
        return True
    first, second = sorted((a, b), key=Tensor.storage_offset)
    distance = second.storage_offset() - first.storage_offset()
    if distance >= _reach(first):
        return True
    if first.ndim != second.ndim or first.stride() != second.stride():
        return False
    # slices of one map along one axis: as far apart as the first is long, within a row of that axis
    for d, (n, step) in enumerate(zip(first.shape, first.stride(), strict=True)):
        row = first.stride(d - 1) if d else distance + 1
        if n * step <= distance < row and distance % step == 0:
            return distance // step + second.shape[d] <= row // step
    return False


def _reach(t: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _living(trace: Trace) -> Trace:
    """Without the calls that nobody reads; notes for the others how often they are read."""

    def read(x):
        if isinstance(x, Result):
            x.call.read[x.place] = x.call.read.get(x.place, 0) + 1
        return x

    tree_map(read, trace.outputs)
    kept = []
    for call in reversed(trace.calls):
        if call.read:
            tree_map(read, (call.args, call.kwargs))
            kept.append(call)
    return Trace(trace.inputs, kept[::-1], trace.outputs)


@functools.cache
def decompositions() -> dict:
    """What PyTorch itself can write with simpler operators."""
    names = [
        "addcdiv", "elu", "elu_backward", "gelu", "gelu_backward", "hardsigmoid",
        "hardsigmoid_backward", "hardswish", "hardswish_backward", "leaky_relu",
        "leaky_relu_backward", "mish", "mish_backward", "sigmoid_backward", "silu",
        "silu_backward", "softplus", "softplus_backward", "tanh_backward", "linalg_vecdot",
        "_softmax_backward_data", "slice_backward", "select_backward", "native_layer_norm",
        "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
        "_prelu_kernel", "_prelu_kernel_backward", "pixel_shuffle", "pixel_unshuffle", "celu",
        "glu", "glu_backward", "log_sigmoid_forward", "log_sigmoid_backward", "select_scatter",
        "linalg_vector_norm", "logsumexp", "roll", "unbind", "channel_shuffle",
    ]  # fmt: skip
    return get_decompositions([getattr(aten, name) for name in names])

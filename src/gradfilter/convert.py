"""Put methods on the layers of a model, by class swap, and take them off again.

The modules, their Parameters, hooks and state-dict keys stay the same objects; only the class of a
layer changes, to a subclass of its own class with another forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradfilter import autograd
from gradfilter.assign import Spec, entries_of, is_trained, layers_of, modules_before
from gradfilter.geometry import Geometry
from gradfilter.layers import ConvOp
from gradfilter.methods import Method
from gradfilter.order import Calls, execution_order, first_calls
from gradfilter.plan import Plan
from gradfilter.region.engine import Engine, Program, unsuitable
from gradfilter.region.engine import Engined as EngineForward
from gradfilter.region.grid import takes

PARTS_DEPTH = 4  # how deep to look for parts that can be traced


def convert(
    model: nn.Module, what: Spec, *, last=None, example=None, norm="frozen", engine="auto"
) -> Plan:
    """Give the layers of `model` the backward pass of `what`, in place; returns the plan.

    `what` is a method for every layer that it supports, a mapping of name patterns to methods
    (or "frozen"; later patterns override earlier ones), or a Plan. `last=k` trains only the last k
    such layers and what follows them, and freezes every parameter before: counted in execution
    order when an `example` input is given, else in registration order. `norm="frozen"` keeps
    batch-norm statistics fixed even after `model.train()`; "batch" leaves batch norm as it was.

    With an `example`, `engine="auto"` traces the model and runs what it can on the patch grid;
    "layer" gives the same gradients at the layer level. The plan says where each layer runs.

    Converting again replaces the earlier plan, which is taken off first.
    """
    _check(model, what, last, norm, engine)
    revert(model)
    order = None if example is None else execution_order(model, example)
    layers = layers_of(model, order)
    entries, chosen, frozen = entries_of(layers, what)
    front = list(what.front) if isinstance(what, Plan) else []
    if last is not None:
        if last > len(chosen):
            raise ValueError(f"convert: last={last}, but the model has {len(chosen)} such layers")
        front = modules_before(model, layers[chosen[-last]][0], order)
    for name in front:
        _freeze(model.get_submodule(name))
    for name, (module, shape) in layers.items():
        if name in frozen:
            for part in module.modules():
                _freeze(part)
        entries[name] = replace(entries[name], trained=is_trained(module))
        # frozen layers are swapped too: plain PyTorch keeps the input of a frozen convolution
        if isinstance(shape, Geometry):
            _swap(module, Converted)
            module.gf = Layer(shape, entries[name].method)
    if norm == "frozen":
        _freeze_norms(model)
    if example is not None:
        where = engage(model, example, fused=engine == "auto")
        for name, (module, _) in layers.items():
            entries[name] = replace(entries[name], where=where.get(module))
    return Plan(entries, front)


def revert(model: nn.Module) -> None:
    """Take every method off `model`: the original classes and frozen flags, exactly."""
    for module in list(model.modules()):
        for name in module.__dict__.pop("gf_froze", ()):
            module.get_parameter(name).requires_grad_(True)
        if isinstance(module, FrozenNorm):
            module.training = module.__dict__.pop("gf_mode")
        if isinstance(module, Swapped):
            for name in ("gf", "gf_engine"):
                module.__dict__.pop(name, None)
            module.__class__ = module.gf_original


class Layer:
    """What a converted layer carries beside its parameters."""

    def __init__(self, shape: Geometry, method: Method):
        self.shape, self.method = shape, method
        self.state: tuple[Tensor, ...] = ()  # of a warm-started method
        self.before: tuple[Tensor, ...] = ()  # the state the last forward pass started from

    def start(self) -> tuple[Tensor, ...]:
        """The state to start from: a recomputed forward pass starts where the first one did."""
        return self.before if _recomputing() else self.state

    def remember(self, kept: tuple[Tensor, ...]) -> None:
        """Move on to the state after this batch; a recomputed pass ends where the first one did.

        Reentrant checkpointing runs its first pass without gradients, so that nothing is kept
        there and the state moves on when the pass is recomputed.
        """
        state = tuple(t.detach() for t in self.method.next_state(kept))
        if _transformed(state):
            return
        if not _recomputing():
            self.before = self.state
        self.state = state or self.state


def _recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass, as gradient checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _transformed(state: tuple[Tensor, ...]) -> bool:
    """Whether these are tensors of a torch.func transform, which must not outlive it."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not torch.compiler.is_compiling() and any(wrapped(t) for t in state)


class Swapped:
    """A module whose class was swapped; it pickles and copies by its original class."""

    gf_original: type[nn.Module]

    def __reduce_ex__(self, protocol):
        mixin = next(m for m in (Converted, FrozenNorm, Engined) if isinstance(self, m))
        return _rebuild, (self.gf_original, mixin), self.__dict__.copy()


class Converted(Swapped):
    """A layer with another backward pass."""

    gf: Layer

    def forward(self, input: Tensor) -> Tensor:  # named as in nn.Conv2d
        single = input.ndim == (3 if isinstance(self.gf.shape.op, ConvOp) else 1)
        x, op = self.gf.shape(input[None] if single else input)
        if self.gf.method.stateful:
            y, kept = autograd.apply(op, self.gf.method, x, self.weight, self.bias, self.gf.start())
            self.gf.remember(kept)
        else:
            y, _ = autograd.apply(op, self.gf.method, x, self.weight, self.bias)
        return y[0] if single else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backward={self.gf.method!r}"


class FrozenNorm(Swapped):
    """A batch norm that stays in evaluation mode; remembers the mode it was asked for."""

    def train(self, mode: bool = True):
        self.gf_mode = mode
        return super().train(False)


class Engined(EngineForward, Swapped):
    """A model whose forward pass the engine runs."""


def engage(model: nn.Module, example, fused: bool) -> dict[nn.Module, str]:
    """Put the engine on a model, or on those parts that can be traced; where each layer runs."""
    if isinstance(example, Mapping):
        calls: Calls = {model: ((), example)}
    else:
        args = example if isinstance(example, tuple | list) else (example,)
        calls = {model: (tuple(args), {})}
    places = _engage(model, "", calls, fused, 0)
    if hasattr(model, "gf_engine") or not places:
        return places
    return places | _engage(model, "", first_calls(model, example), fused, PARTS_DEPTH)


def _engage(
    module: nn.Module, name: str, calls: Calls, fused: bool, depth: int
) -> dict[nn.Module, str]:
    """Try a module as a whole, else its children; a module that is never called has only those."""
    layers = [m for m in module.modules() if isinstance(m, Converted)]
    if isinstance(module, Swapped) or not any(takes(m.gf.method) for m in layers):
        return {}
    places: dict[nn.Module, str] = {}
    if module in calls:
        program = _program(module, *calls[module], fused)
        if not isinstance(program, str):
            return program.places(name)
        places = {m: f"layer level: {program}" for m in layers}
        depth -= 1
    if depth >= 0:
        for child, part in module.named_children():
            places |= _engage(part, f"{name}.{child}".lstrip("."), calls, fused, depth)
    return places


def _program(module: nn.Module, args: tuple, kwargs: Mapping, fused: bool) -> Program | str:
    """Put the engine on a module called like this; its program, or why there is none."""
    reason = unsuitable(args, kwargs)
    if reason:
        return reason
    _swap(module, Engined)
    module.gf_engine = Engine(fused)
    program = module.gf_engine.program(module, args)
    if isinstance(program, str):
        del module.gf_engine
        module.__class__ = module.gf_original
    return program


def _rebuild(original: type[nn.Module], mixin: type) -> nn.Module:
    module = original.__new__(original)
    _swap(module, mixin)
    return module


@cache
def _swapped_class(original: type[nn.Module], mixin: type) -> type:
    return type(original.__name__, (mixin, original), {"gf_original": original})


def _swap(module: nn.Module, mixin: type) -> None:
    module.__class__ = _swapped_class(type(module), mixin)


def _check(model: nn.Module, what: Spec, last: int | None, norm: str, engine: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(what, Method | Mapping):
        raise TypeError(f"convert: give a method, a mapping of patterns or a Plan, got {what!r}")
    if norm not in ("frozen", "batch"):
        raise ValueError(f"convert: norm must be 'frozen' or 'batch', got {norm!r}")
    if engine not in ("auto", "layer"):
        raise ValueError(f"convert: engine must be 'auto' or 'layer', got {engine!r}")
    if last is not None and (not isinstance(last, int) or last < 1):
        raise ValueError(f"convert: last must be a whole number >= 1, got {last!r}")
    for name, module in model.named_modules():
        where = f"layer '{name}'" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"convert: {where} is scripted; convert the nn.Module before scripting")
        if ".quantized." in f"{type(module).__module__}.":
            raise TypeError(
                f"convert: {where} ({type(module).__name__}) is already quantised; "
                "convert the float model"
            )


def _freeze_norms(model: nn.Module) -> None:
    """Keep the statistics of every batch norm that has them."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            _swap(module, FrozenNorm)
            module.train(module.training)


def _freeze(module: nn.Module) -> None:
    """Freeze the parameters a module owns itself; `revert` thaws those that were trained."""
    names = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    if names:
        module.__dict__.setdefault("gf_froze", []).extend(names)

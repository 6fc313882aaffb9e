"""What a training step of a model costs under the plan that is on it, by one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradfilter import tables
from gradfilter.convert import Converted, Engined
from gradfilter.geometry import geometry
from gradfilter.layers import ConvOp
from gradfilter.methods import Exact
from gradfilter.order import call, evaluating

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Row:
    """The cost of one module. `counted` is False where its multiply-adds are not known to us."""

    name: str
    kind: str
    method: str
    trained: bool
    forward_macs: int
    backward_macs: int
    kept_bytes: int
    counted: bool = True


@dataclass(frozen=True)
class Cost:
    """Rows in execution order."""

    layers: list[Row]

    @property
    def total(self) -> Row:
        """The sum of all rows."""
        sums = (
            sum(getattr(r, f) for r in self.layers)
            for f in ("forward_macs", "backward_macs", "kept_bytes")
        )
        return Row("total", "", "", any(r.trained for r in self.layers), *sums)

    @property
    def unsupported(self) -> list[str]:
        """Modules whose multiply-adds are not counted; their kept bytes are."""
        return [r.name for r in self.layers if not r.counted]

    def to_dict(self) -> dict:
        return {"layers": [asdict(r) for r in self.layers], "total": asdict(self.total)}

    def table(self) -> str:
        """One line a module, and the total."""
        rows = [("module", "kind", "method", "trained", "forward", "backward", "kept")]
        for r in (*self.layers, self.total):
            macs = [
                f"{m / 1e6:.2f}M" if r.counted else "?" for m in (r.forward_macs, r.backward_macs)
            ]
            trained = "yes" if r.trained else "no"
            kept = f"{r.kept_bytes / 1024:.1f} KB"
            rows.append((r.name, r.kind, r.method, trained, *macs, kept))
        told = tables.aligned(rows, left=4)
        if self.unsupported:
            told += f"\nmultiply-adds not counted: {', '.join(self.unsupported)}"
        return told

    __str__ = table


def cost(model: nn.Module, example) -> Cost:
    """Multiply-adds and kept bytes per module, without a backward pass; also on the meta device.

    Convolutions and Linear layers are counted by their method. Of every other module the kept
    bytes are what autograd saves in it; a tensor that two modules keep counts once, in the layer.
    All of it is the cost at the layer level: an engine on the model is left out.
    On the meta device a rank that depends on the data cannot be known: use a real example there.
    """
    walk = _Walk(model)
    handles = [h for name, m in model.named_modules() for h in walk.watch(name, m)]
    try:
        with (
            torch.enable_grad(),
            evaluating(model),
            _layer_level(model),
            saved_tensors_hooks(walk.saved, lambda t: t),
        ):
            call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return Cost(walk.rows())


@contextmanager
def _layer_level(model: nn.Module) -> Iterator[None]:
    """Every layer by itself for a while; what warm-started layers remember is put back."""
    engined = {m: type(m) for m in model.modules() if isinstance(m, Engined)}
    states = [(m.gf, m.gf.before, m.gf.state) for m in model.modules() if isinstance(m, Converted)]
    for module in engined:
        module.__class__ = module.gf_original
    try:
        yield
    finally:
        for module, swapped in engined.items():
            module.__class__ = swapped
        for layer, before, state in states:
            layer.before, layer.state = before, state


class _Walk:
    """Collects, module by module, what a forward pass computes and keeps."""

    def __init__(self, model: nn.Module):
        self.parameters = {_storage(t) for t in (*model.parameters(), *model.buffers())}
        self.stack: list[str] = []
        self.modules: dict[str, nn.Module] = {}
        self.layer_rows: dict[str, list] = {}
        self.layer_storages: dict[int, int] = {}
        self.elements: dict[str, int] = {}
        self.other_storages: dict[int, tuple[str, int]] = {}
        self.held: list[Tensor] = []

    def watch(self, name: str, module: nn.Module) -> list:
        """Hooks that follow one module."""

        def enter(*_):
            self.modules.setdefault(name, module)
            self.stack.append(name)

        def leave(_, inputs, named, output):
            self.stack.pop()
            if isinstance(module, nn.Conv2d | nn.Linear):
                self.layer(name, module, [*inputs, *named.values()][0])
            elif isinstance(output, Tensor):
                self.elements[name] = self.elements.get(name, 0) + output.numel()

        return [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave, with_kwargs=True),
        ]

    def saved(self, t: Tensor) -> Tensor:
        """A tensor autograd saves: charged to the innermost module, once per storage.

        Detached, for an output that its own node holds on to would never be freed.
        """
        t = t.detach()
        key = _storage(t)
        if key not in self.parameters and self.stack:
            size = t.untyped_storage().nbytes()
            self.other_storages.setdefault(key, (self.stack[-1], size))
            self.held.append(t)  # a freed storage's address could be used again
        return t

    def layer(self, name: str, module: nn.Module, x: Tensor) -> None:
        """Count a convolution or Linear layer."""
        shape = module.gf.shape if isinstance(module, Converted) else geometry(module)
        if isinstance(shape, str):
            return  # not understood: an ordinary row
        trained, needs_gx = module.weight.requires_grad, x.requires_grad
        method = module.gf.method if isinstance(module, Converted) else Exact()
        with torch.no_grad():
            single = x.ndim == (3 if isinstance(shape.op, ConvOp) else 1)
            x, op = shape(x.detach()[None] if single else x.detach())
            kept = method.keep(op, x, module.gf.state if method.stateful else ())
            w = tuple(module.weight.shape)
            gx, gw = method.macs(op, tuple(x.shape), w, kept)
            forward = op.macs(tuple(x.shape), w)
            if trained:
                forward += method.keep_macs(op, tuple(x.shape), kept)
        # plain PyTorch keeps the input of a convolution even when its weight is frozen
        plain = isinstance(op, ConvOp) and not isinstance(module, Converted)
        size = sum(map(self._charge, kept)) if trained or (plain and needs_gx) else 0
        row = self.layer_rows.setdefault(name, [0, 0, 0])
        for i, value in enumerate((forward, gx * needs_gx + gw * trained, size)):
            row[i] += value

    def _charge(self, t: Tensor) -> int:
        key = _storage(t)
        if key in self.layer_storages or key in self.parameters:  # a buffer is kept anyway
            return 0
        self.held.append(t)
        self.layer_storages[key] = t.untyped_storage().nbytes()
        return self.layer_storages[key]

    def rows(self) -> list[Row]:
        kept: dict[str, int] = {}
        for key, (name, size) in self.other_storages.items():
            if key not in self.layer_storages:
                kept[name] = kept.get(name, 0) + size
        return [
            row for name, m in self.modules.items() if (row := self._row(name, m, kept)) is not None
        ]

    def _row(self, name: str, module: nn.Module, kept: dict[str, int]) -> Row | None:
        own = list(module.parameters(recurse=False))
        trained = any(p.requires_grad for p in own)
        if name in self.layer_rows:
            kind = "linear" if isinstance(module, nn.Linear) else "conv"
            method = repr(module.gf.method) if isinstance(module, Converted) else repr(Exact())
            return Row(name, kind, method, trained, *self.layer_rows[name])
        size = kept.get(name, 0)
        if isinstance(module, NORMS):
            n = self.elements.get(name, 0)
            return Row(name, "norm", "", trained, n, n * (bool(size) + trained), size)
        if own or size:
            return Row(name, _kind(module), "", trained, 0, 0, size, counted=not own)
        return None


def _kind(module: nn.Module) -> str:
    if type(module).__module__ == "torch.nn.modules.activation":
        return "activation"
    return "pool" if type(module).__module__ == "torch.nn.modules.pooling" else "other"


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata

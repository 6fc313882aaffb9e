"""What a forward pass keeps for its backward pass, by module and kind, as autograd has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradfilter.order import call
from gradfilter.region.conv import Conv
from gradfilter.region.kept import Key
from gradfilter.region.run import Runner
from gradfilter.trial import tensors

LAYERS = ("conv", "linear")
# what a step of the engine saves under these names; the rest is "other"
# ("mean" is its readers')
STEP_KINDS = {"slope": "activation", "route": "pool", "normal": "norm", "rstd": "norm"}

Place = tuple[str | None, str]  # module, kind
Part = int | tuple[int, Key]  # a storage, or one map of a block


@dataclass(frozen=True)
class Kept:
    """Bytes of one kind that one module keeps."""

    name: str
    kind: str
    bytes: int


@dataclass
class Found:
    """All that was kept.

    `engine` has the names of the convolutions that run in regions; `shared` those whose input
    another one reads too: there the region keeps its patch means once, for the first of them.
    `after` divides the bytes of a row by the layer that was called last when they were saved.
    """

    rows: list[Kept]
    engine: set[str] = field(default_factory=set)
    shared: dict[str, str] = field(default_factory=dict)
    after: dict[Place, dict[str, int]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(r.bytes for r in self.rows)

    def by_kind(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for r in self.rows:
            sums[r.kind] = sums.get(r.kind, 0) + r.bytes
        return sums

    def by_module(self, kind: str | None = None) -> dict[str, int]:
        sums: dict[str, int] = {}
        for r in self.rows:
            if kind in (None, r.kind):
                sums[r.name] = sums.get(r.name, 0) + r.bytes
        return sums


def measure(model: nn.Module, example, kinds: dict[str, str]) -> Found:
    """Run the model forward once and look at every tensor that autograd holds on to.

    `kinds` gives the kind of a module by its name. A storage counts once, in the first
    convolution or Linear layer that keeps it, else in the first module; parameters and buffers do
    not count. Run the model once before, so that an engine has its programs.
    """
    watch = _Watch(model, kinds)
    with torch.enable_grad(), watch.modules(), saved_tensors_hooks(watch.pack, lambda t: t):
        output = call(model, example)
    watch.look_into_functions(output)
    return watch.found()


class _Watch:
    """Follows a forward pass by hooks on all modules.

    They are torch's global ones: an engine makes another program of a module with hooks of its own.
    """

    def __init__(self, model: nn.Module, kinds: dict[str, str]):
        self.names = {module: name for name, module in model.named_modules()}
        self.order = {name: i for i, name in enumerate(self.names.values())}
        self.kinds = kinds
        self.own = {_storage(t) for t in (*model.parameters(), *model.buffers())}
        self.inside: list[str] = []
        self.latest = ""  # the layer called last
        self.when: dict[Part, str] = {}
        self.claims: dict[Part, list[Place]] = {}
        self.held: dict[int, Tensor] = {}  # alive, so that no storage takes the place of another
        self.bytes: dict[Part, int] = {}
        self.engine: set[str] = set()
        self.shared: dict[str, str] = {}

    @contextmanager
    def modules(self) -> Iterator[None]:
        def enter(module, _):
            if module in self.names:
                self.inside.append(self.names[module])
                if self.kinds.get(self.names[module]) in LAYERS:
                    self.latest = self.names[module]

        def leave(module, *_):
            if module in self.names and self.inside:
                self.inside.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def pack(self, t: Tensor) -> Tensor:
        name = self.inside[-1] if self.inside else ""
        t = t.detach()  # an output that its own node holds on to would never be freed
        self.claim(t, (name, self.kinds.get(name, "other")))
        return t

    def claim(self, t: Tensor, place: Place) -> None:
        key = _storage(t)
        if key not in self.own:
            self.held.setdefault(key, t)
            self.bytes.setdefault(key, t.untyped_storage().nbytes())
            self.when.setdefault(key, self.latest)
            self.claims.setdefault(key, []).append(place)

    def look_into_functions(self, output) -> None:
        """Say whose the tensors of a region are, and count what functions hold beside autograd."""
        for node in functions(output):
            if isinstance(getattr(node, "runner", None), Runner):
                self._region(node)
            for t in attributes(list(vars(node).values())):
                if _storage(t) not in self.claims:
                    self.claim(t, ("", "context"))

    def _region(self, node) -> None:
        region, kept = node.runner.region, iter(node.saved_tensors)
        for key in node.saved_keys:
            self._place(_storage(next(kept)), *self._of(key, node))
        for block in node.blocks:
            whole = _storage(next(kept))
            for key, part in self._divided(whole, block.shares()):
                self._place(part, *self._of(key, node))
        for _ in range(node.folded):
            self._place(_storage(next(kept)), None, "norm")
        self.engine |= {self.names[s.module] for s in region.steps if isinstance(s, Conv)}

    def _of(self, key: Key, node) -> Place:
        """The module, if there is one, and the kind of what a step keeps."""
        value, name = key
        steps = node.runner.region.steps
        if name != "mean":
            owner = next(self._owner(s) for s in steps if s.out == value)
            return owner, STEP_KINDS.get(name, "other")
        readers = [
            self.names[s.module]
            for s in steps
            if isinstance(s, Conv) and s.inputs[0] == value
            if s.out in node.wiring.of and node.wiring.of[s.out].gw
        ]
        readers.sort(key=self.order.get)
        self.shared |= dict.fromkeys(readers[1:], readers[0] if readers else "")
        return (readers[0], "conv") if readers else (None, "other")

    def _divided(self, whole: int, shares: dict[Key, float]) -> Iterator[tuple[Key, Part]]:
        """A storage as parts that are claimed by themselves."""
        if whole not in self.claims:
            return
        places, when, size = self.claims.pop(whole), self.when.pop(whole), self.bytes.pop(whole)
        for key, share in shares.items():
            part = whole, key
            self.claims[part], self.when[part] = list(places), when
            self.bytes[part] = round(size * share)
            yield key, part

    def _owner(self, step) -> str | None:
        module = getattr(step, "module", None) or getattr(step, "norm", None)
        return self.names.get(module)

    def _place(self, part: Part, name: str | None, kind: str) -> None:
        """What was charged to the module that the engine runs gets its real place."""
        if part in self.claims:
            was, *others = self.claims[part]
            self.claims[part] = [(was[0] if name is None else name, kind), *others]

    def found(self) -> Found:
        after: dict[Place, dict[str, int]] = {}
        for key, places in self.claims.items():
            place = next((p for p in places if p[1] in LAYERS), places[0])
            own, layer = after.setdefault(place, {}), self.when[key]
            own[layer] = own.get(layer, 0) + self.bytes[key]
        rows = [Kept(*place, sum(own.values())) for place, own in after.items()]
        rows.sort(key=lambda r: (self.order[r.name], r.kind not in LAYERS))
        return Found(rows, self.engine, self.shared, after)


def functions(output) -> list[BackwardCFunction]:
    """The Python autograd functions of the graph behind an output."""
    todo = [t.grad_fn for t in tensors(output)]
    seen, found = set(), []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [child for child, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            found.append(node)
    return found


def attributes(tree) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for part in tree for t in attributes(part)] if isinstance(tree, list | tuple) else []


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata

"""A plan: for every layer its method, whether it is trained, or why it was left exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradfilter import documents
from gradfilter.methods import Exact, Method, described, named

FROZEN = "frozen"


@dataclass(frozen=True)
class Entry:
    """What a plan says of one layer."""

    kind: str
    method: Method
    trained: bool = True
    reason: str | None = None  # why the layer was left exact
    where: str | None = None  # the region it runs in, or why it runs at the layer level

    def __str__(self) -> str:
        if not self.trained:
            return FROZEN
        if self.reason:
            return f"exact: {self.reason}"
        return repr(self.method) + (f"  {self.where}" if self.where else "")


@dataclass
class Plan(Mapping):
    """Layer name -> Entry, in the order the layers were counted.

    `front` names the modules of every kind that `last` froze.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    front: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def converted(self) -> dict[str, Method]:
        """The trained layers that have an approximate backward."""
        return {
            name: e.method
            for name, e in self.entries.items()
            if e.trained and not e.reason and not isinstance(e.method, Exact)
        }

    @property
    def frozen(self) -> list[str]:
        return [name for name, e in self.entries.items() if not e.trained]

    @property
    def exact(self) -> dict[str, str]:
        """The layers left exact, with the reason."""
        return {name: e.reason for name, e in self.entries.items() if e.reason and e.trained}

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML, or as JSON where the name ends so; `convert` takes it back.

        Where a layer runs is not written: that follows from the model.
        """
        layers = {name: _written(e) for name, e in self.entries.items()}
        documents.write(path, {"layers": layers, "front": self.front})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A plan that `save` wrote."""
        plan = read(path)
        if not isinstance(plan, cls):
            raise ValueError(f"{path} gives patterns, not a plan of layers: use plan.read")
        return plan

    def table(self) -> str:
        """One line a layer."""
        names = [name or "(the model itself)" for name in self]
        width = max(map(len, names), default=0)
        lines = [
            f"{name:<{width}}  {e.kind:<6}  {e}"
            for name, e in zip(names, self.entries.values(), strict=True)
        ]
        left = len(self) - len(self.converted) - len(self.frozen)
        lines.append(f"{len(self.converted)} converted, {len(self.frozen)} frozen, {left} exact")
        return "\n".join(lines)

    __str__ = __repr__ = table


def read(path: str | Path) -> Plan | dict[str, Method | str]:
    """What a file says of each layer, for `convert`: a saved plan, or patterns written by hand.

    A pattern of layer names is followed by a method and its knobs, or by "frozen":

        features.1[0-7].*: {method: galerkin, grid: 7}
        features.?.*: frozen
    """
    found = documents.read(path)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path}: a plan gives layer names, each with a method or {FROZEN}")
    layers = found.get("layers")
    try:
        if not isinstance(layers, dict):
            return {str(name): _method(name, what) for name, what in found.items()}
        return Plan({n: _entry(n, e) for n, e in layers.items()}, list(found.get("front") or []))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _written(e: Entry) -> dict[str, object]:
    """An entry as `_entry` reads it."""
    written = {"kind": e.kind, **described(e.method)}
    if e.reason:
        written["reason"] = e.reason
    return written if e.trained else written | {"trained": False}


def _entry(name: str, written: dict | str) -> Entry:
    if not isinstance(written, dict):
        method = _method(name, written)
        return Entry("", Exact() if method == FROZEN else method, method != FROZEN)
    about = {key: written[key] for key in ("kind", "trained", "reason") if key in written}
    knobs = {key: value for key, value in written.items() if key not in about}
    return Entry(**{"kind": "", **about}, method=_method(name, knobs))


def _method(name: str, written: dict | str) -> Method | str:
    """A method from its name, or from its name and knobs."""
    if written == FROZEN:
        return FROZEN
    knobs = {"method": written} if isinstance(written, str) else written
    if not isinstance(knobs, dict) or "method" not in knobs:
        raise ValueError(f"layer {name!r}: give `method: NAME` and its knobs, or {FROZEN}")
    knobs = dict(knobs)
    try:
        return named(knobs.pop("method"), **knobs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"layer {name!r}: {error}") from error

"""A plan: for every layer its method, whether it is trained, or why it was left exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gradfilter.methods import Exact, Method

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

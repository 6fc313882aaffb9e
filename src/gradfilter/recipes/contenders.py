"""What is compared: a method on the last so many layers of a network."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gradfilter import methods
from gradfilter.recipes.settings import Settings

ALL = "all"


@dataclass(frozen=True)
class Contender:
    """A method with its knobs; `last` is how many layers it trains, None for all."""

    method: str
    knobs: tuple[tuple[str, float], ...]
    last: int | None

    @property
    def spelled(self) -> str:
        """The method as the command line takes it."""
        return ":".join([self.method, *([self._knobs("=", ",")] if self.knobs else [])])

    @property
    def title(self) -> str:
        return f"{self.method} {self._knobs('=', ', ')}".rstrip()

    @property
    def depth(self) -> str:
        return "all layers" if self.last is None else f"last {self.last}"

    @property
    def name(self) -> str:
        """For folders: `galerkin-grid7-last4`."""
        depth = ALL if self.last is None else f"last{self.last}"
        return "-".join([self.method, *([self._knobs("", "-")] if self.knobs else []), depth])

    @property
    def exact(self) -> bool:
        return self.method == "exact"

    def settings(self, base: Settings, seed: int) -> Settings:
        """Those of its run with this seed."""
        return base.changed(method=self.method, last=self.last, seed=seed, **dict(self.knobs))

    def _knobs(self, equals: str, between: str) -> str:
        return between.join(f"{knob}{equals}{value:g}" for knob, value in self.knobs)


def contenders(spelled: list[str], depths: list[int | None]) -> list[Contender]:
    """Every method at every depth, each once; ValueError for what is no method or has no knob."""
    chosen = [_read(text) for text in spelled]
    pairs = [Contender(*method, last) for method in chosen for last in depths]
    return list(dict.fromkeys(pairs))


def _read(text: str) -> tuple[str, tuple[tuple[str, float], ...]]:
    """`galerkin:grid=7,bits=8` as a name and its knobs, as `methods.named` accepts them."""
    name, _, rest = text.partition(":")
    knobs = {}
    for part in rest.split(",") if rest else []:
        knob, _, value = part.partition("=")
        try:
            knobs[knob.strip()] = json.loads(value)
        except ValueError:
            raise ValueError(f"{text!r}: write a method as NAME:KNOB=NUMBER,...") from None
    try:
        methods.named(name, **knobs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r}: {error}") from error
    return name, tuple(knobs.items())

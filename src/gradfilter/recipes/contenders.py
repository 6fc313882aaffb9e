"""What is compared: a method on the last so many layers of a network, or a plan for all of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradfilter import methods
from gradfilter.plan import read
from gradfilter.recipes.settings import Settings

ALL = "all"
PLAN = "plan"  # in place of a method's name


@dataclass(frozen=True)
class Contender:
    """A method with its knobs; `last` is how many layers it trains, None for all.

    Or a plan, by its file, which says itself what is trained. Its `content` is as it was when the
    comparison began: a long one must not change on its way. `shown` is what its title calls it.
    """

    method: str
    knobs: tuple[tuple[str, float], ...]
    last: int | None
    plan: str | None = None
    content: bytes = field(default=b"", repr=False)
    shown: str = ""

    @property
    def spelled(self) -> str:
        """The method as the command line takes it."""
        if self.plan:
            return f"{PLAN}:{self.plan}"
        return ":".join([self.method, *([self._knobs("=", ",")] if self.knobs else [])])

    @property
    def title(self) -> str:
        if self.plan:
            return PLAN if self.shown == PLAN else f"{PLAN} {self.shown}"  # plan.yaml is its name
        return f"{self.method} {self._knobs('=', ', ')}".rstrip()

    @property
    def depth(self) -> str:
        if self.plan:
            return "as planned"
        return "all layers" if self.last is None else f"last {self.last}"

    @property
    def name(self) -> str:
        """For folders: `galerkin-grid7-last4`; a plan that was changed is another contender."""
        if self.plan:
            content = hashlib.blake2b(self.content, digest_size=3).hexdigest()
            return f"{PLAN}-{Path(self.plan).stem}-{content}"
        depth = ALL if self.last is None else f"last{self.last}"
        return "-".join([self.method, *([self._knobs("", "-")] if self.knobs else []), depth])

    @property
    def exact(self) -> bool:
        return self.method == "exact"

    def settings(self, base: Settings, seed: int) -> Settings:
        """Those of its run with this seed."""
        if self.plan:
            return base.changed(plan=self.plan, seed=seed)
        return base.changed(method=self.method, last=self.last, seed=seed, **dict(self.knobs))

    def _knobs(self, equals: str, between: str) -> str:
        return between.join(f"{knob}{equals}{value:g}" for knob, value in self.knobs)


def contenders(spelled: list[str], depths: list[int | None]) -> list[Contender]:
    """Every method at every depth and every plan, each once; ValueError for what is neither."""
    found: list[Contender] = []
    for text in spelled:
        if text.startswith(f"{PLAN}:"):
            found.append(_planned(text.removeprefix(f"{PLAN}:")))
        else:
            found += [Contender(*_read(text), last) for last in depths]
    return _told_apart(list({c.name: c for c in found}.values()))


def _planned(file: str) -> Contender:
    if not file:
        raise ValueError(f"{PLAN}: needs a file, as in {PLAN}:plan.yaml")
    read(file)  # or refuse it before anything is trained
    return Contender(PLAN, (), None, file, Path(file).read_bytes(), Path(file).stem)


def _told_apart(found: list[Contender]) -> list[Contender]:
    """Plans of one name, as a/plan.yaml and b/plan.yaml, get their whole path as a title."""
    titles = Counter(c.title for c in found if c.plan)
    return [replace(c, shown=c.plan) if titles[c.title] > 1 else c for c in found]


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

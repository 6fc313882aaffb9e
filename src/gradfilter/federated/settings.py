"""The settings of a federated run beside those of training, and both as one Flower run config.

As `recipes.settings`, nothing heavier than the standard library is imported here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from gradfilter.recipes.settings import (
    BEFORE,
    Settings,
    amount,
    checked,
    keep_fixed,
    named,
    option,
    read,
    share,
    switch,
    text,
    whole,
)

# What `gradfilter train` has and clients have no use for: a client is told its part.
UNUSED = (
    "parts", "part", "test", "cache_features", "cache_dir", "save_every", "compare", "tensorboard",
)  # fmt: skip
DEFAULTS = {"epochs": 1, "split": "dirichlet", "test": "all"}  # of a client, a round
HELP = {
    "data": "an image folder, or the name of a data set; on a server, its test pictures count",
    "split": "the clients' parts: of few classes each, of skewed classes, or alike",
    "epochs": "times over its pictures that a client trains in a round",
    "steps": "so many steps a client and round instead",
}
OWN = ("data", "root", "weights", "device", "workers", "in_memory")  # a device may have its own


def address(value: str) -> str:
    """Where a server listens: `HOST:PORT`."""
    host, _, port = text(value).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{value!r} is not HOST:PORT")
    return value


@dataclass(frozen=True)
class Federation:
    """Who trains, in how many rounds, and how their results become one."""

    rounds: int = option(10, whole, "times that clients train and their results are averaged",
                         fixed=False)  # fmt: skip
    strategy: str = option(
        "fedavg", text, "how results become one network", choices=("fedavg", "fedprox", "fedadam")
    )
    mu: float = option(0.01, amount, "fedprox: pull towards the global network", fixed=False)
    server_lr: float = option(0.001, amount, "fedadam: learning rate of the server", fixed=False)
    fraction: float = option(1.0, share, "share of the clients that train in a round", fixed=False)
    clients: int = option(2, whole, "fewest clients to begin a round with", fixed=False)
    answer_minutes: float = option(
        60.0, amount, "minutes after which a round goes on without who has not answered",
        fixed=False,
    )  # fmt: skip
    join_minutes: float = option(
        10.0, amount, "minutes to wait for enough clients before giving up", fixed=False
    )
    simulate: int | None = option(
        None, whole, "run so many clients on this machine, each with a part of the data"
    )
    in_process: bool = option(
        False, switch, "with --simulate: one client after another in this process", fixed=False
    )
    cpus: int = option(1, whole, "with --simulate: cores a client", fixed=False)
    gpus: float = option(0.0, amount, "with --simulate: share of a GPU a client", fixed=False)
    server: str | None = option(
        None, address, "HOST:PORT of a running server (gradfilter federate-server)", fixed=False
    )
    keys: str | None = option(
        None, text, "folder of that server's certificates (gradfilter federate-keys)", fixed=False
    )

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name)))
        if self.fraction == 0:
            raise ValueError("fraction: 0 of the clients cannot train")
        if self.simulate and self.server:
            raise ValueError("simulate runs clients here, server is for those elsewhere: choose")
        if self.simulate and self.clients > self.simulate:
            object.__setattr__(self, "clients", self.simulate)


Both = tuple[Settings, Federation]


def names() -> list[str]:
    """Every option of `gradfilter federate`."""
    return [f.name for f in fields(Settings) if f.name not in UNUSED] + [
        f.name for f in fields(Federation)
    ]


def of(options: dict[str, object], base: Both | None = None) -> Both:
    """The settings with these options, all checked."""
    settings, federation = base or (Settings(**DEFAULTS), Federation())
    options = named(options, names())
    mine = {f.name for f in fields(Federation)}
    settings = settings.changed(**{k: v for k, v in options.items() if k not in mine})
    federation = replace(federation, **{k: v for k, v in options.items() if k in mine})
    if settings.capture and federation.strategy == "fedprox":
        raise ValueError("fedprox changes every gradient, which a recorded step cannot: no capture")
    if settings.norm == "batch" and federation.strategy == "fedadam":
        # Adam's step has the server's rate whatever the change: a variance would go below zero.
        raise ValueError("fedadam cannot step batch-norm statistics: norm: frozen")
    return settings, federation


def resumed(options: dict[str, object], before: Both) -> Both:
    """As `of`, but refuses what a run cannot change on its way."""
    settings, federation = of(options, before)
    both = full_paths(settings), federation
    for old, new in zip(before, both, strict=True):
        keep_fixed(old, new)
    return both


def full_paths(settings: Settings) -> Settings:
    """The settings as other processes, and a later resumption from elsewhere, can use them."""
    from gradfilter.recipes.training import place

    paths = {k: Path(v).absolute() for k in ("root", "plan", "out") if (v := getattr(settings, k))}
    if settings.weights not in ("library", "none"):
        paths["weights"] = Path(settings.weights).absolute()
    return settings.changed(data=place(settings.data), **paths)


def as_dict(both: Both) -> dict[str, object]:
    """Every option as numbers, texts and lists."""
    everything = both[0].as_dict() | asdict(both[1])
    return {name: everything[name] for name in names()}


def load(path: Path) -> Both:
    """The settings that a run wrote, which goes on as it began."""
    return of(BEFORE | read(path, names()))


def to_config(both: Both) -> dict[str, str | int | float | bool]:
    """All settings as Flower's run config, which knows no lists and no absence.

    A plan travels as its text, so that no client needs the file.
    """
    found = as_dict(both)
    if found["plan"]:
        from gradfilter import documents

        found["plan"] = json.dumps(documents.read(found["plan"]))
    lists = {k: ",".join(map(str, v)) for k, v in found.items() if isinstance(v, list)}
    return {k.replace("_", "-"): v for k, v in (found | lists).items() if v is not None}


def from_config(config: dict, plan: Path) -> Both:
    """The settings that `to_config` wrote; a plan goes into the file `plan`.

    An option that is not known here is refused: a device of another version would train otherwise.
    """
    found = named(config, names())
    if found.get("plan"):
        plan.write_text(found["plan"])  # JSON is YAML too
        found["plan"] = str(plan)
    return of(found)

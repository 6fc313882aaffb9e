"""The settings of a training run: every option once, with its default, its kind and its help.

The command line makes its options from this file, without torch: nothing heavier than the standard
library is imported here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path

REFERENCE_BATCH = 128  # the batch that --lr is for
KNOBS = ("patch", "grid", "bases", "energy", "rank", "bits")  # of a method
# what a comparison chooses for each of its runs, or has no use for
CHOSEN = ("method", *KNOBS, "last", "plan", "seed", "out", "compare", "cache_features", "cache_dir")
# what changes nothing without another option
BESIDE = dict.fromkeys(("parts", "part", "per_part", "alpha", "split_seed"), "split")
BESIDE |= {"cache_dir": "cache_features"}
BEFORE = {"backbone_lr": 1.0}  # how runs were that do not tell: they are older than the option


def whole(value: str | int) -> int:
    """A whole number of at least 1."""
    number = _number(int, value)
    if number < 1:
        raise ValueError(f"{value!r} is not a whole number >= 1")
    return number


def count(value: str | int) -> int:
    """A whole number of at least 0."""
    number = _number(int, value)
    if number < 0:
        raise ValueError(f"{value!r} is not a whole number >= 0")
    return number


def amount(value: str | float) -> float:
    """A number of at least 0."""
    number = _number(float, value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{value!r} is not a number >= 0")
    return number


def share(value: str | float) -> float:
    """A number from 0 to 1."""
    number = amount(value)
    if number > 1:
        raise ValueError(f"{value!r} is not between 0 and 1")
    return number


def switch(value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def text(value: str | Path) -> str:
    if not isinstance(value, str | Path):
        raise ValueError(f"{value!r} is not text")
    return str(value)


def colour(value: str | float | list) -> tuple[float, float, float]:
    """A number for each of red, green and blue, or one for all: `127.5` or `124,116,104`."""
    parts = value.split(",") if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, list | tuple) else [parts]
    if len(parts) not in (1, 3):
        raise ValueError(f"{value!r} is neither one number nor three")
    return tuple(_number(float, part) for part in parts * (3 // len(parts)))


def _number(kind: type, value):
    try:
        if isinstance(value, bool):
            raise ValueError
        number = kind(value)
        if number != float(value):
            raise ValueError
        return number
    except (TypeError, ValueError):
        name = "a whole number" if kind is int else "a number"
        raise ValueError(f"{value!r} is not {name}") from None


def option(default, kind: Callable, help: str, *, choices=None, fixed=True) -> Field:
    """One setting. `fixed`: a resumed run has to keep it."""
    about = {"kind": kind, "help": help, "choices": choices, "fixed": fixed}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Settings:
    """What a run trains, on what, and how."""

    data: str = option("", text, "an image folder, or the name of a data set")
    root: str | None = option(
        None, text, "folder in which named data sets lie or are downloaded to", fixed=False
    )
    download: bool = option(True, switch, "download a named data set if need be", fixed=False)
    in_memory: bool = option(False, switch, "decode all pictures once and hold them in memory")
    size: int | None = option(None, whole, "image side in pixels; by default the network's own")
    augment: str | None = option(
        None,
        text,
        "random changes to training pictures; by default what suits the data",
        choices=("none", "light", "standard"),
    )

    split: str | None = option(
        None,
        text,
        "train on one of --parts parts: of few classes each, of skewed classes, or alike",
        choices=("non-iid", "dirichlet", "iid"),
    )
    parts: int = option(2, whole, "how many parts the training pictures are split in")
    part: int = option(0, count, "which part to train on, from 0")
    per_part: int = option(2, whole, "non-iid: runs of classes a part has")
    alpha: float = option(0.5, amount, "dirichlet: the smaller, the more skewed")
    split_seed: int = option(0, count, "seed of the split, apart from --seed")
    test: str = option(
        "own", text, "test a part on its own classes or on all of them", choices=("own", "all")
    )

    model: str = option(
        "tf_efficientnet_lite0", text, "a torchvision, timm or segmentation-models-pytorch network"
    )
    weights: str = option("library", text, "library, none, or a file such as RUN/best.pt")

    mean: tuple[float, float, float] | None = option(
        None, colour, "mean that the network's input is less, in bytes; by default as the weights"
    )
    std: tuple[float, float, float] | None = option(
        None, colour, "deviation that its input is divided by; by default as the weights want"
    )

    method: str = option("galerkin", text, "backward method of the trained layers")
    patch: int | None = option(None, whole, "patch side, in pixels")
    grid: int | None = option(None, whole, "patches a side")
    bases: int | None = option(None, whole, "Walsh-Hadamard coefficients per patch")
    energy: float | None = option(None, share, "share of the energy that a decomposition keeps")
    rank: int | None = option(None, whole, "rank of every mode of a decomposition")
    bits: int | None = option(None, whole, "8: keep what the method keeps in 8 bits, and round g")
    last: int | None = option(None, whole, "train only the last so many layers")
    plan: str | None = option(None, text, "file that gives each layer its method, or frozen")
    norm: str = option(
        "frozen", text, "batch-norm statistics: kept, or taken from each batch, of 2 pictures or "
        "more",
        choices=("frozen", "batch"),
    )  # fmt: skip
    engine: str = option(
        "auto", text, "run what can be on the patch grid, or each layer by itself",
        choices=("auto", "layer"),
    )  # fmt: skip

    epochs: int = option(10, whole, "times over the training pictures", fixed=False)
    steps: int | None = option(None, whole, "stop after so many steps instead", fixed=False)
    batch: int = option(32, whole, "pictures a step and process")
    lr: float = option(
        0.05, amount, f"highest learning rate, for {REFERENCE_BATCH} pictures a step: scaled to "
        "the batch in proportion", fixed=False,
    )  # fmt: skip
    backbone_lr: float | None = option(
        None, share, "learning rate of all but the output layer, as a share of --lr; by default "
        "1, but less where all layers of a network with trained weights are trained: 0.1 for "
        f"{REFERENCE_BATCH} pictures a step, 0.2 for a quarter of them",
    )  # fmt: skip
    momentum: float = option(0.9, share, "momentum of SGD", fixed=False)
    weight_decay: float = option(1e-4, amount, "weight decay of SGD", fixed=False)
    warmup: float = option(0.1, share, "share of the steps in which the rate rises", fixed=False)
    clip: float = option(2.0, amount, "largest norm of the gradient; 0 is no limit", fixed=False)
    seed: int = option(0, count, "seed of everything random but the split")
    device: str = option("auto", text, "auto, cpu, cuda, cuda:1, ...", fixed=False)
    amp: bool = option(False, switch, "compute in bfloat16 where autocast does", fixed=False)
    capture: bool = option(
        False, switch, "record the step once as a CUDA graph and replay it", fixed=False
    )
    deterministic: bool = option(
        True, switch, "the same bits each time on the same machine, at some cost on a GPU",
        fixed=False,
    )  # fmt: skip
    workers: int | None = option(
        None, count, "processes that load pictures; by default as the machine has", fixed=False
    )

    cache_features: bool = option(
        False, switch, "store what the frozen front part makes of each picture, and train from it"
    )
    cache_dir: str | None = option(
        None, text, "where those are stored, to share between runs; else in the run", fixed=False
    )

    out: str | None = option(None, text, "folder of the run; by default a new one in runs/")
    save_every: float = option(5.0, amount, "minutes between checkpoints in an epoch", fixed=False)
    compare: bool = option(True, switch, "measure a few steps against exact training", fixed=False)
    tensorboard: bool = option(True, switch, "write TensorBoard events", fixed=False)

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name)))
        if self.part >= self.parts:
            raise ValueError(f"part must be 0 to {self.parts - 1} of {self.parts} parts")
        if self.bits not in (None, 8):
            raise ValueError(f"bits must be 8, got {self.bits}")
        if self.std and not min(self.std) > 0:
            raise ValueError(f"std must be above 0, got {', '.join(map(str, self.std))}")
        if self.plan and self.knobs():
            raise ValueError(f"plan gives each layer its method, {next(iter(self.knobs()))} too")
        if self.cache_features and self.augment not in (None, "none"):
            raise ValueError("cache_features stores one output per picture and needs augment: none")

    def check_used(self) -> None:
        """Refuse an option that would change nothing for want of another."""
        for f in fields(self):
            needed, value = BESIDE.get(f.name), getattr(self, f.name)
            if needed and value != f.default and not getattr(self, needed):
                raise ValueError(f"{f.name}: {value} changes nothing without {needed}")

    def peak_rate(self, batch: int) -> float:
        """The highest learning rate at a batch of so many pictures, over all processes."""
        return self.lr * batch / REFERENCE_BATCH

    def knobs(self) -> dict[str, int | float]:
        """The method's settings that were given."""
        return {name: value for name in KNOBS if (value := getattr(self, name)) is not None}

    def as_dict(self) -> dict[str, object]:
        """Every setting as numbers, texts and lists."""
        plain = asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}

    def save(self, path: Path) -> None:
        """Write every setting as YAML."""
        from gradfilter import documents

        documents.write(path, self.as_dict())

    def changed(self, **options) -> Settings:
        """With other options, all checked; names may have dashes."""
        return replace(self, **merged({}, named(options, names())))

    def resumed(self, **options) -> Settings:
        """As `changed`, but refuses what a run cannot change on its way."""
        changed = self.changed(**options)
        keep_fixed(self, changed)
        return changed


def keep_fixed(before, after) -> None:
    """Refuse a change, between two settings of one class, of an option that a run keeps."""
    for f in fields(before):
        old = getattr(before, f.name)
        if f.metadata["fixed"] and getattr(after, f.name) != old:
            raise ValueError(
                f"this run has {f.name}: {old}, which a resumed run keeps; "
                "start another run to change it"
            )


def merged(options: dict, later: dict) -> dict:
    """Options with later ones over them; epochs take the place of steps that were asked before."""
    return options | ({"steps": None} if "epochs" in later else {}) | later


def names() -> list[str]:
    return [f.name for f in fields(Settings)]


def load(path: Path) -> Settings:
    """The settings that a run or a comparison wrote, which goes on as it began."""
    return Settings().changed(**BEFORE | read(path))


def read(path: Path, known: Iterable[str] = ()) -> dict[str, object]:
    """The options that a YAML or JSON file gives; by default those of `Settings` are known."""
    from gradfilter import documents

    found = documents.read(path)
    if not isinstance(found, dict | None):
        raise ValueError(f"{path}: options are written as `name: value`, one a line")
    try:
        return named(found or {}, known or names())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def named(options: dict, known: Iterable[str]) -> dict[str, object]:
    """Options by their field names, all of them known."""
    known = list(known)
    found = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"there is no option {key!r}{hint}")
        found[name] = value
    return found


def checked(f: Field, value):
    """A value of a setting as its kind, or a ValueError that names the setting."""
    if value is None and f.default is None:
        return None
    try:
        value = f.metadata["kind"](value)
    except ValueError as error:
        raise ValueError(f"{f.name}: {error}") from None
    choices = f.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{f.name}: {value!r} is none of {', '.join(choices)}")
    return value

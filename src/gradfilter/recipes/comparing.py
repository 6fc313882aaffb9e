"""Several methods, depths and seeds on one network and one data set: trained, measured, written.

Every run is one of `gradfilter train` in a folder of its own; what is done is not done again.
"""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from pathlib import Path

from gradfilter import documents, environment
from gradfilter.fidelity import Match
from gradfilter.profiler import Spread
from gradfilter.recipes import comparison, measuring, page, parallel, recording, training
from gradfilter.recipes import settings as options
from gradfilter.recipes.checkpoint import NotWritten, write
from gradfilter.recipes.comparison import DONE, FAILED, STARTED, WAITING, Comparison, Entry
from gradfilter.recipes.contenders import Contender, contenders
from gradfilter.recipes.measuring import Layer, Measured
from gradfilter.recipes.parallel import World
from gradfilter.recipes.screen import Screen
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import TASKS, Diverged, Trainer

SHARED, MEASURED, OUTCOME = "settings.yaml", "measured.json", "outcome.json"
PAGE, NUMBERS, LINES = "comparison.html", "comparison.json", "comparison.csv"
RUNS, PLANS = "runs", "plans"

# what a comparison that goes on may change: no result depends on it
FREE = ("root", "download", "device", "workers", "save_every", "tensorboard", *options.CHOSEN)


class Hushed:
    """The bars of a run on another screen, under its name, without its lines."""

    def __init__(self, screen: Screen, name: str):
        self.screen, self.name = screen, name

    def say(self, text: str) -> None:
        pass

    def bar(self, text: str, total: int, done: int = 0) -> AbstractContextManager:
        return self.screen.bar(f"{self.name}: {text}", total, done)


def compare(
    settings: Settings,
    methods: Sequence[str],
    depths: Sequence[int | None],
    seeds: Sequence[int],
    *,
    out: str | Path,
    pictures: int | None = None,
    quiet: bool = False,
) -> Comparison:
    """Train and measure every method at every depth with every seed, in the folder `out`.

    `methods` are written as `galerkin:grid=7`, a depth of None is all layers, the settings are
    those that all runs share. Costs are of a step of so many `pictures`: by default of a batch, on
    a CPU of no more than `measuring.PICTURES`. After every run `comparison.html`, `.csv` and
    `.json` are written anew; called again, it goes on where it was stopped.
    """
    with parallel.world(settings.device) as world:
        if world.size > 1:
            raise ValueError("compare runs in one process: start it without torchrun")
        found = contenders(list(methods), list(depths))
        work = Comparing(settings, found, list(dict.fromkeys(seeds)), Path(out), Screen(quiet))
        return work.go(world, pictures)


class Comparing:
    """A comparison on its way."""

    def __init__(
        self,
        settings: Settings,
        found: list[Contender],
        seeds: list[int],
        out: Path,
        screen: Screen,
    ):
        if not found or not seeds:
            raise ValueError("give at least one method, one depth and one seed")
        for name in options.CHOSEN:
            if name != "compare" and getattr(settings, name) != _default(name):
                raise ValueError(f"compare does not take {name}: leave it out")
        settings.check_used()
        self.settings = settings.changed(data=training.place(settings.data), compare=False)
        self.contenders, self.seeds, self.out, self.screen = found, seeds, out, screen
        self._check_folder()

    def go(self, world: World, pictures: int | None) -> Comparison:
        """Measure, then train what is not trained yet."""
        self.data, _ = training.opened(self.settings)
        try:
            self._measure(world, pictures)
            self._train()
        except KeyboardInterrupt:
            told = f"stopped; what is done is in {self.out}: the same command goes on"
            raise training.Stopped(told) from None
        found = self.gather()
        self.screen.say(f"{found.table()}\npage: {self.out / PAGE}")
        return found

    def _train(self) -> None:
        runs = [(c, seed) for seed in self.seeds for c in self.contenders]
        left = [run for run in runs if not (self._folder(*run) / OUTCOME).is_file()]
        self.screen.say(f"{len(left)} of {len(runs)} runs to train")
        self._keep_plans()
        self._write()
        with self.screen.bar("runs", len(runs), len(runs) - len(left)) as advance:
            for contender, seed in left:
                self.screen.say(self._run(contender, seed))
                self._write()
                advance()

    def _run(self, contender: Contender, seed: int) -> str:
        """Train one run, or go on with it; what it came to, in a line."""
        folder, failed, seconds = self._folder(contender, seed), None, None
        name = f"{contender.title}, {contender.depth}, seed {seed}"
        settings = contender.settings(self.settings, seed).changed(out=str(folder))
        if contender.plan:
            settings = settings.changed(plan=self._kept(contender))
        resume = (folder / recording.CONFIG).is_file()
        try:
            result = training.train(settings, resume=resume, screen=Hushed(self.screen, name))
            seconds, told = result.seconds, f"{result.headline} {self._end(folder):.1%}"
        except (Diverged, RuntimeError, MemoryError) as error:
            failed = str(error).strip().partition("\n")[0].partition(": go on with")[0]
            failed = failed or type(error).__name__
            told = f"failed: {failed}"
        folder.mkdir(parents=True, exist_ok=True)
        outcome = {"seconds": seconds, "failed": failed}
        write(folder / OUTCOME, json.dumps(outcome).encode())
        spent = f" in {seconds:.0f} s" if seconds is not None else ""
        return f"{name}: {told}{spent}"

    def _end(self, folder: Path) -> float:
        return recording.read_metrics(folder)[-1][f"test_{self._metric()}"]

    def _metric(self) -> str:
        return TASKS[self.data.task].headline

    def _measure(self, world: World, pictures: int | None) -> None:
        """Costs of all contenders: those of an earlier call, where it measured the same ones."""
        on_cpu, batch = world.device.type == "cpu", self.settings.batch
        count = pictures or (min(batch, measuring.PICTURES) if on_cpu else batch)
        names = [c.name for c in self.contenders]
        path = self.out / MEASURED
        found = documents.read(path) if path.is_file() else None
        if not found or found["asked"] != count or not set(names) <= set(found["contenders"]):
            found = {"asked": count, **self._fresh(world, count)}
            write(path, json.dumps(found).encode())
        self.measured = {name: _measured(found["contenders"][name]) for name in names}
        self.inference, self.machine = Spread(**found["inference"]), found["machine"]
        self.network = found["network"]

    def _fresh(self, world: World, count: int) -> dict:
        """Everything measured now, as it is saved."""
        self.screen.say(f"measuring a step of {len(self.contenders)} contenders")
        trainers = {}
        steps = len(self.contenders) + measuring.total(len(self.contenders))
        with self.screen.bar("measuring", steps) as advance:
            for contender in self.contenders:
                trainers[contender.name] = self._trainer(contender, world)
                advance()
            self._begin()
            found, inference = measuring.measure(trainers, self.data.train, count, advance)
        first = next(iter(trainers.values()))
        return {
            "machine": _machine(),
            "network": {"size": first.size, "weights": first.network.weights},
            "inference": asdict(inference),
            "contenders": {name: asdict(m) for name, m in found.items()},
        }

    def _trainer(self, contender: Contender, world: World) -> Trainer:
        data, settings = self.data, contender.settings(self.settings, self.seeds[0])
        try:
            return Trainer(
                settings, data.task, data.classes,
                ignore=data.ignore, level=data.augment, world=world,
            )  # fmt: skip
        except (RuntimeError, AssertionError, IndexError) as error:
            size = settings.size
            told = f"{size}x{size} images" if size else "images of its usual size"
            first = str(error).strip().partition("\n")[0]
            raise ValueError(f"{settings.model} cannot take {told}: {first}") from error

    def gather(self) -> Comparison:
        """All that is known so far."""
        metric = self._metric()
        entries = [
            Entry(c, self.measured[c.name], [self._found(c, seed) for seed in self.seeds], metric)
            for c in self.contenders
        ]
        parts = (self._about(), metric, entries, self.inference, self.machine, self._command())
        return Comparison(*parts)

    def _found(self, contender: Contender, seed: int) -> comparison.Run:
        """A run as its folder tells it."""
        folder = self._folder(contender, seed)
        rows, outcome = recording.read_metrics(folder), {}
        if (folder / OUTCOME).is_file():
            outcome = json.loads((folder / OUTCOME).read_text())
            status = FAILED if outcome["failed"] else DONE
        else:
            status = STARTED if rows else WAITING
        settings = contender.settings(self.settings, seed)
        where = str(folder.relative_to(self.out))
        about = outcome.get("seconds"), outcome.get("failed"), train_command(settings)
        return comparison.Run(seed, where, status, rows, *about)

    def _about(self) -> dict[str, object]:
        s, data = self.settings, self.data
        return {
            "model": s.model,
            **self.network,
            "data": data.name,
            "task": data.task,
            "classes": len(data.classes),
            "train_pictures": len(data.train),
            "test_pictures": len(data.test),
            "seeds": self.seeds,
            "settings": {k: v for k, v in s.as_dict().items() if k not in options.CHOSEN},
            "date": datetime.date.today().isoformat(),
        }

    def _write(self) -> None:
        """The page and the numbers, as they stand."""
        found = self.gather()
        content = found.to_dict()
        write(self.out / NUMBERS, (json.dumps(content, indent=1) + "\n").encode())
        write(self.out / LINES, found.csv().encode())
        write(self.out / PAGE, page.render(content).encode())

    def _check_folder(self) -> None:
        """Refuse a folder of runs with other settings."""
        path = self.out / SHARED
        if not path.is_file():
            return
        before = options.load(path)
        for f in fields(Settings):
            was, now = (getattr(s, f.name) for s in (before, self.settings))
            if f.name not in FREE and was != now:
                was, now = ("the default" if v is None else v for v in (was, now))
                raise ValueError(
                    f"{self.out} holds a comparison with {f.name}: {was}, now {now}; "
                    "change --out to make another"
                )

    def _begin(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.settings.save(self.out / SHARED)
        except OSError as error:
            raise NotWritten(f"{self.out}: {error.strerror or error}") from error

    def _folder(self, contender: Contender, seed: int) -> Path:
        return self.out / RUNS / f"{contender.name}-seed{seed}"

    def _kept(self, contender: Contender) -> Path:
        return self.out / PLANS / f"{contender.name}{Path(contender.plan).suffix}"

    def _keep_plans(self) -> None:
        """Copies to train from: the files may be written anew while runs are on their way."""
        for contender in self.contenders:
            if contender.plan:
                self._kept(contender).parent.mkdir(exist_ok=True)
                write(self._kept(contender), contender.content)

    def _command(self) -> str:
        """The command that makes this comparison."""
        c = self.contenders
        methods = dict.fromkeys(x.spelled for x in c)
        # a plan says itself what is trained: its depth is none to train methods at
        depths = dict.fromkeys("all" if x.last is None else str(x.last) for x in c if not x.plan)
        last = ["--last", *depths] if depths else []
        words = ["--methods", *methods, *last, "--seeds", *map(str, self.seeds)]
        shared = _words(self.settings.changed(compare=True))
        return shlex.join(["gradfilter", "compare", *shared, *words, "--out", str(self.out)])


def train_command(settings: Settings) -> str:
    """The `gradfilter train` that makes such a run."""
    return shlex.join(["gradfilter", "train", *_words(settings)])


def _words(settings: Settings) -> list[str]:
    """The options of settings that are not the default ones."""
    found = []
    for name, value in settings.as_dict().items():
        option = name.replace("_", "-")
        if value == _default(name):
            continue
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            found += [f"--{option}", text]
    return found


def _default(name: str):
    return next(f.default for f in fields(Settings) if f.name == name)


def _machine() -> dict[str, object]:
    """What the times depend on; where a library lies is no one's concern."""
    found = environment.about()
    library = Path(str(found["kernels, cpu"]))
    return found | ({"kernels, cpu": library.name} if library.is_file() else {})


def _measured(saved: dict) -> Measured:
    layers = [
        Layer(**layer | {k: layer[k] and Match(**layer[k]) for k in ("weight", "input")})
        for layer in saved["layers"]
    ]
    spreads = {k: saved[k] and Spread(**saved[k]) for k in ("seconds", "peak_bytes")}
    gradient = saved["gradient"] and Match(**saved["gradient"])
    return Measured(**saved | spreads | {"layers": layers, "gradient": gradient})

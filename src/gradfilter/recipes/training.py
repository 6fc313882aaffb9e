"""A training run from its first step, or from its last checkpoint, to its end."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from gradfilter.recipes import checkpoint, gain, parallel, parts, recording, report, settings
from gradfilter.recipes.checkpoint import write
from gradfilter.recipes.claim import claimed
from gradfilter.recipes.datasets import BadPicture, Data, names, open_data
from gradfilter.recipes.features import Stored
from gradfilter.recipes.gain import Gain
from gradfilter.recipes.interrupts import interrupts
from gradfilter.recipes.loading import per_epoch
from gradfilter.recipes.parallel import World, deterministic
from gradfilter.recipes.report import Result, best_of
from gradfilter.recipes.screen import Screen
from gradfilter.recipes.settings import BEFORE, Settings
from gradfilter.recipes.trainer import LOOK_EVERY, Diverged, Trainer

ENOUGH = 20  # steps of a run that is worth measuring against exact training
SAMPLES = 6  # test pictures that are drawn
SAVE, STOP = 1, 2


class Stopped(KeyboardInterrupt):
    """Ctrl-C: the run is saved and can go on."""


def train(
    settings: Settings, *, resume: bool = False, quiet: bool = False, screen: Screen | None = None
) -> Result:
    """Train as the settings say, in their folder `out`; `resume` goes on with the run there."""
    if not resume:
        settings.check_used()
    settings = settings.changed(**placed(settings))
    with parallel.world(settings.device) as world:
        screen = screen or Screen(quiet or not world.first)
        steady = deterministic(world.device, settings.deterministic)
        with claimed(settings, world, resume) as out, steady:
            return Run(settings, world, out, screen, resume).go()


def resumed(out: Path, **options) -> Settings:
    """The settings of the run in that folder, with options that may change on its way."""
    config = Path(out) / recording.CONFIG
    if not config.is_file():
        raise ValueError(f"{out} holds no run: there is no {recording.CONFIG} in it")
    before = settings.load(config).changed(out=str(out))
    data = place(str(options.pop("data", before.data)))  # may have been moved: see `Run._restore`
    if data not in names() and not Path(data).is_dir():
        raise ValueError(f"{data} is no folder: give --data, where the pictures of {out} are now")
    asked = before.changed(**options)
    kept = {k: v for k, v in placed(asked).items() if k in options}
    return before.resumed(**options | kept).changed(data=data)


def place(data: str) -> str:
    """The full path of a folder of pictures, so that a run goes on from anywhere; else as it is."""
    folder = Path(data).expanduser()
    return str(folder.resolve()) if data and data not in names() and folder.is_dir() else data


def placed(settings: Settings) -> dict[str, str]:
    """The full paths of what a run reads, under the names of their settings."""
    paths = [k for k in ("root", "cache_dir", "plan") if getattr(settings, k)]
    if settings.weights not in ("library", "none"):
        paths.append("weights")
    return {k: str(Path(getattr(settings, k)).absolute()) for k in paths} | {
        "data": place(settings.data)
    }


def opened(settings: Settings) -> tuple[Data, parts.Places | None]:
    """The pictures of a run, and which they are where it has a part of them."""
    if not settings.data:
        raise ValueError("which pictures? --data FOLDER, or the name of a data set")
    root = Path(settings.root) if settings.root else None
    whole = open_data(
        settings.data, root=root, download=settings.download, cache=settings.in_memory
    )
    return parts.choose(settings, whole)


class Run:
    """One run: its trainer, its folder, and how far it is."""

    def __init__(self, settings: Settings, world: World, out: Path, screen: Screen, resume: bool):
        self.settings, self.world, self.out, self.screen = settings, world, out, screen
        found = self._found() if resume else None
        self.data, self.places = world.in_turn(lambda: opened(settings))
        self.trainer = world.in_turn(lambda: self._trainer(found))
        self.settings = settings.changed(backbone_lr=self.trainer.settings.backbone_lr)
        self.epoch_steps = self.trainer.epoch_steps(len(self.data.train))
        self.total = settings.steps or settings.epochs * self.epoch_steps
        self.step, self.rows, self.seconds = 0, [], 0.0
        self.gain: Gain | None = None
        self.tally: dict[str, Tensor] | None = None
        self.fingerprint = self.data.train.fingerprint()
        self.stored = self._stored() if settings.cache_features else None
        self.screen.say(report.greeting(settings, self.data, self.trainer))
        if found:
            self._restore(found)
        if world.first:
            self._begin(found is None)

    def go(self) -> Result:
        """Train to the end."""
        on = self.settings.tensorboard and self.world.first
        self.events = recording.Events(self.out, self.step, on)
        try:
            self._store()
            with interrupts() as self.asked:
                self._compare()
                self._loop()
                self._see()
        except KeyboardInterrupt as stop:
            if isinstance(stop, Stopped) or not self.world.first:
                raise
            raise Stopped(f"stopped at once: {self._how_to_go_on()}") from None
        except Diverged as error:
            slower = f"--lr {self.settings.lr / 4:g}"
            raise Diverged(f"{error}: {self._how_to_go_on(slower)}") from None
        except (BadPicture, checkpoint.NotWritten) as error:
            raise type(error)(f"{error}; then {self._how_to_go_on()}") from error
        finally:
            self.events.close()
            self.trainer.close()
        return self._finish()

    def _store(self) -> None:
        """Store features where they are not yet; Ctrl-C meanwhile has nothing to save."""
        if self.stored:
            self.stored.source(self.data.train, True)
            self.stored.source(self.data.test, False)

    def _loop(self) -> None:
        self.saved = time.monotonic()
        if self._evaluation_due() and not (self.rows and self.rows[-1]["step"] == self.step):
            self._evaluate()
        numbers = range(self.step, self.total)
        steps = closing(self.trainer.steps(self.data.train, numbers, self.total))
        with self.screen.bar("training", self.total, self.step) as advance, steps as taken:
            begin = time.monotonic()
            for done in taken:
                self.step = done
                self.seconds += time.monotonic() - begin
                advance(note=self._note())
                self._after_step()
                begin = time.monotonic()

    def _see(self) -> None:
        """Test once more where a run was ended between its last row and its pictures."""
        picture = self.out / self.trainer.task.picture
        if self.tally is None and self.world.share(not picture.exists()):
            self._test()

    def _after_step(self) -> None:
        wish = self._wish()
        if wish == STOP:
            self._stop()
        elif self._evaluation_due():
            self._evaluate()
        elif wish == SAVE:
            self._save()

    def _wish(self) -> int:
        """Whether to stop or to save now, as any process may want to."""
        if self.world.size > 1 and self._busy() and not self._evaluation_due():
            return 0
        due = time.monotonic() - self.saved >= 60 * self.settings.save_every
        return self.world.most(STOP if self.asked else SAVE if due else 0)

    def _busy(self) -> bool:
        """Whether to leave a GPU alone at this step."""
        return self.trainer.device.type != "cpu" and self.step % LOOK_EVERY != 0

    def _stop(self) -> None:
        self._save()
        told = f"saved after step {self.step} of {self.total}: {self._how_to_go_on()}"
        raise Stopped(told) if self.world.first else Stopped()

    def _evaluation_due(self) -> bool:
        return self.step % self.epoch_steps == 0 or self.step == self.total

    def _evaluate(self) -> None:
        """Test, add a row, keep the best, save."""
        trainer, metrics = self.trainer, self._test()
        total, count = trainer.sums.tolist()
        row = {
            "epoch": self.step / self.epoch_steps,
            "step": self.step,
            "lr": trainer.rate(self.step, self.total),
            "train_loss": total / count if count else math.nan,
            **{f"test_{name}": value for name, value in metrics.items()},
            "seconds": self.seconds,
        }
        trainer.sums.zero_()
        self.rows.append(row)
        self.screen.say(report.told(row, self.total / self.epoch_steps))
        if self.step and self.world.first and best_of(self.rows, trainer.task.headline) is row:
            checkpoint.save(self.out / checkpoint.BEST, self._model() | {"metrics": row})
        self._save()
        if self.world.first:
            recording.write_metrics(self.out, self.rows)
            self.events.add(row)

    def _test(self) -> dict[str, float]:
        if self.step:
            self.trainer.check(self.step - 1)
        batches = per_epoch(len(self.data.test), self.trainer.batch)
        with self.screen.bar("testing", batches) as advance:

            def after_batch():
                advance()
                if self.world.most(STOP if self.asked else 0):
                    self._stop()

            metrics, self.tally = self.trainer.evaluate(self.data.test, after_batch)
        return metrics

    def _save(self) -> None:
        """Write the checkpoint to go on from."""
        if self.step:
            self.trainer.check(self.step - 1)
        methods = self.world.gather(checkpoint.method_states(self.trainer.model))
        if self.world.first:
            content = self._model() | {
                "optimizer": self.trainer.optimizer.state_dict(),
                "methods": methods,
                "rows": self.rows,
                "sums": self.trainer.sums.cpu(),
                "seconds": self.seconds,
                "processes": self.world.size,
                "fingerprint": self.fingerprint,
                "gain": self.gain and asdict(self.gain),
            }
            checkpoint.save(self.out / checkpoint.LAST, content, self.out / checkpoint.PREVIOUS)
        self.saved = time.monotonic()

    def _model(self) -> dict:
        return self.trainer.record(self.data, self.step, self.settings)

    def _restore(self, found: dict) -> None:
        """Go back to where a checkpoint was written."""
        trainer = self.trainer
        if found["processes"] != self.world.size:
            raise ValueError(
                f"this run has {found['processes']} processes, and now there are "
                f"{self.world.size}: their batches would differ"
            )
        self._check_data(found)
        shares = [group["share"] for group in trainer.optimizer.param_groups]
        try:
            trainer.model.load_state_dict(found["model"])
            trainer.optimizer.load_state_dict(found["optimizer"])
        except (RuntimeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            raise ValueError(f"the checkpoint is of another network: {why}") from error
        for group, share in zip(trainer.optimizer.param_groups, shares, strict=True):
            group |= {k: getattr(self.settings, k) for k in ("momentum", "weight_decay")}
            group["share"] = share
        checkpoint.restore_methods(trainer.model, found["methods"][self.world.rank])
        trainer.sums.copy_(found["sums"])
        self.step, self.rows, self.seconds = found["step"], found["rows"], found["seconds"]
        self.gain = found["gain"] and Gain(**found["gain"])
        longer = "--steps N" if self.settings.steps else "--epochs N"
        more = "" if self.step < self.total else f": it is done; to train on, {longer}"
        self.screen.say(f"going on after step {self.step} of {self.total}{more}")

    def _check_data(self, found: dict) -> None:
        """Refuse pictures of other classes, and other pictures at another place."""
        here, same = self.settings.data, found["fingerprint"] == self.fingerprint
        known, moved = (
            found["classes"] == list(self.data.classes),
            here != found["settings"]["data"],
        )
        if not known or (moved and not same):
            what = "pictures" if known else "classes"
            raise ValueError(f"{here} has other {what} than the run in {self.out} had")
        if not same:
            self.screen.say("the training pictures have changed since this run began")

    def _found(self) -> dict | None:
        found, problem = checkpoint.latest(self.out)
        if problem:
            self.screen.say(problem)
        self.world.wait()  # until all have read what is there
        if found and problem and self.world.first:
            checkpoint.set_aside(self.out)
        if found and "optimizer" not in found:
            raise ValueError(f"{self.out} has weights to use, such as best.pt, but no run to go on")
        return found

    def _trainer(self, found: dict | None) -> Trainer:
        """The trainer; weights and plan of a run that goes on come from its folder."""
        s, data = self.settings, self.data
        if found:
            s = s.changed(weights="none", mean=found["mean"], std=found["std"])
            if s.backbone_lr is None:  # as it was from the first step on
                s = s.changed(**{k: found["settings"].get(k, v) for k, v in BEFORE.items()})
        if found and s.plan:
            s = s.changed(plan=self.out / recording.PLAN, last=None)
        trainer = Trainer(
            s, data.task, data.classes, ignore=data.ignore, level=data.augment, world=self.world
        )
        if found:
            trainer.network = replace(trainer.network, weights=f"those of {self.out}")
        return trainer

    def _stored(self) -> Stored:
        s = self.settings
        folder = Path(s.cache_dir) if s.cache_dir else self.out / "features"
        return Stored(self.trainer, folder, self.screen.bar)

    def _begin(self, new: bool) -> None:
        """Write down what is to be done; of a run that goes on, what may have been changed."""
        try:
            if new:
                self.trainer.plan.save(self.out / recording.PLAN)
            if new and self.places:
                write(self.out / recording.SPLIT, json.dumps(self.places).encode())
            self.settings.changed(out=str(self.out)).save(self.out / recording.CONFIG)
        except OSError as error:
            raise checkpoint.NotWritten(f"{self.out}: {error.strerror or error}") from error

    def _compare(self) -> None:
        """Measure a step against exact training, where that takes little of the run's time."""
        s, trainer = self.settings, self.trainer
        if not s.compare or s.cache_features or self.gain or self.total < ENOUGH:
            return
        if trainer.plan.converted and self.world.first:
            self.gain = gain.measure(trainer)

    def _note(self) -> str:
        if self._busy():
            return ""
        total, count = self.trainer.sums.tolist()
        return f"loss {total / count:.3f}" if count else ""

    def _how_to_go_on(self, options: str = "") -> str:
        size = self.world.size
        start = f"torchrun --nproc-per-node {size} -m gradfilter" if size > 1 else "gradfilter"
        return f"go on with: {start} train --resume {self.out} {options}".rstrip()

    def _finish(self) -> Result:
        headline, plan = self.trainer.task.headline, self.trainer.plan
        best = best_of(self.rows, headline)
        result = Result(self.out, headline, self.rows, best, self.seconds, self.gain, plan)
        if self.world.first:
            recording.write_metrics(self.out, self.rows)  # a kill may have come before the last row
            self._draw(headline)
        self.screen.say(report.summary(result))
        return result

    def _draw(self, headline: str) -> None:
        try:
            recording.draw_curves(self.out, self.rows, headline)
            if self.tally is not None:
                samples = self.trainer.samples(self.data.test, SAMPLES)
                self.trainer.task.pictures(self.tally, samples, self.out)
        except OSError as error:
            raise checkpoint.NotWritten(f"{self.out}: {error.strerror or error}") from error

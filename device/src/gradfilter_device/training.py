"""Training an exported network on photographs, from its start or its last checkpoint."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from gradfilter_device import checkpoint, memory, metrics
from gradfilter_device.exported import PREDICT, Exported, Unusable, Values
from gradfilter_device.feeding import Batch, Feeder, Skipped, open_examples
from gradfilter_device.folders import Example
from gradfilter_device.interrupts import interrupts
from gradfilter_device.locking import lock
from gradfilter_device.options import Options
from gradfilter_device.photos import NOTHING
from gradfilter_device.screen import Line
from gradfilter_device.stepping import Stepper

LOG = "log.csv"
TRIALS = 4  # steps until the memory that the allocator holds on to no longer grows
UNREADABLE = "none of the pictures to {} on can be read"


class Run:
    """One run: an exported network, pictures, and how far it is."""

    def __init__(self, model: Exported, data: Path, folder: Path, options: Options, threads: int):
        self.model, self.folder, self.threads = model, folder, threads
        self.train, self.test = open_examples(model, data)
        self.pictures = _digest(data, self.train, self.test)
        self.trained_on = _digest(data, self.train)  # all that earlier versions went by
        self.options = self.asked = options
        self.step, self.rows, self.skipped = 0, [], Skipped(data)
        self.most: int | None = None  # bytes
        self.sums = [0.0, 0]  # of losses since the last evaluation, and their number
        self.lock = lock(folder)
        values = self._resume()
        self.resumed = values is not None
        self.stepper = Stepper(model, threads, model.start() if values is None else values)

    @property
    def per_epoch(self) -> int:
        return -(-len(self.train) // self.options.batch)

    @property
    def headline(self) -> str:
        """The metric that counts."""
        return "miou" if self.model.masks else "accuracy"

    @property
    def best(self) -> dict:
        """The best row, of equals the last: the one whose parameters are kept."""
        return max(reversed(self.rows), key=lambda row: row[self.headline])

    @property
    def total(self) -> int:
        return self.options.epochs * self.per_epoch

    @property
    def untested(self) -> bool:
        """Whether an epoch has ended that has no row: earlier versions could stop there."""
        tested = self.rows[-1]["step"] if self.rows else 0
        return self.step % self.per_epoch == 0 and self.step != tested

    def agree(self, given: dict) -> None:
        """Refuse options that a run which goes on was not started with."""
        for name, value in given.items():
            if self.resumed and getattr(self.asked, name) != value:
                raise Unusable(
                    f"the run in {self.folder} was started with {name} "
                    f"{getattr(self.asked, name)}; leave that out, or give another --run"
                )

    def limit(self, limit: int) -> None:
        """Keep the whole process below so many bytes, by a smaller batch if need be."""
        o, fixed = self.options, self.model.batch is not None or self.resumed
        if self.step >= self.total and not self.untested:
            return
        found = memory.fitting(limit, o.batch, fixed, self._trial())
        if found < o.batch:
            less = replace(o, batch=found)
            print(
                f"batches of {found} instead of {o.batch}, for {limit / memory.MIB:.0f} MB in all; "
                f"the highest learning rate is {less.peak:.3g} instead of {o.peak:.3g}",
                flush=True,
            )
            self.options = less
        self.most = limit
        # the trial steps have moved the optimizer's state
        saved = checkpoint.latest(self.folder)
        self.stepper.load(self.model.start() if saved is None else saved[0])
        memory.forget()

    def go(self, save_every: float) -> None:
        """Train to the end; saves at every epoch and every so many minutes."""
        with self.lock, interrupts() as stop:
            if self.untested:
                self._evaluate()
                self._check_memory()
            if self.step < self.total:
                self._check_readable()
                self._train(save_every, stop)

    def _train(self, save_every: float, stop: list[int]) -> None:
        feeder = self._feeder(self.train)
        line, saved = Line("training", self.total), time.monotonic()
        while self.step < self.total:
            epoch, within = divmod(self.step, self.per_epoch)
            rate = self.options.rate(self.step, self.total)
            # under no name: it would be there still while the next one is read
            self._take(feeder.batch(epoch, within, self.options.batch), rate)
            self.step += 1
            line.show(self.step, f"loss {self.sums[0] / max(1, self.sums[1]):.3f}")
            if self.step % self.per_epoch == 0:
                line.end()
                self._evaluate()
                saved = time.monotonic()
            elif stop or time.monotonic() - saved > 60 * save_every:
                self._save()
                saved = time.monotonic()
            self._check_memory()  # of the test too, which has its row by now
            if stop and self.step < self.total:
                line.end()
                raise KeyboardInterrupt("saved; the same command goes on")

    def _check_readable(self) -> None:
        """Refuse pictures of which not one counts, before time is spent on them."""
        for what, examples in (("train", self.train), ("test", self.test)):
            feeder = Feeder(self.model, examples, 0, False, self.skipped)
            batches = (feeder.read([i]) for i in range(len(examples)))
            if not any(b is not None and (b.targets != NOTHING).any() for b in batches):
                raise Unusable(UNREADABLE.format(what))

    def _feeder(self, examples: list[Example]) -> Feeder:
        o = self.options
        return Feeder(self.model, examples, o.seed, o.augment, self.skipped)

    def _take(self, batch: Batch | None, rate: float) -> None:
        """One step; a batch in which every picture is broken is none."""
        if batch is None:
            return
        loss = self.stepper.step(batch.images, batch.targets, rate)
        if not math.isfinite(loss):
            raise Unusable(self._diverged("the loss", self.step + 1))
        self.sums = [self.sums[0] + loss, self.sums[1] + 1]

    def _check_memory(self) -> None:
        if self.most is not None and memory.peak() > self.most:
            self._save()
            tested = " or the test after it" if self.step % self.per_epoch == 0 else ""
            raise Unusable(
                f"step {self.step}{tested} took {memory.peak() / memory.MIB:.0f} MB, above the "
                f"limit of {self.most / memory.MIB:.0f} MB; the run is saved"
            )

    def _trial(self) -> Callable[[int], None]:
        """Takes steps of so many pictures that change no parameter, and tests on them.

        They are the largest of all, whose reading takes the most memory.
        """
        feeder = self._feeder(self.train + self.test)
        largest = feeder.largest()
        tester = Tester(self.model, self.stepper.values, self.threads)

        def step(count: int) -> None:
            found = feeder.first(largest, count)
            if found is None:
                raise Unusable(UNREADABLE.format("train"))
            # where there are too few, they are taken again
            parts = (found.images, found.targets)
            whole = Batch(*(np.resize(a, (count, *a.shape[1:])) for a in parts))
            del found, parts
            for _ in range(TRIALS):
                self.stepper.step(whole.images, whole.targets, 0.0)
                tester.counts(whole)

        return step

    def _evaluate(self) -> None:
        """Test, add a row, keep the best, save."""
        if not self.sums[1]:
            raise Unusable(UNREADABLE.format("train"))
        self._check_numbers()
        tester = Tester(self.model, self.stepper.values, self.threads)
        row = {
            "epoch": self.step / self.per_epoch,
            "step": self.step,
            "loss": self.sums[0] / max(1, self.sums[1]),
            **tester.metrics(self.test, self.options.batch, self.skipped),
        }
        self.rows.append(row)
        self.sums = [0.0, 0]
        if self.best is row:
            own = {name: self.stepper.values[name] for name in self.model.parameters}
            checkpoint.save(self.folder / checkpoint.BEST, own, self._about())
        self._log()
        self._save()
        print(metrics.told(row), flush=True)  # last: nobody may be there to read it

    def _about(self) -> dict:
        return {
            "step": self.step,
            "rows": self.rows,
            "sums": self.sums,
            "skipped": self.skipped.names,
            "options": asdict(self.options),
            "export": self.model.digest,
            "asked": asdict(self.asked),
            "pictures": self.pictures,
        }

    def _check_numbers(self) -> None:
        """Refuse parameters that the last step has ruined: its loss is of those before."""
        for name in self.model.parameters:
            if not np.isfinite(self.stepper.values[name]).all():
                raise Unusable(self._diverged(name, self.step))

    def _diverged(self, what: str, step: int) -> str:
        return (
            f"{what} stopped being a number at step {step}; remove {self.folder} "
            f"and try a smaller --lr (now {self.options.lr:g})"
        )

    def _save(self) -> None:
        self._check_numbers()
        last, previous = (self.folder / n for n in (checkpoint.LAST, checkpoint.PREVIOUS))
        checkpoint.save(last, self.stepper.values, self._about(), previous)

    def _resume(self) -> Values | None:
        """Go back to the last checkpoint, if there is one; gives its tensors."""
        found = checkpoint.latest(self.folder)
        if found is None:
            return None
        model, (values, about) = self.model, found
        checkpoint.check(model, self.folder, found, model.parameters | model.state)
        if about["pictures"] not in (self.pictures, self.trained_on):
            raise Unusable(
                f"the run in {self.folder} began with other pictures; give another --run"
            )
        if any(self.headline not in row for row in about["rows"]):
            raise Unusable(
                f"the run in {self.folder} was begun by a version that did not measure "
                f"{self.headline}; give another --run"
            )
        self.options, self.asked = (Options(**about[key]) for key in ("options", "asked"))
        self.step, self.rows = about["step"], about["rows"]
        self.sums, self.skipped.names = about["sums"], about["skipped"]
        print(f"going on after step {self.step}", flush=True)
        return values

    def _log(self) -> None:
        """The rows as CSV, put in place at once."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]))
        writer.writeheader()
        writer.writerows(self.rows)
        checkpoint.put(self.folder / LOG, lambda file: file.write(text.getvalue().encode()))


def _digest(data: Path, *parts: list[Example]) -> str:
    """Tells the pictures of a run from others, wherever their folder lies."""
    told = [
        [
            (path.relative_to(data).as_posix(), None if isinstance(target, Path) else target)
            for path, target in examples
        ]
        for examples in parts
    ]
    text = ",".join(map(repr, told))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


class Tester:
    """The network with given parameters, to be asked."""

    def __init__(self, model: Exported, values: Values, threads: int):
        self.model, self.session = model, model.session(PREDICT, threads)
        self.own = {name: values[name] for name in model.parameters}

    def scores(self, images: np.ndarray) -> np.ndarray:
        """Of prepared images, however many; a fixed batch is filled up."""
        count = self.model.batch or len(images)
        parts = []
        for start in range(0, len(images), count):
            part = images[start : start + count]
            missing = count - len(part)
            full = part
            if missing:
                full = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)])
            (found,) = self.session.run(["scores"], self.own | {"images": full})
            parts.append(found[: len(part)])
        return np.concatenate(parts)

    def counts(self, batch: Batch) -> np.ndarray:
        """What is right of a batch, by class; see `metrics.counts`."""
        found = self.scores(batch.images).argmax(1)
        return metrics.counts(batch.targets, found, self.model.manifest["outputs"])

    def metrics(self, examples: list[Example], batch: int, skipped: Skipped) -> dict[str, float]:
        """Over all pictures, or all pixels of their masks, that count."""
        feeder = Feeder(self.model, examples, 0, False, skipped)
        counted = sum(map(self.counts, _batches(feeder, batch)))
        if not np.any(counted):
            raise Unusable(UNREADABLE.format("test"))
        return metrics.metrics(counted, self.model.masks)


def _batches(feeder: Feeder, batch: int) -> Iterator[Batch]:
    for start in range(0, len(feeder.examples), batch):
        found = feeder.read(range(start, min(start + batch, len(feeder.examples))))
        if found is not None:
            yield found
        del found  # or it would be there still while the next one is read

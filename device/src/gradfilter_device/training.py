"""Training an exported network on photographs, from its start or its last checkpoint."""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gradfilter_device import checkpoint, memory
from gradfilter_device.exported import PREDICT, Exported, Unusable, Values
from gradfilter_device.feeding import Batch, Feeder, open_examples
from gradfilter_device.screen import Line
from gradfilter_device.stepping import Stepper

LOG = "log.csv"
REFERENCE_BATCH = 128  # images a step that a learning rate is given for


@dataclass(frozen=True)
class Options:
    """How a run trains; fixed when it starts."""

    epochs: int = 10
    batch: int = 8
    lr: float = 0.05
    warmup: float = 0.1
    seed: int = 0
    augment: bool = True

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step: rises over the warm-up, then falls as a cosine to 0."""
        peak = self.lr * self.batch / REFERENCE_BATCH
        rising = round(self.warmup * total)
        if step < rising:
            return peak * (step + 1) / (rising + 1)
        return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


class Run:
    """One run: an exported network, pictures, and how far it is."""

    def __init__(self, model: Exported, data: Path, folder: Path, options: Options, threads: int):
        self.model, self.folder, self.threads = model, folder, threads
        self.train, self.test = open_examples(model, data)
        self.options, self.step, self.rows, self.skipped = options, 0, [], []
        self.most: int | None = None  # bytes
        self.sums = [0.0, 0]  # of losses since the last evaluation, and their number
        values = self._resume()
        self.resumed = values is not None
        self.stepper = Stepper(model, threads, model.start() if values is None else values)

    def limit(self, limit: int) -> None:
        """Keep the whole process below so many bytes, by a smaller batch if need be."""
        o, fixed = self.options, self.model.batch is not None
        found = memory.fitting(limit, o.batch, fixed, self._trial)
        if found < o.batch and self.resumed:
            raise Unusable(f"this run has batches of {o.batch}; that many do not fit the limit")
        if found < o.batch:
            print(
                f"batches of {found} instead of {o.batch}, for {limit / memory.MIB:.0f} MB in all"
            )
            self.options = Options(**asdict(o) | {"batch": found})
        self.most = limit
        # the trial steps have moved the optimizer's state
        found = checkpoint.latest(self.folder)
        self.stepper.load(self.model.start() if found is None else found[0])

    def go(self, save_every: float) -> None:
        """Train to the end; saves at every epoch and every so many minutes."""
        per_epoch = -(-len(self.train) // self.options.batch)
        total, saved = self.options.epochs * per_epoch, time.monotonic()
        feeder = Feeder(self.model, self.train, self.options.seed, self.options.augment)
        feeder.skipped = self.skipped
        line = Line("training", total)
        try:
            while self.step < total:
                epoch, within = divmod(self.step, per_epoch)
                batch = feeder.batch(epoch, within, self.options.batch)
                self._take(batch, self.options.rate(self.step, total))
                self.step += 1
                self._check_memory()
                line.show(self.step, f"loss {self.sums[0] / max(1, self.sums[1]):.3f}")
                if self.step % per_epoch == 0 or self.step == total:
                    line.end()
                    self._evaluate(per_epoch)
                    saved = time.monotonic()
                elif time.monotonic() - saved > 60 * save_every:
                    self._save()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            line.end()
            self._save()
            raise
        finally:
            line.end()

    def _take(self, batch: Batch | None, rate: float) -> None:
        """One step; a batch in which every picture is broken is none."""
        if batch is None:
            return
        loss = self.stepper.step(batch.images, batch.targets, rate)
        if not math.isfinite(loss):
            raise Unusable(
                f"the loss stopped being a number at step {self.step + 1}; remove {self.folder} "
                f"and try a smaller --lr (now {self.options.lr:g})"
            )
        self.sums = [self.sums[0] + loss, self.sums[1] + 1]

    def _check_memory(self) -> None:
        if self.most is not None and memory.peak() > self.most:
            self._save()
            raise Unusable(
                f"step {self.step} took {memory.peak() / memory.MIB:.0f} MB, above the limit of "
                f"{self.most / memory.MIB:.0f} MB; the run is saved"
            )

    def _trial(self, count: int) -> None:
        shape, targets = self.model.manifest["images"], self.model.manifest["targets"]
        images = np.zeros((count, *shape[1:]), self.model.dtype)
        self.stepper.step(images, np.zeros((count, *targets[1:]), np.int64), 0.0)

    def _evaluate(self, per_epoch: int) -> None:
        """Test, add a row, keep the best, save."""
        tester = Tester(self.model, self.stepper.values, self.threads)
        accuracy = tester.accuracy(self.test, self.options.batch)
        self.rows.append({
            "epoch": self.step / per_epoch,
            "step": self.step,
            "loss": self.sums[0] / max(1, self.sums[1]),
            "accuracy": accuracy,
        })  # fmt: skip
        self.sums = [0.0, 0]
        row = self.rows[-1]
        print(
            f"epoch {row['epoch']:g}: loss {row['loss']:.3f}, accuracy {accuracy:.1%}", flush=True
        )
        if accuracy >= max(r["accuracy"] for r in self.rows):
            own = {name: self.stepper.values[name] for name in self.model.parameters}
            checkpoint.save(self.folder / checkpoint.BEST, own, self._about())
        self._save()
        self._log()

    def _about(self) -> dict:
        return {
            "step": self.step,
            "rows": self.rows,
            "sums": self.sums,
            "skipped": self.skipped,
            "options": asdict(self.options),
            "export": self.model.digest,
            "pictures": [str(path) for path, _ in self.train][:1] + [len(self.train)],
        }

    def _save(self) -> None:
        last, previous = (self.folder / n for n in (checkpoint.LAST, checkpoint.PREVIOUS))
        checkpoint.save(last, self.stepper.values, self._about(), previous)

    def _resume(self) -> Values | None:
        """Go back to the last checkpoint, if there is one; gives its tensors."""
        found = checkpoint.latest(self.folder)
        if found is None:
            return None
        values, about = found
        if about["export"] != self.model.digest:
            raise Unusable(f"the run in {self.folder} is of another export; give another --run")
        self.options = Options(**about["options"])
        self.step, self.rows = about["step"], about["rows"]
        self.sums, self.skipped = about["sums"], about["skipped"]
        print(f"going on after step {self.step}", flush=True)
        return values

    def _log(self) -> None:
        """The rows as CSV, put in place at once."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]))
        writer.writeheader()
        writer.writerows(self.rows)
        new = self.folder / (LOG + ".new")
        new.write_text(text.getvalue())
        os.replace(new, self.folder / LOG)


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
            full = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)])
            (found,) = self.session.run(["scores"], self.own | {"images": full})
            parts.append(found[: len(part)])
        return np.concatenate(parts)

    def accuracy(self, examples: list, batch: int) -> float:
        """Share of the pictures, or of the pixels of masks, that are right."""
        right = count = 0
        feeder = Feeder(self.model, examples, 0, False)
        for part in _batches(feeder, batch):
            found = self.scores(part.images).argmax(1)
            known = part.targets >= 0
            right += int(((found == part.targets) & known).sum())
            count += int(known.sum())
        return right / max(1, count)


def _batches(feeder: Feeder, batch: int) -> Iterator[Batch]:
    for start in range(0, len(feeder.examples), batch):
        found = feeder.read(range(start, min(start + batch, len(feeder.examples))))
        if found is not None:
            yield found

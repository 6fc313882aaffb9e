"""A network with methods on its layers and an optimizer: steps and evaluations, nothing else.

Other loops than `training` (rounds of federated learning, benchmarks) can drive it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset

import gradfilter as gf
from gradfilter import methods
from gradfilter.order import evaluating
from gradfilter.plan import read
from gradfilter.recipes import augment, models
from gradfilter.recipes.classification import Classification
from gradfilter.recipes.datasets import Data, Pictures
from gradfilter.recipes.loading import (
    Batch,
    Changed,
    InTurn,
    Shuffled,
    loaded,
    loader,
    mixed,
    per_epoch,
)
from gradfilter.recipes.parallel import World, choose
from gradfilter.recipes.segmentation import Segmentation
from gradfilter.recipes.settings import REFERENCE_BATCH, Settings

TASKS = {"classification": Classification, "segmentation": Segmentation}
SLOWER = 0.1  # share of the learning rate that trained layers stand at REFERENCE_BATCH
LOOK_EVERY = 16  # steps between two looks at the losses, where looking makes a GPU wait

Change = Callable[[Tensor, object], tuple[Tensor, object]]


class Diverged(ValueError):
    """The loss or a gradient is no longer a number."""


class Source(Protocol):
    """What a network can be trained from instead of pictures; see `features.Stored`."""

    def source(self, pictures: Pictures, training: bool) -> Dataset: ...

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor: ...


class Trainer:
    """Trains one network for one task.

    `level` is the augmentation of training pictures where the settings leave it open; what they
    leave open of the learning rate is in the trainer's own `settings`.
    """

    def __init__(
        self,
        settings: Settings,
        task: str,
        classes: tuple[str, ...],
        *,
        ignore: int | None = None,
        level: str = "standard",
        world: World | None = None,
    ):
        self.settings, self.world = settings, world or World(choose(settings.device))
        self.device = self.world.device
        if settings.norm == "batch" and self.world.size > 1:
            raise ValueError("several processes need frozen batch-norm statistics (norm: frozen)")
        torch.manual_seed(settings.seed)
        self.task = TASKS[task](classes, ignore)
        self.network = models.build(
            settings.model,
            len(classes),
            task=task,
            weights=settings.weights,
            size=settings.size,
            mean=settings.mean,
            std=settings.std,
        )
        self.size = settings.size or self.network.size
        self.model = self.network.model.to(self.device, memory_format=torch.channels_last)
        level = "none" if settings.cache_features else settings.augment or level
        self.augments = level == "standard"  # cut and mirrored at random, as photographs are
        self.change: dict[bool, Change] = {
            True: augment.training(task, self.size, level),
            False: augment.evaluation(task, self.size),
        }
        self.plan = self._convert()
        self.settings = settings = settings.changed(backbone_lr=self._backbone_lr())
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("the plan freezes everything: no parameter is left to train")
        self.optimizer = torch.optim.SGD(
            self._groups(len(classes)), momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )  # fmt: skip
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # of losses, and count
        self.healthy = torch.ones((), dtype=torch.bool, device=self.device)
        self.testing: dict[Pictures, DataLoader] = {}  # their worker processes stay for the next
        self.stored: Source | None = None  # where batches come from instead of pictures
        self._train_mode()
        self.fewest = 2 if takes_statistics(self.model) else 1  # pictures of a batch

    def _backbone_lr(self) -> float:
        """The share of the learning rate that all but the output layer have."""
        if (asked := self.settings.backbone_lr) is not None:
            return asked
        if not self.network.trained or self.plan.frozen:
            return 1.0
        # the rate itself falls with the batch: a share that did not rise would be too little
        return min(1.0, round(SLOWER * (REFERENCE_BATCH / self.batch) ** 0.5, 3))

    def _groups(self, outputs: int) -> list[dict]:
        """The trained parameters, by the share of the learning rate that they have."""
        settings = self.settings
        head = {id(p) for p in models.output_parameters(self.model, outputs)}
        shares = [1.0 if id(p) in head else settings.backbone_lr for p in self.parameters]
        return [
            {
                "params": [p for p, s in zip(self.parameters, shares, strict=True) if s == share],
                "lr": settings.lr * share,
                "share": share,
            }
            for share in sorted(set(shares), reverse=True)
        ]

    def record(self, data: Data, step: int, settings: Settings) -> dict:
        """The network, and what is needed to use it, as checkpoints hold them."""
        return {
            "model": self.model.state_dict(),
            "step": step,
            "task": data.task,
            "classes": list(data.classes),
            "ignore": data.ignore,
            "mean": list(self.network.mean),
            "std": list(self.network.std),
            "size": self.size,
            "settings": settings.as_dict(),
        }

    @property
    def batch(self) -> int:
        """Pictures a step, over all processes."""
        return self.settings.batch * self.world.size

    def epoch_steps(self, pictures: int) -> int:
        """Steps over so many pictures.

        Where statistics are taken from each batch, a last batch of one picture is left out.
        """
        self.check_batch(min(pictures, self.batch))
        return per_epoch(pictures, self.batch, self.fewest)

    def check_batch(self, pictures: int) -> None:
        """Refuse batches of so few pictures."""
        if pictures < self.fewest:
            raise ValueError(
                "batch norms take their statistics from each batch, and one picture is too few: "
                "2 or more pictures a batch, or norm: frozen"
            )

    def steps(self, pictures: Pictures, numbers: range, total: int) -> Iterator[int]:
        """Take the steps of these numbers, of `total`; yields how many are taken, after each."""
        dataset = self._source(pictures, True)
        self.check_batch(min(len(pictures), self.batch))
        seed, fewest = self.settings.seed, self.fewest
        order = Shuffled(len(pictures), self.batch, seed, numbers, self.world, fewest)
        batches = loaded(loader(dataset, order, self.world, self.settings.workers))
        self._train_mode()
        take = self._captured() if self.settings.capture else self.step
        try:
            for number in numbers:
                take(next(batches), number, self.rate(number, total))
                yield number + 1
        finally:
            del batches  # ends its worker processes, though a traceback may keep this frame

    def _captured(self) -> Callable[[Batch, int, float], None]:
        from gradfilter.recipes.capture import Captured  # which is written in terms of this class

        return Captured(self).step

    def rate(self, number: int, total: int) -> float:
        """The learning rate of a step."""
        return rate(number, total, self.settings, self.batch)

    def step(self, batch: Batch, number: int, rate: float) -> None:
        """One step of SGD on this process's share of a batch."""
        self.seed(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["share"]
        self.optimizer.zero_grad()
        sums = self.gradients(None if batch is None else self.here(batch))
        if self.device.type == "cpu" or number % LOOK_EVERY == 0:
            self.check(number)  # on the CPU before a bad step is taken
        self.optimizer.step()
        self.sums += sums

    def seed(self, number: int) -> None:
        """Set what dropout draws from in a step."""
        torch.manual_seed(mixed("step", self.settings.seed, number, self.world.rank))

    def gradients(self, batch: tuple[tuple[Tensor, ...], Tensor] | None) -> Tensor:
        """Take the clipped gradients of a batch on the device; gives its loss and its count."""
        loss, count = self._loss(batch)
        sums = torch.stack([loss.detach().double(), count.detach().double()])
        self.world.sum(sums)
        if loss.requires_grad:
            (loss / sums[1].clamp(min=1).to(loss.dtype)).backward()
        self.world.sum_gradients(self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip or math.inf)
        self.healthy &= sums[0].isfinite() & norm.isfinite()
        return sums

    def check(self, number: int) -> None:
        """Refuse to go on with a loss or gradient that is no number."""
        if not self.healthy:
            since = max(0, number - LOOK_EVERY) if self.device.type != "cpu" else number
            where = f"step {number + 1}" if since == number else f"steps {since + 1}-{number + 1}"
            amp = " or without --amp" if self.settings.amp else ""
            raise Diverged(
                f"the loss or its gradient stopped being a number at {where}; try a smaller "
                f"--lr (now {self.settings.lr:g}), more --warmup (now {self.settings.warmup:g})"
                f"{amp}"
            )

    @torch.no_grad()
    def evaluate(
        self, pictures: Pictures, advance: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """The task's metrics over all pictures, and the sums they come from."""
        if pictures not in self.testing:
            dataset = self._source(pictures, False)
            order = InTurn(len(pictures), self.batch, self.world)
            self.testing[pictures] = loader(dataset, order, self.world, self.settings.workers)
        tally = {name: t.to(self.device) for name, t in self.task.tally().items()}
        self.model.eval()
        try:
            for batch in loaded(self.testing[pictures]):
                if batch is not None:
                    inputs, target = self.here(batch)
                    with self.autocast():
                        output = self._forward(inputs)
                    self.task.add(tally, output, target)
                advance()
        finally:
            self._train_mode()
        self.world.sum(*tally.values())
        return self.task.metrics(tally), tally

    def close(self) -> None:
        """End the worker processes that load test pictures."""
        self.testing.clear()

    @torch.no_grad()
    def outputs(self, images: Tensor) -> Tensor:
        """What the whole network says of pictures of bytes [N, 3, H, W]."""
        self.model.eval()
        try:
            with self.autocast():
                return self.model(self.network.prepare(images.to(self.device))).float()
        finally:
            self._train_mode()

    def samples(self, pictures: Pictures, count: int) -> list[tuple[Tensor, object, Tensor]]:
        """A few pictures from all over, each as it is tested, with its target and output."""
        places = torch.linspace(0, len(pictures) - 1, min(count, len(pictures))).long().tolist()
        seen = [self.change[False](*pictures[i]) for i in places]
        outputs = self.outputs(torch.stack([image for image, _ in seen])).cpu()
        return [(image, target, y) for (image, target), y in zip(seen, outputs, strict=True)]

    def _convert(self) -> gf.Plan:
        s = self.settings
        what = methods.named(s.method, **s.knobs()) if s.plan is None else read(s.plan)
        example = self.network.prepare(self.noise(2))
        self._try(example)
        return gf.convert(
            self.model, what, last=s.last, example=example, norm=s.norm, engine=s.engine
        )

    @torch.no_grad()
    def _try(self, example: Tensor) -> None:
        """Refuse a size of pictures that the network cannot take."""
        try:
            with evaluating(self.model):
                self.model(example)
        except (RuntimeError, AssertionError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            size = f"{self.size}x{self.size}"
            raise ValueError(f"{self.settings.model} cannot take {size} images: {why}") from error

    def noise(self, count: int) -> Tensor:
        """Pictures of bytes without meaning."""
        generator = torch.Generator().manual_seed(0)
        shape = (count, 3, self.size, self.size)
        images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return images.to(self.device)

    def _train_mode(self) -> None:
        """Training mode, but nothing random in the part that is frozen."""
        self.model.train()
        for name in self.plan.front:
            module = self.model.get_submodule(name)
            if not list(module.children()):
                module.train(False)

    def changed(self, pictures: Pictures, training: bool) -> Changed:
        """The pictures as the network is to see them."""
        return Changed(pictures, self.change[training], self.settings.seed)

    def _source(self, pictures: Pictures, training: bool) -> Dataset:
        source = self.stored.source if self.stored else self.changed
        return source(pictures, training)

    def _forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if self.stored:
            return self.stored.forward(inputs)
        return self.model(self.network.prepare(*inputs))

    def _loss(self, batch: tuple[tuple[Tensor, ...], Tensor] | None) -> tuple[Tensor, Tensor]:
        """Sum of losses and count; zeros where this process has no picture."""
        if batch is None:
            return torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        inputs, target = batch
        with self.autocast():
            return self.task.loss(self._forward(inputs), target)

    def here(self, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
        """A batch on the device."""
        if isinstance(batch, Exception):
            raise batch
        inputs, target = batch
        self.task.check(target)
        inputs = tuple(t.to(self.device, non_blocking=True) for t in inputs)
        return inputs, target.to(self.device, non_blocking=True)

    def autocast(self):
        if not self.settings.amp:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def takes_statistics(model: nn.Module) -> bool:
    """Whether a batch norm takes statistics from each batch, in the modes the modules are in."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm))
    return any(m.training or m.running_mean is None for m in norms)


def rate(step: int, total: int, settings: Settings, batch: int) -> float:
    """The learning rate of a step: rises over the warm-up, then falls as a cosine to 0."""
    peak = settings.peak_rate(batch)
    rising = round(settings.warmup * total)
    if step < rising:
        return peak * (step + 1) / (rising + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))

"""The training step of a run, for a device that has no PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch

import gradfilter as gf
from gradfilter.export import Runner
from gradfilter.recipes import checkpoint, parallel, recording
from gradfilter.recipes.parallel import World
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Trainer

RECIPE = ("lr", "warmup", "batch", "epochs", "seed")


def export(out: Path, to: Path, *, which: str = "best", batch: int | None = None) -> Path:
    """Write the step of a run's plan, from the weights of a checkpoint on, to the folder `to`."""
    return write(load(out, which), to, batch)


def write(trainer: Trainer, to: Path, batch: int | None = None) -> Path:
    """Write the step of a trainer, from the weights it has now on."""
    network, task, s = trainer.network, trainer.task, trainer.settings
    masks = task.headline == "miou"
    shape = (2, trainer.size, trainer.size) if masks else (2,)
    recipe = {name: getattr(s, name) for name in RECIPE} | ({"batch": batch} if batch else {})
    return gf.export(
        trainer.model,
        network.prepare(trainer.noise(2)).contiguous(),
        torch.zeros(shape, dtype=torch.int64),
        to,
        optimizer=trainer.optimizer,
        clip=s.clip or None,
        batch=batch,
        runner=Runner(tuple(network.mean), tuple(network.std), task.classes, task.ignore, recipe),
    )


def load(out: Path, which: str) -> Trainer:
    """A trainer with the plan and the weights of a run."""
    if not (out / recording.CONFIG).is_file():
        raise ValueError(f"{out} holds no run: there is no {recording.CONFIG} in it")
    found = checkpoint.load(out / f"{which}.pt")
    settings = Settings(**found["settings"]).changed(
        weights="none",
        mean=found["mean"],
        std=found["std"],
        size=found["size"],
        device="cpu",
        cache_features=False,
    )
    if settings.plan:
        settings = settings.changed(plan=out / recording.PLAN, last=None)
    world = World(parallel.choose("cpu"))
    classes = tuple(found["classes"])
    trainer = Trainer(settings, found["task"], classes, ignore=found["ignore"], world=world)
    trainer.model.load_state_dict(found["model"])
    return trainer

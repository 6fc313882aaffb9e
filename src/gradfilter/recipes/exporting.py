"""The training step of a run, for a device that has no PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch

import gradfilter as gf
from gradfilter.export import Runner
from gradfilter.recipes import parallel
from gradfilter.recipes.evaluation import load
from gradfilter.recipes.parallel import World
from gradfilter.recipes.trainer import Trainer


def export(out: Path, to: Path, *, which: str = "best", batch: int | None = None) -> Path:
    """Write the step of a run's plan, from the weights of a checkpoint on, to the folder `to`."""
    trainer, _ = load(out, which, World(parallel.choose("cpu")), device="cpu")
    return write(trainer, to, batch)


def write(trainer: Trainer, to: Path, batch: int | None = None) -> Path:
    """Write the step of a trainer, from the weights it has now on."""
    network, task, s = trainer.network, trainer.task, trainer.settings
    masks = task.headline == "miou"
    shape = (2, trainer.size, trainer.size) if masks else (2,)
    recipe = {name: getattr(s, name) for name in ("lr", "warmup", "batch", "epochs", "seed")}
    recipe |= {"augment": trainer.augments} | ({"batch": batch} if batch else {})
    # the rate of an exported step is that of the group with the highest one
    groups = trainer.optimizer.param_groups
    trained = [g["share"] for g in groups if any(p.requires_grad for p in g["params"])]
    recipe["lr"] *= max(trained)
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

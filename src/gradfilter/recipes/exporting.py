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
    trainer, found = load(out, which)
    example = trainer.network.prepare(trainer.noise(2))
    masks = found["task"] == "segmentation"
    shape = (2, trainer.size, trainer.size) if masks else (2,)
    s = trainer.settings
    recipe = {name: getattr(s, name) for name in RECIPE} | ({"batch": batch} if batch else {})
    return gf.export(
        trainer.model,
        example.contiguous(),
        torch.zeros(shape, dtype=torch.int64),
        to,
        optimizer=trainer.optimizer,
        clip=s.clip or None,
        batch=batch,
        runner=Runner(
            tuple(found["mean"]), tuple(found["std"]), tuple(found["classes"]), found["ignore"],
            recipe,
        ),
    )  # fmt: skip


def load(out: Path, which: str) -> tuple[Trainer, dict]:
    """A trainer with the plan and the weights of a run, and the run's checkpoint."""
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
    return trainer, found

"""A trained run put to use: tested again, or asked about pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from gradfilter import documents, tables
from gradfilter.recipes import checkpoint, parallel, parts, recording
from gradfilter.recipes.datasets import Data, decode, names, open_data
from gradfilter.recipes.loading import per_epoch
from gradfilter.recipes.parallel import World
from gradfilter.recipes.screen import Screen
from gradfilter.recipes.settings import KNOBS, Settings
from gradfilter.recipes.trainer import Trainer
from gradfilter.recipes.training import SAMPLES

RESULTS = "evaluation.json"
HELD_OUT = (
    "tested on {:,} of {:,} pictures, those that training would hold out: of a folder with train/ "
    "and test/ all below test/ count"
)
# Gradients are not asked for: no method, no plan.
PLAIN = {"method": "exact", "plan": None, "last": None, "engine": "layer", **dict.fromkeys(KNOBS)}


def evaluate(
    out: Path,
    *,
    which: str = "best",
    data: str | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, float]:
    """Test a run's network on its own test pictures or on those of other data.

    Writes the metrics to `evaluation.json` in the run, and the task's pictures.
    """
    out = Path(out)
    with parallel.world(device) as world:
        screen = Screen(quiet or not world.first)
        trainer, found = load(out, which, world, **PLAIN)
        tested = _data(out, trainer.settings, found, data)
        test = tested.test
        with screen.bar("testing", per_epoch(len(test), trainer.batch)) as advance:
            metrics, tally = trainer.evaluate(test, advance)
        if world.first:
            for name, value in metrics.items():  # first of all: the run may be where none can write
                screen.say(f"{name:<24} {_told(name, value)}")
            about = {"checkpoint": which, "step": found["step"], "pictures": len(test)}
            text = json.dumps(tables.plain(about | metrics), indent=1) + "\n"
            checkpoint.write(out / RESULTS, text.encode())
            drawn = trainer.task.pictures(tally, trainer.samples(test, SAMPLES), out)
            if data and tested.held_out:
                screen.say(HELD_OUT.format(len(test), len(test) + len(tested.train)))
            screen.say(f"{len(test):,} pictures; written: {', '.join(map(str, drawn))}")
    return metrics


def _told(name: str, value: float) -> str:
    """A metric as text; a class that is neither there nor found has none."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if name == "loss" else f"{value:.1%}"


def predict(
    out: Path,
    images: list[Path],
    *,
    which: str = "best",
    device: str = "auto",
    numbers: bool = False,
):
    """For every image file its path and what the network says of it, one after the other.

    That is a list of (class, share), the likeliest first, or a picture with the mask over it, or
    with `numbers` the mask itself; or the error, where a file is no picture that can be read.
    """
    trainer, found = load(Path(out), which, World(parallel.choose(device)), **PLAIN)
    if numbers and found["task"] != "segmentation":
        raise ValueError(f"{out} tells classes apart, and makes no masks: leave --numbers out")
    show = trainer.task.numbered if numbers else trainer.task.show
    for path in images:
        try:
            image = decode.picture(Path(path))
        except (ValueError, OSError) as error:
            yield Path(path), error
            continue
        seen, _ = trainer.change[False](image, _no_target(trainer, image))
        yield Path(path), show(trainer.outputs(seen[None])[0].cpu(), image)


def load(out: Path, which: str, world: World, **changes) -> tuple[Trainer, dict]:
    """The network of a run, ready to be used with some settings changed, and its checkpoint."""
    if not (out / recording.CONFIG).is_file():
        raise ValueError(f"{out} holds no run: there is no {recording.CONFIG} in it")
    found = checkpoint.load(out / f"{which}.pt")
    settings = Settings(**found["settings"]).changed(
        weights="none",
        mean=found["mean"],
        std=found["std"],
        size=found["size"],
        cache_features=False,
        **changes,
    )
    if settings.plan:
        settings = settings.changed(plan=out / recording.PLAN, last=None)
    trainer = Trainer(
        settings, found["task"], tuple(found["classes"]), ignore=found["ignore"], world=world
    )
    trainer.model.load_state_dict(found["model"])
    return trainer, found


def _data(out: Path, settings: Settings, found: dict, other: str | None) -> Data:
    """The data of the run, or other data of the same classes."""
    now = documents.read(out / recording.CONFIG)  # which knows where they are since they were moved
    where, root = other or now["data"], now["root"]
    if not other and where not in names() and not Path(where).is_dir():
        raise ValueError(f"{where} is no folder: give --data, where the pictures of {out} are now")
    data = open_data(where, root=Path(root) if root else None, download=settings.download)
    if list(data.classes) != found["classes"] or data.task != found["task"]:
        raise ValueError(f"{where} has other classes than those the run was trained on")
    return data if other else parts.choose(settings, data)[0]


def _no_target(trainer: Trainer, image: torch.Tensor):
    """A target that goes with any picture."""
    masks = trainer.task.headline == "miou"
    return torch.zeros(image.shape[1:], dtype=torch.uint8) if masks else 0

"""One client's share of a round: take the global network, train it on its own pictures, answer."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from gradfilter import stopwatch
from gradfilter.convert import Converted
from gradfilter.federated import settings as options
from gradfilter.federated.exchange import Exchange
from gradfilter.federated.settings import Both
from gradfilter.recipes import parts
from gradfilter.recipes.datasets import Data, Pictures, open_data
from gradfilter.recipes.loading import default_workers, mixed
from gradfilter.recipes.parallel import World, choose, deterministic
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Trainer

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"  # the records of a message
WEIGHT = "num-examples"  # what results are weighted by, as Flower calls it
NUMBERS = (WEIGHT, "steps", "loss", "seconds", "step-seconds", "setup-seconds", "peak-bytes")
RAISED = 2  # Flower's code for an error of the client's own


def answer(message: Message, context: Context) -> Message:
    """Train as the message asks; what the user can put right is answered as an error."""
    try:
        return Message(content=train(message.content, context), reply_to=message)
    except (ValueError, OSError) as error:
        told = " ".join(str(error).split())
        return Message(error=Error(RAISED, told), reply_to=message)


def train(content: RecordDict, context: Context) -> RecordDict:
    """The content of the answer: the trained tensors, what training took, and who we are."""
    begin, asked = time.monotonic(), content[CONFIG]
    settings, federation = read(context)
    # a device's own weights are not those that training starts from
    settings = settings.changed(backbone_lr=asked["backbone-lr"])
    classes = tuple(json.loads(asked["classes"]))
    pictures, name = own(settings, context.node_config, classes)
    trainer = ready(settings, asked["task"], classes, asked["ignore"], asked["level"])
    exchange = Exchange(trainer.model)
    if exchange.kept() != asked["kept"]:
        raise ValueError("the frozen layers differ from the server's: other weights or versions")
    exchange.check(content[ARRAYS], asked["layout"])
    exchange.load(content[ARRAYS])
    setup = time.monotonic() - begin
    local = Local(trainer, pictures, federation.rounds, asked["server-round"])
    found = local.run(asked.get("proximal-mu", 0.0)) | {"setup-seconds": setup}
    return RecordDict(
        {
            ARRAYS: exchange.record(),
            METRICS: MetricRecord({key: found[key] for key in NUMBERS}),
            CONFIG: ConfigRecord({"name": name, "layout": exchange.layout}),
        }
    )


@dataclass
class Local:
    """The steps of one client in one round; the learning rate falls over all rounds."""

    trainer: Trainer
    pictures: Pictures
    rounds: int
    round: int  # from 1

    def run(self, mu: float) -> dict[str, float]:
        """Train; what it took."""
        trainer, times = self.trainer, []
        settings = trainer.settings
        count = settings.steps or settings.epochs * trainer.epoch_steps(len(self.pictures))
        numbers = range((self.round - 1) * count, self.round * count)

        def steps() -> None:
            last = time.perf_counter()
            for _ in trainer.steps(self.pictures, numbers, self.rounds * count):
                times.append(time.perf_counter() - last)
                last += times[-1]
            trainer.check(numbers[-1])

        with proximal(trainer, mu), deterministic(trainer.device, settings.deterministic):
            peak = peak_of(steps, trainer.device)
        total, seen = trainer.sums.tolist()
        return {
            WEIGHT: len(self.pictures),
            "steps": count,
            "loss": total / max(1.0, seen),
            "seconds": sum(times),
            "step-seconds": statistics.median(times),
            "peak-bytes": peak,
        }


def peak_of(steps, device: torch.device) -> float:
    """Run; bytes over the weights at the highest point, NaN where that cannot be measured."""
    if device.type == "cuda":
        return stopwatch.cuda_peak(steps, device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        steps()
        return float("nan")
    return stopwatch.resident_peak(steps)


class proximal:
    """FedProx's pull: the gradient of mu/2 |w - w_global|^2, added before every step."""

    def __init__(self, trainer: Trainer, mu: float):
        self.trainer, self.mu = trainer, mu

    def __enter__(self) -> None:
        self.start: list[Tensor] = [p.detach().clone() for p in self.trainer.parameters]
        self.hook = self.trainer.optimizer.register_step_pre_hook(self.pull)

    def pull(self, *_) -> None:
        if self.mu:
            for p, start in zip(self.trainer.parameters, self.start, strict=True):
                if p.grad is not None:
                    p.grad.add_(p.detach() - start, alpha=self.mu)

    def __exit__(self, *_) -> None:
        self.hook.remove()


def read(context: Context) -> Both:
    """The run's settings, with what this device has of its own."""
    config = context.run_config
    settings, federation = options.from_config(config, _plan_file(config.get("plan", "")))
    here = {k: v for k, v in context.node_config.items() if k in options.OWN}
    settings = settings.changed(**here)
    if federation.simulate and not federation.in_process and settings.workers is None:
        # By itself a client would take all cores, which many share.
        most = default_workers(World(choose(settings.device)))
        settings = settings.changed(workers=min(federation.cpus, most))
    return settings, federation


def _plan_file(plan: str) -> Path:
    """Where a plan goes: another one elsewhere, for trainers are known by their settings."""
    return Path(_folder().name) / f"{mixed(plan)}.yaml"


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory:
    """Gone when the process ends; a process that is killed leaves it in the run's own folder."""
    home = os.environ.get("FLWR_HOME", "")
    return tempfile.TemporaryDirectory(
        prefix="gradfilter-", dir=home if os.path.isdir(home) else None
    )


def own(settings: Settings, node: dict, classes: tuple[str, ...]) -> tuple[Pictures, str]:
    """The pictures of this client and what to call it.

    A device with data of its own trains on all of it; the others have a part of the run's.
    """
    data = opened(settings.data, settings.root, settings.in_memory)
    if "data" in node:
        return adopted(data, classes).train, str(node.get("name", Path(settings.data).name))
    if "partition-id" not in node:
        raise ValueError("this client has neither data of its own nor the number of a part")
    number, count = int(node["partition-id"]), int(node["num-partitions"])
    pictures = part(settings, number, count, adopted(data, classes))
    return pictures, str(node.get("name", number))


def part(settings: Settings, number: int, count: int, data: Data) -> Pictures:
    """The pictures of one of so many clients, from the split that the run asks for."""
    chosen = settings.changed(parts=count, part=number, test="all")
    return parts.choose(chosen, data)[0].train


@lru_cache(maxsize=1)
def opened(where: str, root: str | None, in_memory: bool) -> Data:
    """Data, read once a process; a client downloads nothing, and may have one class only."""
    place = Path(root) if root else None
    return open_data(where, root=place, download=False, cache=in_memory, fewest=1)


def adopted(data: Data, classes: tuple[str, ...]) -> Data:
    """The data with the server's numbers for its classes, of which it may have only some."""
    if data.classes == classes:
        return data
    unknown = [name for name in data.classes if name not in classes]
    if unknown or data.train.labels is None:
        some = ", ".join(unknown[:3]) or "other classes of masks"
        raise ValueError(f"{data.name} has classes that the server does not know: {some}")
    numbers = torch.tensor([classes.index(name) for name in data.classes])
    return replace(
        data,
        classes=classes,
        train=data.train.relabelled(numbers),
        test=data.test.relabelled(numbers),
    )


def ready(settings: Settings, task: str, classes, ignore: int, level: str) -> Trainer:
    """A trainer as new, though its network may have served another client of this process."""
    kept = settings.changed(data="", root=None, out=None)
    trainer = _trainer(kept, task, classes, None if ignore < 0 else ignore, level)
    trainer.optimizer.state.clear()  # momentum is not carried from round to round
    trainer.sums.zero_()
    trainer.healthy.fill_(True)
    for module in trainer.model.modules():
        if isinstance(module, Converted):
            module.gf.state = module.gf.before = ()
    return trainer


@lru_cache(maxsize=1)
def _trainer(settings: Settings, task: str, classes, ignore: int | None, level: str) -> Trainer:
    return Trainer(settings, task, classes, ignore=ignore, level=level)

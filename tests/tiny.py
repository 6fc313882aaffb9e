"""A tiny network and a few tiny pictures for the training suites.

Run as a script it is the command line, with the tiny network for every model.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from gradfilter import cli
from gradfilter.recipes import checkpoint, models, training
from gradfilter.recipes import weights as files
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Trainer

HERE = Path(__file__).parent
SIZE = 16


def build(name, num_classes, *, task="classification", weights="none", size=None, **_):
    """Stands in for `models.build`; `tiny` has dropout, so that its steps are random."""
    last = [nn.Conv2d(8, num_classes, 1)]
    if task == "classification":
        last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)]
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1)]
    middle = [nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()]
    drop = [] if name == "still" else [nn.Dropout(0.2)]
    model = nn.Sequential(*body, *middle, *drop, *last)
    if name == "wild":  # random from its first layer on
        model = nn.Sequential(body[0], nn.Dropout(0.2), *model[1:])
    if weights not in ("none", "library"):
        model.load_state_dict(files.state_dict(files.read(weights), weights))
    about = size or SIZE, "tiny", weights != "none"
    return models.Network(model, (127.0,) * 3, (64.0,) * 3, *about)


def photographs(folder: Path, each: int = 9, classes: int = 3, size: int = SIZE) -> Path:
    """Class folders of noise around a colour of the class, below `train/` and `test/`."""
    from PIL import Image

    generator = torch.Generator().manual_seed(3)
    for part in ("train", "test"):
        for c in range(classes):
            place = folder / part / f"class{c}"
            place.mkdir(parents=True)
            for i in range(each):
                image = torch.randint(120, (size, size, 3), generator=generator)
                image[..., c % 3] += 100
                Image.fromarray(image.byte().numpy()).save(place / f"{i}.png")
    return folder


def scenes(folder: Path, count: int = 7, size: int = SIZE) -> Path:
    """Pictures with masks of two classes; picture i has i rows of pixels that do not count."""
    from PIL import Image

    generator = torch.Generator().manual_seed(4)
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        (folder / f"{part}annot").mkdir()
        for i in range(count):
            mask = torch.zeros(size, size, dtype=torch.uint8)
            mask[:, size // 2 + i % 3 :] = 1
            image = (
                60 + 90 * mask[..., None] + torch.randint(60, (size, size, 3), generator=generator)
            )
            mask[: 2 * i] = 255
            Image.fromarray(image.byte().numpy()).save(folder / part / f"{i}.png")
            Image.fromarray(mask.numpy()).save(folder / f"{part}annot" / f"{i}.png")
    (folder / "classes.txt").write_text("left\nright\n")
    return folder


def settings(data, out, **options) -> Settings:
    """Of a short run: 15 steps of the photographs."""
    usual = {"model": "tiny", "batch": 6, "epochs": 3, "lr": 1.0}
    quick = {"compare": False, "tensorboard": False}
    return Settings(data=str(data), out=str(out), **usual | quick | options)


def go(data, out, **options) -> training.Result:
    return training.train(settings(data, out, **options), quiet=True)


def go_on(out, **options) -> training.Result:
    return training.train(training.resumed(out, **options), resume=True, quiet=True)


def run(*arguments, processes: int = 1) -> subprocess.CompletedProcess:
    """The command line in processes of its own."""
    line, env = command(*arguments, processes=processes)
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)


def command(*arguments, processes: int = 1) -> tuple[list[str], dict[str, str]]:
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = [sys.executable, *(several if processes > 1 else []), str(HERE / "tiny.py")]
    return [*start, *map(str, arguments)], env


def forked(call: Callable[[int], None], processes: int = 1) -> list[int]:
    """Exit codes of copies of this process that call a function with their number.

    Several of them form a world, as torchrun would start it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def child(rank: int) -> None:
        torch.set_num_threads(1)  # threads do not survive a fork
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ |= {k: str(v) for k, v in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
        call(rank)

    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=child, args=(rank,)) for rank in range(processes)]
    for one in children:
        one.start()
    for one in children:
        one.join(timeout=120)
    return [one.exitcode for one in children]


def weights(run: Path, name: str = "last.pt") -> dict:
    return torch.load(run / name, weights_only=True)["model"]


def same(a: dict, b: dict) -> bool:
    """Whether two state dicts are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def arm(what: str, number: int) -> None:
    """Kill this process, as by kill -9, at its so-manieth step, file or rename.

    A file is half written then; a step is not taken, a rename is not done.
    """
    left = [number]

    def at(do, before=lambda *args: None):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*args, **kwargs)

        return counted

    def half(path, data, *_):
        path.with_name(path.name + checkpoint.NEW).write_bytes(bytes(data)[: len(data) // 2])

    if what == "step":
        Trainer.step = at(Trainer.step)
    elif what == "file":
        checkpoint.write = at(checkpoint.write, half)
    elif what == "rename":
        os.replace = at(os.replace)


if __name__ == "__main__":
    models.build = build
    sys.exit(cli.main())

"""What the suites of gradfilter-device share: a small exported network and its runner."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gradfilter as gf
from gradfilter.export import Runner

SIZE = 32
CLASSES = ("left", "right")  # of `tiny.scenes`
SOURCE = Path(__file__).parents[1] / "device" / "src"
# a process in which torch and this package cannot be imported
ALONE = (
    "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'gradfilter'])); "
    "from gradfilter_device.cli import main; sys.exit(main())"
)


def exported(
    path: Path, photos: Path, batch=None, kind=torch.optim.SGD, masks: bool = False, **recipe
) -> Path:
    """A small network, exported with SGD with momentum or another optimizer."""
    torch.manual_seed(0)
    classes = CLASSES if masks else sorted(p.name for p in (photos / "train").iterdir())
    body = [
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
    ]  # fmt: skip
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, len(classes))]
    model = nn.Sequential(*body, *([nn.Conv2d(16, len(classes), 1)] if masks else last))
    x = torch.randn(2, 3, SIZE, SIZE)
    gf.convert(model, gf.GalerkinFilter(grid=4), example=x)
    recipe = {"lr": 1.0, "epochs": 3, "batch": batch or 4} | recipe
    ignore = 255 if masks else None
    runner = Runner((127.0,) * 3, (64.0,) * 3, tuple(classes), ignore, recipe)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    target = torch.zeros((2, SIZE, SIZE) if masks else 2, dtype=torch.int64)
    return gf.export(
        model, x, target, path, optimizer=optimizer, clip=2.0, batch=batch, runner=runner
    )


def run(*arguments, **options) -> subprocess.CompletedProcess:
    command, environment = called(*arguments)
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def called(*arguments) -> tuple[list[str], dict[str, str]]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return [sys.executable, "-c", ALONE, *map(str, arguments)], environment


def tensors(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {n: file[n] for n in file.files if n != "about"}


def same(a: Path, b: Path) -> bool:
    one, other = tensors(a), tensors(b)
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def changed(folder: Path, to: Path, name: str, change) -> Path:
    other = shutil.copytree(folder, to)
    path = other / name
    path.write_bytes(change(path.read_bytes()))
    return other


def signed(manifest: dict) -> str:
    """A manifest as text, with the digest of what it says now."""
    manifest = json.loads(json.dumps(manifest))
    return json.dumps(manifest | {"digest": module("exported").signature(manifest)})


def module(name: str):
    """A module of gradfilter_device, in this process."""
    sys.path.insert(0, str(SOURCE))
    try:
        return importlib.import_module(f"gradfilter_device.{name}")
    finally:
        sys.path.remove(str(SOURCE))


def refused(done: subprocess.CompletedProcess, why: str) -> bool:
    """Whether a command ended with one line that says why."""
    assert done.returncode == 2, done.stderr + done.stdout
    assert done.stderr.count("\n") == 1 and why in done.stderr, done.stderr
    return True

"""EfficientNet-Lite0 learns scikit-learn's digits twice: in PyTorch, and by gradfilter-device.

Both start from the same ImageNet weights with GalerkinFilter(grid=7) on all layers and take the
same number of steps of the same recipe; the runner is a process without torch. Their batches come
in other orders, and the exported step has no dropout, so the two agree within noise only, of which
several seeds tell more than one.

    python benchmarks/device_digits.py --epochs 2 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import measure

HERE = Path(__file__).parent
RUNNER = HERE.parent / "device" / "src"
MODEL = "tf_efficientnet_lite0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "device-digits.json")
    args = parser.parse_args()
    found: dict[str, dict[int, list[float]]] = {}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as place:
            for name, rows in compared(Path(place), args, seed).items():
                found.setdefault(name, {})[seed] = rows
    about = measure.about(__file__, sys.argv[1:])
    measure.write(args.out, {"about": about, "accuracy": found})
    for name, runs in found.items():
        best = [max(rows) for rows in runs.values()]
        print(f"{name} {statistics.mean(best):.1%} ({', '.join(f'{b:.1%}' for b in best)})")


def compared(place: Path, args: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """The accuracy after every epoch of both."""
    from gradfilter.recipes import exporting, settings, training
    from gradfilter.recipes.trainer import Trainer

    photos = as_files(place / "digits", args.size)
    chosen = settings.Settings().changed(
        data=str(photos), model=MODEL, size=args.size, epochs=args.epochs, batch=args.batch,
        lr=args.lr, backbone_lr=1.0, augment="none", out=str(place / "run"), compare=False,
        tensorboard=False, device="cpu", seed=seed,
    )  # fmt: skip
    classes = tuple(sorted(p.name for p in (photos / "train").iterdir()))
    exporting.write(Trainer(chosen, "classification", classes), place / "exported")
    by_device = on_device(place, photos)
    by_torch = [row["test_top1"] for row in training.train(chosen, quiet=True).rows[1:]]
    return {"PyTorch": by_torch, "gradfilter-device": by_device}


def on_device(place: Path, photos: Path) -> list[float]:
    """The accuracy after every epoch of the runner."""
    blocked = "import sys; sys.modules['torch'] = None; "
    run = blocked + "from gradfilter_device.cli import main; sys.exit(main())"
    options = ["train", photos, "--model", place / "exported", "--threads", "1", "--no-augment"]
    command = [sys.executable, "-c", run, *map(str, options)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(RUNNER)}, check=True)
    with open(place / "exported" / "run" / "log.csv", newline="") as file:
        return [float(row["accuracy"]) for row in csv.DictReader(file)]


def as_files(folder: Path, size: int) -> Path:
    """The digits as picture files, `train/` and `test/`."""
    from PIL import Image

    from gradfilter.recipes.datasets.digits import digits

    for part, (images, classes) in zip(("train", "test"), digits(size), strict=True):
        for i, (image, c) in enumerate(zip(images, classes.tolist(), strict=True)):
            path = folder / part / f"digit{c}" / f"{i:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(path)
    return folder


if __name__ == "__main__":
    main()

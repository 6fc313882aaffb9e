"""The command that takes a run to a device: `gradfilter export`.

As in `cli`, nothing here imports torch before a command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def export(args: argparse.Namespace) -> None:
    """write the training step of a run for a device without PyTorch; gradfilter-device trains it"""
    from gradfilter.cli import UserError, user_errors

    to = args.to.with_suffix("") if args.to.suffix == ".onnx" else args.to
    if to.exists() and not to.is_dir():
        raise UserError(f"{to} is a file: --to names a folder")
    import onnx  # noqa: F401  told before the network is loaded

    from gradfilter.recipes import exporting

    with user_errors(ValueError, OSError):
        folder = exporting.export(args.out, to, which=args.which, batch=args.batch)
    size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file()) / 2**20
    print(f"written: {folder} ({size:.1f} MiB)")
    print(f"copy {folder.name}/ to the device, install gradfilter-device there (pip install")
    print("./device in a copy of this project's repository, no PyTorch needed), and")
    print(f"  gradfilter-device train PHOTOS --model {folder.name}")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import whole

    add = parser.add_argument
    add("out", type=Path, metavar="RUN", help="folder of the run")
    add(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to write (an ending .onnx is dropped)",
    )
    add("--which", choices=("best", "last"), default="best", help="checkpoint to start from")
    add(
        "--batch", type=whole, default=None, help="fix the images a step; any number goes otherwise"
    )

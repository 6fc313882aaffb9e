"""The command `gradfilter-device`: train, predict, status, self-test."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gradfilter_device import __version__
from gradfilter_device.exported import Exported, Unusable, reason

GONE = 141  # what a shell gives for a program that SIGPIPE has ended
PREDICTIONS = "predictions"  # where masks go, in the folder of a run


def train(args: argparse.Namespace) -> None:
    """train an exported network on a folder of photographs; goes on where it was stopped"""
    from gradfilter_device import memory
    from gradfilter_device.training import Options, Run

    memory.keep()
    model = Exported(args.model)
    names = ("epochs", "batch", "lr", "warmup", "seed", "augment")
    given = {k: v for k in names if (v := getattr(args, k)) is not None}
    fixed = {"batch": model.batch} if model.batch else {}
    options = Options.of(model.manifest.get("recipe", {}) | fixed | given)
    if model.batch and options.batch != model.batch:
        raise Unusable(f"this network was exported for batches of {model.batch}")
    run = Run(model, args.data, run_of(args), options, args.threads)
    run.agree(given)
    if args.memory_limit:
        run.limit(args.memory_limit * memory.MIB)
    run.go(args.save_every)
    best, name = run.best, run.headline
    told = f", {len(run.skipped.names)} broken pictures skipped" if run.skipped.names else ""
    print(f"done: {name} {best[name]:.1%} at epoch {best['epoch']:g}{told}; {run.folder}")
    print(memory.told())


def predict(args: argparse.Namespace) -> None:
    """say what is on pictures: the likeliest classes, or a mask file for each"""
    import numpy as np

    from gradfilter_device import photos
    from gradfilter_device.feeding import Feeder, Skipped
    from gradfilter_device.training import Tester

    model = Exported(args.model)
    classes, broken = model.pictures["classes"], 0
    tester = Tester(model, trained(model, args), args.threads)
    feeder = Feeder(model, [], 0, False, Skipped(Path()))
    for path in args.images:
        try:
            photo = feeder.picture(path)
        except photos.Broken as error:
            broken += 1
            print(f"skipped: {error}", file=sys.stderr)
            continue
        x = feeder.normal(photos.cut(photo, model.size, model.masks))
        scores = tester.scores(x[None])[0]
        if model.masks:
            mask = scores.argmax(0).astype(np.uint8)
            folder = args.masks or run_of(args) / PREDICTIONS
            print(f"{path}: {save_mask(mask, photo.size, path.stem, folder)}", flush=True)
            continue
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        best = shares.argsort()[::-1][:5]
        print(f"{path}: " + ", ".join(f"{classes[i]} {shares[i]:.1%}" for i in best), flush=True)
    if broken:
        raise Unusable(f"{broken} of {len(args.images)} pictures could not be read")


def save_mask(mask, size: tuple[int, int], stem: str, folder: Path) -> Path:
    """Write a mask to a new file; gives its name."""
    from PIL import Image

    image = Image.fromarray(mask).resize(size, Image.Resampling.NEAREST)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with new_file(folder, stem) as file, written_whole(Path(file.name)):
            image.save(file, "PNG")
    except OSError as error:
        raise Unusable(f"cannot write {folder}: {reason(error)}") from error
    return Path(file.name)


def new_file(folder: Path, stem: str) -> BinaryIO:
    """A file under the first name that no other has."""
    for n in itertools.count():
        try:
            return open(folder / (f"{stem}-{n}.png" if n else f"{stem}.png"), "xb")
        except FileExistsError:
            continue


@contextmanager
def written_whole(path: Path) -> Iterator[None]:
    """Leaves no file that was not written to its end."""
    try:
        yield
    except OSError:
        path.unlink(missing_ok=True)
        raise


def run_of(args: argparse.Namespace) -> Path:
    """The folder of the run that a command is about."""
    return args.run or args.model / "run"


def trained(model: Exported, args: argparse.Namespace) -> dict:
    """The parameters of a run, or those that were exported."""
    from gradfilter_device import checkpoint

    path = run_of(args) / checkpoint.BEST
    found = checkpoint.load(path)
    if found is None and path.exists():
        raise Unusable(f"{path} is damaged; train again, or remove it to use the exported network")
    if found is None:
        if args.run:
            raise Unusable(f"{args.run} holds no trained network yet")
        print("not trained here yet: these are the exported parameters", file=sys.stderr)
        return model.start()
    checkpoint.check(model, path.parent, found, model.parameters)
    return found[0]


def status(args: argparse.Namespace) -> None:
    """say how far the training is, and what was exported"""
    from gradfilter_device import checkpoint, metrics

    model, folder = Exported(args.model), run_of(args)
    if args.run and not folder.exists():
        raise Unusable(f"there is no run in {folder}: no such folder")
    m = model.manifest
    count, *shape = m["images"]
    sides = "x".join("any" if s is None else str(s) for s in shape)
    print(
        f"network     {len(m['layers'])} layers, {len(m['parameters'])} trained tensors, "
        f"images {sides}, {count or 'any number'} a step"
    )
    print(f"step        {m['optimizer']['name']}; {m['task']}")
    found = checkpoint.latest(folder)
    if found is None:
        print("training    not begun")
        return
    checkpoint.check(model, folder, found, model.parameters | model.state)
    about = found[1]
    total = about["options"]["epochs"]
    print(
        f"training    step {about['step']}, batches of {about['options']['batch']}, "
        f"{total} epochs asked for"
    )
    for row in about["rows"][-3:]:
        print(f"  {metrics.told(row)}")
    for path in about["skipped"]:
        print(f"  skipped, broken: {path}")


def self_test(args: argparse.Namespace) -> None:
    """take a few steps and compare with what PyTorch got when the network was exported"""
    from gradfilter_device.selftest import compare

    print(compare(Exported(args.model), args.threads))


def parser() -> argparse.ArgumentParser:
    top = Parser("gradfilter-device", description=__import__("gradfilter_device").__doc__)
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (run, arguments) in COMMANDS.items():
        command = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, formatter_class=Help
        )
        arguments(command)
        add = command.add_argument
        add(
            "--model",
            type=Path,
            required=True,
            metavar="DIR",
            help="folder that gradfilter export wrote",
        )
        if run is not status:
            add("--threads", type=count, default=0, help="threads of ONNX Runtime; 0: one a core")
        if run is not self_test:
            add(
                "--run",
                type=Path,
                metavar="DIR",
                help="folder of the run (default: run in the model's)",
            )
        command.set_defaults(function=run)
    return top


def train_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "data",
        type=Path,
        metavar="FOLDER",
        help="a sub-folder of pictures for each class, or train/ and test/ with those",
    )
    add("--epochs", type=whole, help="(default: as exported, else 10)")
    add("--batch", type=whole, help="images a step (default: as exported, else 8)")
    add(
        "--lr",
        type=amount,
        help="highest learning rate, for 128 images a step (default: as exported, else 0.05)",
    )
    add(
        "--warmup",
        type=share,
        help="share of the steps in which the rate rises (default: as exported, else 0.1)",
    )
    add("--seed", type=int, help="of the order and the cuts (default: as exported, else 0)")
    add(
        "--augment",
        action=argparse.BooleanOptionalAction,
        help="cut and mirror photographs to classify at random (default: as exported, else yes)",
    )
    add(
        "--memory-limit",
        type=whole,
        metavar="MB",
        help="most memory of the whole process; batches get smaller to keep it",
    )
    add(
        "--save-every",
        type=amount,
        default=5.0,
        metavar="MINUTES",
        help="between checkpoints within an epoch",
    )


def predict_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    command.add_argument(
        "--masks",
        type=Path,
        metavar="DIR",
        help="where masks go, in new files (default: predictions in the run's folder)",
    )


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def amount(text: str, most: float = float("inf")) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= most or found == float("inf"):
        told = ">= 0" if most == float("inf") else f"from 0 to {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {told}")
    return found


def share(text: str) -> float:
    return amount(text, 1.0)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the default of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default is None or "default:" in (action.help or "")
        return action.help if told else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that reports a mistake in one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


COMMANDS = {
    "train": (train, train_arguments),
    "predict": (predict, predict_arguments),
    "status": (status, lambda command: None),
    "self-test": (self_test, lambda command: None),
}


def main(argv: list[str] | None = None) -> int:
    steady()
    try:
        try:
            return called(argv)
        finally:
            sys.stdout.flush()  # here and not when Python ends, where it would be told
    except BrokenPipeError:  # the reader of our output has gone
        code = GONE
    except OSError as error:  # a full disk under our output
        code, place = 2, f"{error.filename}: " if error.filename else "cannot be told: "
        with suppress(OSError):
            print(f"gradfilter-device: {place}{reason(error)}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def steady() -> None:
    """Have an output that takes the name of any file, and one where the caller has closed it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def called(argv: list[str] | None) -> int:
    """Run a command; its exit code."""
    args = parser().parse_args(argv)
    try:
        args.function(args)
    except Unusable as error:
        print(f"gradfilter-device {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped", file=sys.stderr)
        return 130
    return 0

"""The command `gradfilter-device`: train, predict, status, self-test."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gradfilter_device import __version__
from gradfilter_device.exported import Exported, Unusable

GONE = 141  # what a shell gives for a program that SIGPIPE has ended


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
    run = Run(model, args.data, args.run or args.model / "run", options, args.threads)
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
    if model.masks:
        check_stems(args.images)
    classes, broken = model.pictures["classes"], 0
    tester = Tester(model, trained(model, args), args.threads)
    feeder = Feeder(model, [], 0, False, Skipped(Path()))
    for path in args.images:
        try:
            image = photos.picture(path)
        except photos.Broken as error:
            broken += 1
            print(f"skipped: {error}", file=sys.stderr)
            continue
        x = (photos.cut(image, model.size, model.masks) - feeder.mean) / feeder.std
        scores = tester.scores(x[None].astype(model.dtype))[0]
        if model.masks:
            mask = scores.argmax(0).astype(np.uint8)
            print(f"{path}: {save_mask(mask, image.size, path, args.masks)}", flush=True)
            continue
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        best = shares.argsort()[::-1][:5]
        print(f"{path}: " + ", ".join(f"{classes[i]} {shares[i]:.1%}" for i in best), flush=True)
    if broken:
        raise Unusable(f"{broken} of {len(args.images)} pictures could not be read")


def check_stems(paths: list[Path]) -> None:
    """Refuse pictures whose masks would overwrite each other."""
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(path.stem, path)
        if other != path:
            raise Unusable(f"{other} and {path} would have the same mask file; ask one by one")


def save_mask(mask, size, path: Path, folder: Path) -> Path:
    from PIL import Image

    told = folder / f"{path.stem}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).resize(size, Image.Resampling.NEAREST).save(told)
    except OSError as error:
        raise Unusable(f"cannot write {told}: {error.strerror or error}") from error
    return told


def trained(model: Exported, args: argparse.Namespace) -> dict:
    """The parameters of a run, or those that were exported."""
    from gradfilter_device import checkpoint

    path = (args.run or args.model / "run") / checkpoint.BEST
    found = checkpoint.load(path)
    if found is None and path.exists():
        raise Unusable(f"{path} is damaged; train again, or remove it to use the exported network")
    if found is None:
        if args.run:
            raise Unusable(f"{args.run} holds no trained network yet")
        print("not trained here yet: these are the exported parameters", file=sys.stderr)
        return model.start()
    values, about = found
    check_export(model, about)
    return values


def check_export(model: Exported, about: dict) -> None:
    """Refuse the checkpoint of a run of another network."""
    if about["export"] != model.digest:
        raise Unusable("the run is of another export; give the one it was trained with")


def status(args: argparse.Namespace) -> None:
    """say how far the training is, and what was exported"""
    from gradfilter_device import checkpoint, metrics

    model = Exported(args.model)
    m = model.manifest
    count, *shape = m["images"]
    sides = "x".join("any" if s is None else str(s) for s in shape)
    print(
        f"network     {len(m['layers'])} layers, {len(m['parameters'])} trained tensors, "
        f"images {sides}, {count or 'any number'} a step"
    )
    print(f"step        {m['optimizer']['name']}; {m['task']}")
    found = checkpoint.latest(args.run or args.model / "run")
    if found is None:
        print("training    not begun")
        return
    about = found[1]
    check_export(model, about)
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
        help="cut and mirror photographs to classify at random (default: yes)",
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
        "--masks", type=Path, default=Path("masks"), metavar="DIR", help="where masks go"
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
    try:
        try:
            return called(argv)
        finally:
            sys.stdout.flush()  # here and not when Python ends, where it would be told
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GONE


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

"""The command line: a table of commands, each a function that imports what it needs.

Nothing here imports torch, so that `gradfilter --help` answers at once; for the same reason the
console script enters through `gradfilter_cli`, which loads this file without its package.
A new command is a function, a function that adds its arguments, and a line in COMMANDS.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path


class UserError(Exception):
    """Something asked for that cannot be had: one line on stderr, exit code 2."""


def demo(args: argparse.Namespace) -> None:
    """teach an ImageNet network to read handwriting, with several methods side by side"""
    from gradfilter import demo

    methods = [build_method(name) for name in args.methods]
    settings = {k: getattr(args, k) for k in ("steps", "size", "batch", "lr", "seed", "out")}
    with user_errors(OSError):
        demo.demo(methods, **settings)


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = ["exact", "gradient-filter", "galerkin", "hosvd"]
    add("--methods", nargs="+", default=default, metavar="METHOD", help="names from the README")
    add("--steps", type=whole, default=40)
    add("--size", type=whole, default=64, help="image side in pixels")
    add("--batch", type=whole, default=32, help="images a step")
    add("--lr", type=float, default=0.03, help="learning rate at the first step")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("demo"), metavar="DIR", help="where the plot goes")


def info(args: argparse.Namespace) -> None:
    """print versions, threads, devices and which kernels are in use"""
    import platform

    import torch

    import gradfilter
    from gradfilter import kernels

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    lines = {
        "gradfilter": gradfilter.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        **{name: version(name) for name in ("torchvision", "timm", "segmentation-models-pytorch")},
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": cuda,
        **{f"kernels, {name}": text for name, text in kernels.status().items()},
    }
    for name, value in lines.items():
        print(f"{name:<28} {value}")


def cost(args: argparse.Namespace) -> None:
    """print the cost of a training step, layer by layer, of any torchvision or timm model"""
    import torch

    import gradfilter
    from gradfilter.recipes import models

    method = method_of(args)
    with user_errors(ValueError):
        model = models.create(args.model)
        gradfilter.convert(model, method, last=args.last)
    shape = (args.batch, 3, args.size, args.size)
    if getattr(method, "energy", None) is None:
        model, x = model.to("meta"), torch.empty(shape, device="meta")
    else:
        print("ranks depend on the data: these are of noise in a network of random weights")
        x = torch.randn(shape)
    about = f"{args.model} cannot take {args.size}x{args.size} images: "
    with user_errors(RuntimeError, AssertionError, ValueError, about=about):
        print(gradfilter.cost(model, x).table())


def cost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a torchvision or timm name: mobilenet_v2")
    method_arguments(parser)
    parser.add_argument("--size", type=whole, default=224, help="image side in pixels")
    parser.add_argument("--batch", type=whole, default=1, help="images a step")


COMMANDS = {
    "demo": (demo, demo_arguments),
    "info": (info, lambda parser: None),
    "cost": (cost, cost_arguments),
}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        return fail(args.command, str(error))
    except ModuleNotFoundError as error:
        return fail(args.command, f"needs {error.name}: pip install 'gradfilter[train]'")
    except KeyboardInterrupt:
        return 130
    return 0


def fail(command: str, message: str) -> int:
    print(f"gradfilter {command}: {message}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """argparse that reports a mistake in one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> Parser:
    top = Parser("gradfilter", description="Train convolutional networks on small devices.")
    top.add_argument("--version", action="version", version=version("gradfilter"))
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (run, arguments) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=run.__doc__,
            description=run.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        arguments(command)
        command.set_defaults(run=run)
    return top


def method_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose a method; each knob has the name it has in Python."""
    group = parser.add_argument_group("method", argument_default=argparse.SUPPRESS)
    add = group.add_argument
    add("--method", default="exact", help="a name from the README")
    add("--patch", type=whole, help="patch side, in pixels")
    add("--grid", type=whole, help="patches a side")
    add("--bases", type=whole, help="Walsh-Hadamard coefficients per patch")
    add("--energy", type=float, help="share of the energy that a decomposition keeps, up to 1")
    add("--rank", type=whole, help="rank of every mode of a decomposition")
    add("--bits", type=int, choices=[8], help="keep what the method keeps in 8 bits, and round g")
    add("--last", type=whole, default=None, help="train only the last so many layers")


KNOBS = ("patch", "grid", "bases", "energy", "rank")


def method_of(args: argparse.Namespace):
    """The method that the options of `method_arguments` describe."""
    from gradfilter import Int8

    method = build_method(args.method, **{k: getattr(args, k) for k in KNOBS if hasattr(args, k)})
    with user_errors(ValueError):
        return Int8(method) if hasattr(args, "bits") else method


def build_method(name: str, **knobs):
    """The method of that command-line name; refuses knobs that it does not have."""
    from dataclasses import fields

    from gradfilter import METHODS

    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4) or METHODS
        raise UserError(f"no method is called {name!r}; did you mean {', '.join(near)}?")
    has = [f.name for f in fields(METHODS[name]) if f.name in KNOBS]
    for knob in knobs:
        if knob not in has:
            raise UserError(f"{name} has no --{knob}; it has {', '.join(has) or 'no options'}")
    with user_errors(ValueError):
        return METHODS[name](**knobs)


@contextmanager
def user_errors(*kinds: type[Exception], about: str = ""):
    """Exceptions of these kinds are the user's to hear about, in one line."""
    try:
        yield
    except kinds as error:
        raise UserError(about + str(error).strip().partition("\n")[0]) from error


def whole(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"

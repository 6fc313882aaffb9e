"""The command line: a table of commands, each a function that imports what it needs.

Nothing here imports torch, so that `gradfilter --help` answers at once; for the same reason the
console script enters through `gradfilter_cli`, which loads this file without its package.
A new command is a function, a function that adds its arguments, and a line in COMMANDS.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import fields
from importlib import util
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
    from gradfilter import environment

    for name, value in environment.about().items():
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


METAVARS = {"whole": "N", "count": "N", "amount": "X", "share": "X", "colour": "X[,X,X]"}


def train(args: argparse.Namespace) -> None:
    """train a network on pictures, and print what it gained; a run's folder holds the rest"""
    run_training(args)


def pretrain(args: argparse.Namespace) -> None:
    """as train, with exact gradients on one part of the data; train goes on with another part"""
    run_training(args, method="exact", split="non-iid")


def run_training(args: argparse.Namespace, **defaults) -> None:
    """Train with what the command line, the file of --config and the defaults say, in this order"""
    from gradfilter.recipes import settings, training

    given = {k: v for k, v in vars(args).items() if k not in ("command", "run", "config", "resume")}
    if {"plan", "method"} <= given.keys():
        raise UserError("--plan gives each layer its method: leave --method out")
    with user_errors(ValueError, OSError):
        asked = settings.merged(settings.read(args.config) if args.config else {}, given)
        if args.resume is None:
            chosen = settings.Settings().changed(**defaults | asked)
        else:
            folder = args.resume or asked.get("out")
            if not folder:
                raise UserError("--resume needs the folder of the run: --resume RUN")
            options = {k: v for k, v in asked.items() if k != "out"}
            chosen = training.resumed(folder, **options)
        training.train(chosen, resume=args.resume is not None)


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for every setting; one that is not given leaves its default to the settings."""
    parser.add_argument(
        "--config", type=Path, default=None, metavar="FILE", help="YAML or JSON file of any options"
    )
    parser.add_argument(
        "--resume", nargs="?", const="", default=None, metavar="RUN", help="go on with a run"
    )
    setting_arguments(parser, fields(sibling("recipes.settings").Settings))


def setting_arguments(parser: argparse.ArgumentParser, settings, defaults=None, helps=None) -> None:
    """An option for each of these fields, with a default or help that is not the field's own."""
    parser.argument_default = argparse.SUPPRESS
    for f in settings:
        about, name = f.metadata, "--" + f.name.replace("_", "-")
        default = (defaults or {}).get(f.name, f.default)
        help = (helps or {}).get(f.name, about["help"])
        told = "" if default in (None, "") else f" (default: {default})"
        if isinstance(f.default, bool):
            extra = {"action": argparse.BooleanOptionalAction}
            told = " (default: on)" if default else ""
        else:
            kind, choices = about["kind"], about["choices"]
            shown = None if choices else METAVARS.get(kind.__name__, f.name.upper())
            extra = {"type": checked(kind), "choices": choices, "metavar": shown}
        parser.add_argument(name, help=help.replace("%", "%%") + told, **extra)


def evaluate(args: argparse.Namespace) -> None:
    """test the network of a run again, or on other data"""
    from gradfilter.recipes import evaluation

    with user_errors(ValueError, OSError):
        evaluation.evaluate(args.out, which=args.which, data=args.data, device=args.device)


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    parser.add_argument("--data", default=None, help="other data of the same classes")


def predict(args: argparse.Namespace) -> None:
    """say what is on pictures, by the network of a run: the likeliest classes, or a mask"""
    from gradfilter.recipes import evaluation
    from gradfilter.recipes.datasets import folder

    with user_errors(ValueError, OSError):
        images = folder.pictures_of(args.images)
        masks, drawn = args.masks or args.out / "predictions", {p.resolve() for p in images}
        how = {"which": args.which, "device": args.device, "numbers": args.numbers}
        found = evaluation.predict(args.out, images, **how)
        failed = []
        for path, answer in found:
            if isinstance(answer, Exception):
                failed.append(answer)
                continue
            if isinstance(answer, list):
                told = ", ".join(f"{name} {share:.1%}" for name, share in answer)
            else:
                masks.mkdir(parents=True, exist_ok=True)
                told = unused(masks, path.stem, drawn)
                answer.save(told)
            print(f"{path}: {told}", flush=True)
        if failed:
            more = f" (and {len(failed) - 1} more)" if failed[1:] else ""
            raise UserError(f"{failed[0]}{more}")


def unused(folder: Path, stem: str, taken: set[Path]) -> Path:
    """A name for a mask that no picture asked about and no other mask of this call has."""
    names = (f"{stem}-{n}.png" if n else f"{stem}.png" for n in range(len(taken) + 1))
    path = next(folder / name for name in names if (folder / name).resolve() not in taken)
    taken.add(path.resolve())
    return path


def predict_arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    help = "picture files, or folders of them"
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help=help)
    help = "folder for mask pictures (default: predictions in the run)"
    parser.add_argument("--masks", type=Path, default=argparse.SUPPRESS, metavar="DIR", help=help)
    help = "masks of class numbers, as training reads them, instead of colours over the picture"
    parser.add_argument("--numbers", action="store_true", help=help)
    parser.set_defaults(masks=None)


def run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="RUN", help="folder of the run")
    choices = ("best", "last")
    parser.add_argument("--which", choices=choices, default="best", help="checkpoint to use")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")


def sibling(name: str):
    """A module of this package that needs no torch, loaded without the package where that is new"""
    full = f"gradfilter.{name}"
    if full in sys.modules or "gradfilter" in sys.modules:
        return importlib.import_module(full)
    spec = util.spec_from_file_location(
        full, Path(__file__).parent / f"{name.replace('.', '/')}.py"
    )
    module = sys.modules[full] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cli_compare, cli_export = sibling("cli_compare"), sibling("cli_export")
cli_federate, cli_measure = sibling("cli_federate"), sibling("cli_measure")
cli_plan = sibling("cli_plan")
COMMANDS = {
    "train": (train, train_arguments),
    "pretrain": (pretrain, train_arguments),
    "evaluate": (evaluate, evaluate_arguments),
    "predict": (predict, predict_arguments),
    "export": (cli_export.export, cli_export.export_arguments),
    "demo": (demo, demo_arguments),
    "info": (info, lambda parser: None),
    "cost": (cost, cost_arguments),
    "profile": (cli_measure.profile, cli_measure.profile_arguments),
    "fidelity": (cli_measure.fidelity, cli_measure.fidelity_arguments),
    "plan": (cli_plan.plan, cli_plan.plan_arguments),
    "compare": (cli_compare.compare, cli_compare.compare_arguments),
    "federate": (cli_federate.federate, cli_federate.federate_arguments),
    "federate-keys": (cli_federate.federate_keys, cli_federate.federate_keys_arguments),
    "federate-server": (cli_federate.federate_server, cli_federate.federate_server_arguments),
    "federate-client": (cli_federate.federate_client, cli_federate.federate_client_arguments),
}


EXTRAS = {"flwr": "federated", "onnx": "export", "onnxruntime": "export"}  # what brings a module


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    leave_unsaid()
    try:
        args.run(args)
    except UserError as error:
        return fail(args.command, str(error))
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name).partition(".")[0], "train")
        return fail(args.command, f"needs {error.name}: pip install 'gradfilter[{extra}]'")
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        told = str(error).strip().partition("\n")[0]
        return fail(args.command, f"out of memory: try fewer or smaller pictures a step ({told})")
    except KeyboardInterrupt as stop:
        if stop.args:
            print(*stop.args, file=sys.stderr)  # where a saved run goes on
        return 130
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        leave()
    return 0


def leave_unsaid() -> None:
    """Warnings that a user can do nothing about, each with a line of a library's source."""
    warnings.filterwarnings("ignore", module=r"PIL\b")  # of files that are read all the same
    warnings.filterwarnings("ignore", "Glyph")  # class names that matplotlib has no letters for


def out_of_memory(error: Exception) -> bool:
    """Whether memory was asked for that is not there; torch has no kind of its own for a CPU's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def leave() -> None:
    """End at once, all being written: PyTorch may abort where several processes are taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def fail(command: str, message: str) -> int:
    # a function of the library begins its own errors with its name, which is the command's
    print(f"gradfilter {command}: {message.removeprefix(f'{command}: ')}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """argparse that reports a mistake in one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the default of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parser() -> Parser:
    top = Parser("gradfilter", description="Train convolutional networks on small devices.")
    top.add_argument(
        "--version", action="version", version=sibling("environment").version("gradfilter")
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (run, arguments) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=run.__doc__,
            description=run.__doc__,
            formatter_class=Help,
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
    from gradfilter import methods

    with user_errors(ValueError):
        return methods.named(name, **knobs)


@contextmanager
def user_errors(*kinds: type[Exception], about: str = ""):
    """Exceptions of these kinds are the user's to hear about, in one line."""
    try:
        yield
    except BrokenPipeError:
        raise
    except kinds as error:
        if out_of_memory(error):
            raise
        raise UserError(about + str(error).strip().partition("\n")[0]) from error


def whole(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def checked(kind):
    """A kind of setting as argparse wants it: its own error has no room for a message."""

    def convert(text: str):
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert

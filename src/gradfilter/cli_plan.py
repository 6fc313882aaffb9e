"""The command that plans: `gradfilter plan`.

As in `cli`, nothing here imports torch before the command runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OVER = 1  # exit code of a plan that is over the budget
EXAMPLES = """
Memory is what training holds beyond the weights and beyond what inference needs: what is kept from
the forward to the backward pass, gradients, and the momentum of SGD. Time is that of one step. Both
are those of steps of --batch pictures: train with as many.

  gradfilter plan mobilenet_v2 --memory 24MB --data photos/ --batch 8 --save plan.yaml
  gradfilter train --model mobilenet_v2 --data photos/ --batch 8 --plan plan.yaml
  gradfilter plan resnet18 --time 300ms --batch 4 --methods exact galerkin:grid=7

Exit code 1: the best plan that was found is still over the budget when measured. It is written all
the same, and the last line says by how much it is over.
"""


def plan(args: argparse.Namespace) -> None:
    """find the layers to train, and a method for each, that learn most within a budget"""
    import torch

    import gradfilter
    from gradfilter.cli import UserError, user_errors
    from gradfilter.cli_measure import refused, try_out
    from gradfilter.recipes import models, parallel

    if args.memory is None and args.time is None:
        raise UserError("give a budget: --memory, --time or both")
    if args.save is not None and not args.save.absolute().parent.is_dir():
        raise UserError(f"--save: there is no folder {args.save.parent}")  # before the long work
    with user_errors(ValueError, OSError):
        methods = args.methods and [method(text) for text in args.methods]
        device = parallel.choose(args.device)
        models.find(args.model)  # a mistyped name is told before anything is read
        torch.manual_seed(args.seed)
        model, x, target, told = material(args, device)
    with user_errors(RuntimeError, AssertionError, ValueError, about=refused(args)):
        try_out(model, x)
    with user_errors(ValueError, TypeError, OSError), status() as tell:
        found = gradfilter.plan(
            model.train(),
            x,
            target=target,
            memory=args.memory,
            time=args.time,
            fidelity=args.fidelity,
            batch=args.batch,
            methods=methods,
            gaps=args.gaps,
            tell=tell,
        )
    print(told)
    print(found.table())
    with user_errors(OSError, ValueError):
        write(found, args)
    if found.over:
        print(f"gradfilter plan: {found.over_told()}", file=sys.stderr)
        raise SystemExit(OVER)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import checked, sibling, whole

    amounts = sibling("planning.amounts")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help="a torchvision or timm name: mobilenet_v2")
    size, seconds = checked(amounts.bytes_of), checked(amounts.seconds_of)
    add("--memory", type=size, metavar="SIZE", help="most that training may add: 64MB, 512KB")
    add("--time", type=seconds, metavar="TIME", help="most time a step may take: 200ms, 1.5s")
    add("--fidelity", type=float, metavar="X", help="least cosine with the exact gradient")
    add(
        "--gaps", action=argparse.BooleanOptionalAction, default=None,
        help="freeze layers between trained ones, or none (default: only where much is lost else)",
    )  # fmt: skip
    add("--data", help="an image folder, or the name of a data set, to weigh the layers on")
    add("--root", type=Path, metavar="DIR", help="folder of named data sets")
    add("--weights", default="library", help="library, none, or a file (default: library)")
    add("--size", type=whole, help="image side in pixels (default: the model's)")
    add("--batch", type=whole, default=8, help="images a step (default: 8)")
    add("--pictures", type=whole, default=16, help="images to weigh the layers on (default: 16)")
    help = "to choose among, as in galerkin:grid=7 or hosvd:energy=0.8 (default: six of them)"
    add("--methods", nargs="+", metavar="METHOD", help=help)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    add("--seed", type=int, default=0, help="which pictures (default: 0)")
    add("--save", type=Path, metavar="FILE", help="write the plan, as .yaml or .json")
    add("--out", type=Path, metavar="DIR", help="write plan, numbers and a plot here")


def material(args: argparse.Namespace, device) -> tuple:
    """Network, pictures, loss, and what to say of them."""
    from gradfilter.cli_measure import loss, pictures
    from gradfilter.recipes import models
    from gradfilter.recipes.datasets import open_data

    if args.data is None:
        return noise(args, device)
    data = open_data(args.data, root=args.root)
    network = models.build(
        args.model, len(data.classes), task=data.task, weights=args.weights, size=args.size
    )
    args.size = args.size or network.size
    images, targets = pictures(data, args.size, args.pictures, args.seed)
    told = f"{args.model}, weights: {network.weights}; pictures of {data.name}, {args.size} px"
    x = channels_last(network.prepare(images.to(device)))
    return channels_last(network.model.to(device)), x, loss(data, targets.to(device)), told


def noise(args: argparse.Namespace, device) -> tuple:
    """Where there is no data: what training takes is known, what it is worth is not."""
    import torch

    from gradfilter.recipes import models

    source = models.find(args.model)
    args.size = args.size or source.input(args.model)[2]
    model = source.create(args.model, None, args.size)
    x = torch.randn(args.pictures, 3, args.size, args.size)
    told = f"{args.model}, random weights, noise as pictures: give --data to weigh layers on yours"
    return channels_last(model.to(device)), channels_last(x.to(device)), None, told


def channels_last(thing):
    import torch

    return thing.to(memory_format=torch.channels_last)


def method(text: str):
    """A method from its name and knobs: `galerkin:grid=7`."""
    from gradfilter import methods
    from gradfilter.cli import KNOBS

    name, _, written = text.partition(":")
    knobs = {}
    for part in written.split(",") if written else []:
        knob, _, value = part.partition("=")
        try:
            knobs[knob] = float(value) if knob == "energy" else int(value)
        except ValueError:
            raise ValueError(
                f"{text!r}: write a method as NAME:KNOB=NUMBER, knobs are {', '.join(KNOBS)}"
            ) from None
    return methods.named(name, **knobs)


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Shows what is being done, on a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as shown:
        yield shown.update


def write(found, args: argparse.Namespace) -> None:
    """The plan as a file; beside it the numbers and a plot, where a folder was asked for."""
    file, folder = args.save, args.out
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        found.plot(folder / "report.png")
        print(f"numbers: {folder / 'report.json'}   plot: {folder / 'report.png'}")
    for path in filter(None, (file, folder and folder / "plan.yaml")):
        found.save(path)
        print(f"plan: {path}   train with it: {train_command(args, path)}")
    if file is None and folder is None:
        print("the plan was not written: --save plan.yaml keeps it for gradfilter train --plan")


def train_command(args: argparse.Namespace, plan: Path) -> str:
    """What trains as was planned: with another batch the budget would not hold."""
    names = ["model", "data", "root", "weights", "size", "batch"]
    given = {name: getattr(args, name) for name in names} | {"plan": plan}
    if args.data is None:  # planned on noise: the weights are left open too
        given |= {"data": "FOLDER", "weights": None}
    elif args.weights == "library":
        given["weights"] = None
    words = [w for name, v in given.items() if v is not None for w in (f"--{name}", str(v))]
    return shlex.join(["gradfilter", "train", *words])

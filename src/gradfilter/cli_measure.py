"""The commands that measure: `gradfilter profile` and `gradfilter fidelity`.

As in `cli`, nothing here imports torch before a command runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

METHOD = "galerkin"


def profile(args: argparse.Namespace) -> None:
    """measure time, memory and energy of a training step, beside exact training and inference"""
    import torch

    import gradfilter
    from gradfilter.cli import user_errors
    from gradfilter.recipes import models, parallel

    with user_errors(ValueError, OSError):
        what = planned(args)
        device = parallel.choose(args.device)
        source = models.find(args.model)
    noise = torch.Generator().manual_seed(0)
    x = torch.randn((args.batch, 3, args.size, args.size), generator=noise).to(device)
    x = x.contiguous(memory_format=torch.channels_last)
    with user_errors(RuntimeError, AssertionError, ValueError, about=refused(args)):
        model = source.create(args.model, None, args.size)
        model = model.to(device, memory_format=torch.channels_last)
        try_out(model, x)
    with user_errors(ValueError, OSError):
        convert(args, model, what, x)
        found = gradfilter.profile(model, x, repeats=args.repeats)
    print(f"{args.model}, random weights, noise as pictures")
    print(found.table(modules=not args.short))
    save(found, args.out, "profile")


def profile_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import whole

    model_arguments(parser)
    parser.add_argument("--size", type=whole, default=224, help="image side in pixels")
    parser.add_argument("--batch", type=whole, default=8, help="images a step")
    parser.add_argument("--repeats", type=whole, default=5, help="steps of each, in turns")
    parser.add_argument("--short", action="store_true", help="leave out the table of modules")


def fidelity(args: argparse.Namespace) -> None:
    """compare approximate gradients with the exact ones on real pictures, layer by layer"""
    import torch

    import gradfilter
    from gradfilter import trial
    from gradfilter.cli import user_errors
    from gradfilter.recipes import models, parallel
    from gradfilter.recipes.datasets import open_data

    with user_errors(ValueError, OSError):
        what = planned(args)
        device = parallel.choose(args.device)
        models.find(args.model)  # a mistyped name is told before the data is read
        data = open_data(args.data, root=args.root)
        torch.manual_seed(args.seed)
        network = models.build(
            args.model, len(data.classes), task=data.task, weights=args.weights, size=args.size
        )
        model = network.model.to(device)
        size = args.size or network.size
        images, targets = pictures(data, size, args.batch, args.seed)
    x, drawn = network.prepare(images.to(device)), trial.wake_head(model)
    args.size = size
    with user_errors(RuntimeError, AssertionError, ValueError, about=refused(args)):
        try_out(model, x)
    with user_errors(ValueError, OSError):
        convert(args, model, what, x)
        found = gradfilter.fidelity(model, x, loss(data, targets.to(device)))
    print(f"{args.model}, weights: {network.weights}; pictures of {data.name}, {size} px")
    if drawn:
        print("the output layer was all 0, which hands back no gradient: it was drawn at random")
    print(found.table())
    save(found, args.out, "fidelity")


def fidelity_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import whole

    model_arguments(parser)
    add = parser.add_argument
    add("--data", required=True, help="an image folder, or the name of a data set")
    add("--root", type=Path, default=None, metavar="DIR", help="folder of named data sets")
    add("--weights", default="library", help="library, none, or a file of weights")
    add("--size", type=whole, default=None, help="image side in pixels (default: the model's)")
    add("--batch", type=whole, default=16, help="pictures to compare on")
    add("--seed", type=int, default=0, help="which pictures")


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """What both commands ask for."""
    from gradfilter.cli import method_arguments

    add = parser.add_argument
    add("model", metavar="MODEL", help="a torchvision or timm name: mobilenet_v2")
    method_arguments(parser)
    parser.set_defaults(method=METHOD)
    add("--plan", type=Path, default=None, metavar="FILE", help="a plan instead of one method")
    add("--norm", choices=("frozen", "batch"), default="frozen", help="batch-norm statistics")
    add("--engine", choices=("auto", "layer"), default="auto", help="where filtered layers run")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--out", type=Path, default=None, metavar="DIR", help="write numbers and a plot here")


def planned(args: argparse.Namespace):
    """The method of the options, or the plan of a file."""
    from gradfilter.cli import KNOBS, UserError, method_of
    from gradfilter.plan import read

    if args.plan is None:
        return method_of(args)
    given = [name for name in (*KNOBS, "bits") if hasattr(args, name)]
    given += ["method"] if args.method != METHOD else []
    if given:
        raise UserError(f"--plan gives each layer its method: leave --{given[0]} out")
    return read(args.plan)


def try_out(model, x) -> None:
    """One forward pass of the plain model, so that what it cannot take is told by itself."""
    import torch

    with torch.no_grad():
        model.eval()(x)


def convert(args: argparse.Namespace, model, what, x) -> None:
    """Put the plan on the model, in training mode."""
    import gradfilter

    options = {name: getattr(args, name) for name in ("last", "norm", "engine")}
    gradfilter.convert(model.train(), what, example=x, **options)


def refused(args: argparse.Namespace) -> str:
    return f"{args.model} cannot take {args.size}x{args.size} images: "


def pictures(data, size: int, count: int, seed: int):
    """So many training pictures from all over, as they are tested: bytes, and their targets."""
    import torch

    from gradfilter.recipes import augment

    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    change = augment.evaluation(data.task, size)
    found = [change(*data.train[i]) for i in order[:count].tolist()]
    if not found:
        raise ValueError(f"{data.name} has no pictures to train on")
    images, targets = zip(*found, strict=True)
    return torch.stack(images), torch.stack([torch.as_tensor(t) for t in targets])


def loss(data, targets):
    """The loss that `gradfilter train` takes, as a function of the output."""
    from gradfilter.recipes.trainer import TASKS

    task = TASKS[data.task](data.classes, data.ignore)
    task.check(targets)

    def mean(output):
        total, count = task.loss(output, targets)
        return total / count.clamp(min=1)

    return mean


def save(found, folder: Path | None, name: str) -> None:
    """The numbers as JSON and a plot, where a folder was asked for."""
    from gradfilter.cli import user_errors

    if folder is None:
        return
    with user_errors(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        found.plot(folder / f"{name}.png")
    print(f"numbers: {folder / name}.json   plot: {folder / name}.png")

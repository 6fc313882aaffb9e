"""The command `gradfilter compare`.

As in `cli`, nothing here imports torch before the command runs.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

METHODS = ["exact", "galerkin:grid=7", "gradient-filter:patch=2", "hosvd:energy=0.8"]
ABOUT = """\
Trains one network on one data set by every method, at every depth, with every seed, and writes
DIR/comparison.html: accuracy against memory, time and multiply-adds, learning curves, cost and
gradient quality by layer. The page needs no network and no other file. The numbers are also in
DIR/comparison.csv and .json, each run in a folder of DIR/runs, as `gradfilter train` leaves it.
Stopped by Ctrl-C or a power cut, the same command goes on; with more methods or seeds it adds
them. A run that fails is shown as such: delete its folder to try it again.

  gradfilter compare --data digits --size 64 --epochs 1 --seeds 0 1 --methods exact galerkin:grid=7
  gradfilter compare --data photos/ --model mobilenet_v2 --last 2 4 all --out comparison
  gradfilter compare --data photos/ --methods exact galerkin:grid=7 galerkin:grid=4,bits=8
  gradfilter compare --data photos/ --methods exact plan:plan.yaml     # of `gradfilter plan`
"""


def compare(args: argparse.Namespace) -> None:
    """train with several methods, depths and seeds, and write a page that compares them"""
    from gradfilter.cli import user_errors
    from gradfilter.recipes import comparing, settings

    own = ("command", "run", "config", "methods", "last", "seeds", "pictures", "out")
    given = {k: v for k, v in vars(args).items() if k not in own}
    with user_errors(ValueError, OSError):
        config = settings.read(args.config) if args.config else {}
        shared = settings.Settings().changed(**settings.merged(config, given))
        comparing.compare(
            shared, args.methods, args.last, args.seeds, out=args.out, pictures=args.pictures
        )


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import checked, setting_arguments, sibling, whole

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = ABOUT
    settings = sibling("recipes.settings")
    several = {"nargs": "+", "metavar": "N"}
    told = f"each NAME, NAME:KNOB=NUMBER,... or plan:FILE (default: {' '.join(METHODS)})"
    add = parser.add_argument
    add("--methods", nargs="+", default=METHODS, metavar="METHOD", help=told)
    told = "train only the last so many layers, or all of them (default: 4 all)"
    add("--last", **several, type=checked(depth), default=[4, None], help=told)
    told = "a run for each (default: 0 1 2)"
    add("--seeds", **several, type=checked(settings.count), default=[0, 1, 2], help=told)
    told = "folder of the comparison (default: comparison)"
    add("--out", type=Path, default=Path("comparison"), metavar="DIR", help=told)
    told = "pictures of a step that is measured (default: the batch, on a CPU at most 8)"
    add("--pictures", type=whole, default=None, metavar="N", help=told)
    told = "YAML or JSON file of options below"
    add("--config", type=Path, default=None, metavar="FILE", help=told)
    shared = [f for f in fields(settings.Settings) if f.name not in settings.CHOSEN]
    setting_arguments(parser.add_argument_group("the runs, as in gradfilter train"), shared)


def depth(text: str) -> int | None:
    """A whole number of layers, or all of them."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is neither a whole number >= 1 nor all")
    return int(text)

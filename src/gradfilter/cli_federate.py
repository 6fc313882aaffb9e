"""The commands of federated learning; as in `cli`, nothing here imports torch before one runs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path


def federate(args: argparse.Namespace) -> None:
    """train one network with many clients that keep their pictures to themselves, by Flower"""
    from gradfilter.cli import UserError, user_errors
    from gradfilter.federated import launch, settings
    from gradfilter.recipes import recording
    from gradfilter.recipes import settings as recipe

    skipped = ("command", "run", "config", "resume")
    given = {k: v for k, v in vars(args).items() if k not in skipped}
    with user_errors(ValueError, OSError):
        config = recipe.read(args.config, settings.names()) if args.config else {}
        asked = recipe.merged(config, given)
        if args.resume is None:
            both = settings.of(asked)
        else:
            path = Path(args.resume) / recording.CONFIG
            if not path.is_file():
                raise UserError(f"{args.resume} holds no run: there is no {recording.CONFIG} in it")
            here = {"out": str(Path(args.resume).absolute())}  # it may have been moved
            both = settings.resumed(asked, settings.of(here, settings.load(path)))
        try:
            launch.federate(both, resume=args.resume is not None)
        except launch.NotFinished as error:
            print(f"gradfilter federate: {error}", file=sys.stderr)
            raise SystemExit(1) from error


def federate_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for every setting, as `gradfilter train` has them."""
    from gradfilter.cli import setting_arguments, sibling

    recipe, federated = sibling("recipes.settings"), sibling("federated.settings")
    parser.argument_default = argparse.SUPPRESS
    parser.set_defaults(config=None, resume=None)
    suppressed = {"default": argparse.SUPPRESS}
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML or JSON of any options", **suppressed)
    add("--resume", metavar="RUN", help="go on after its last finished round", **suppressed)
    setting_arguments(parser, fields(federated.Federation))
    used = [f for f in fields(recipe.Settings) if f.name not in federated.UNUSED]
    setting_arguments(parser, used, federated.DEFAULTS, federated.HELP)


def federate_keys(args: argparse.Namespace) -> None:
    """make the certificates and keys of a federation: the server's, and one for every device"""
    from gradfilter.cli import user_errors
    from gradfilter.federated import keys

    with user_errors(ValueError, OSError):
        made = keys.make(args.out, args.address, args.devices, args.days)
        told = keys.told(args.out)
    for path in made:
        print(path)
    if not made:
        print("everything was there already")
    print(f"certificates {told}")


def federate_keys_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import whole

    parser.set_defaults(days=None)
    add = parser.add_argument
    add("devices", nargs="*", metavar="NAME", help="a device that may take part")
    add("--address", nargs="+", default=[], metavar="HOST",
        help="names or IP addresses at which devices reach the server")  # fmt: skip
    add("--days", type=whole, default=argparse.SUPPRESS, metavar="N",
        help="how long new certificates last (default: 365)")  # fmt: skip
    add("--out", type=Path, default=Path("keys"), metavar="DIR", help="where they go")


def federate_server(args: argparse.Namespace) -> None:
    """run the server that devices connect to, until Ctrl-C"""
    from gradfilter.cli import UserError, user_errors
    from gradfilter.federated import flower, nodes, processes

    if args.keys is None and not args.insecure:
        raise UserError("--keys DIR (of gradfilter federate-keys), or --insecure to do without")
    try:
        with user_errors(ValueError, OSError), processes.terminable():
            nodes.serve(args.keys, args.host, args.port, args.state)
    except flower.FlowerError as error:
        print(f"gradfilter federate-server: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def federate_server_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import whole

    parser.set_defaults(keys=None)
    add = parser.add_argument
    add("--keys", type=Path, default=argparse.SUPPRESS, metavar="DIR", help="of federate-keys")
    add("--insecure", action="store_true", help="no TLS and no keys: only to try things out")
    add("--host", default="0.0.0.0", help="address to listen on")
    add("--port", type=whole, default=8000, help="port to listen on")
    add("--state", type=Path, default=Path("server"), metavar="DIR", help="database and log")


def federate_client(args: argparse.Namespace) -> None:
    """take part with this device's pictures, until Ctrl-C"""
    from gradfilter.cli import UserError, user_errors
    from gradfilter.federated import nodes, processes

    if args.keys is None and not args.insecure:
        raise UserError("--keys DIR (this device's own), or --insecure where the server is")
    if (args.data is None) == (args.part is None):
        raise UserError("which pictures? --data FOLDER of its own, or --part I --parts N")
    if args.part is not None and args.part >= args.parts:
        raise UserError(f"part must be 0 to {args.parts - 1} of {args.parts} parts")
    with processes.terminable():
        with user_errors(ValueError, OSError):
            process = nodes.join(args.server, args.keys, own(args), args.state.absolute())
        try:
            code = process.wait()
        finally:
            processes.stop(process)
    raise SystemExit(code)


def own(args: argparse.Namespace) -> dict[str, str | int]:
    """What a device has of its own, as Flower hands it to the app; files by their full paths."""
    from gradfilter.recipes.datasets import names, open_data
    from gradfilter.recipes.training import place

    name = args.name or (args.keys.resolve().name if args.keys else None)
    node = {"name": name, "weights": args.weights, "device": args.device}
    if args.weights not in (None, "library", "none"):
        node["weights"] = str(Path(args.weights).resolve(strict=True))
    if args.data is None:
        node |= {"partition-id": args.part, "num-partitions": args.parts}
    else:
        node["data"] = place(args.data)
        if args.data not in names():
            open_data(node["data"], fewest=1)  # a mistake is better said now than in every round
    return {key: value for key, value in node.items() if value is not None}


def federate_client_arguments(parser: argparse.ArgumentParser) -> None:
    from gradfilter.cli import checked, sibling, whole

    # Set before the options are added, so that help does not tell of None.
    parser.set_defaults(**dict.fromkeys(("keys", "data", "part", "name", "weights", "device")))
    add = parser.add_argument
    count = checked(sibling("recipes.settings").count)
    address = checked(sibling("federated.settings").address)
    add(
        "--server",
        type=address,
        required=True,
        metavar="HOST:PORT",
        help="where federate-server listens",
    )
    add(
        "--keys",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="this device's folder of keys",
    )
    add("--insecure", action="store_true", help="no TLS and no key: only to try things out")
    add(
        "--data",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="this device's own pictures, a folder a class",
    )
    add(
        "--part",
        type=count,
        default=argparse.SUPPRESS,
        metavar="I",
        help="or: this part of the run's data",
    )
    add("--parts", type=whole, default=2, metavar="N", help="of so many")
    add("--name", default=argparse.SUPPRESS, help="its name in the tables (default: of --keys)")
    add(
        "--weights",
        default=argparse.SUPPRESS,
        help="file of the network's weights, where it lies elsewhere",
    )
    add(
        "--device",
        default=argparse.SUPPRESS,
        help="auto, cpu, cuda, ...; by default as the run says",
    )
    add("--state", type=Path, default=Path("client"), metavar="DIR", help="Flower's own files")

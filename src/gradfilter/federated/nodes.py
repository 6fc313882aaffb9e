"""Long-running parts of a deployment: the server that devices connect to, and a device's client."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from gradfilter.federated import flower
from gradfilter.federated.flower import FlowerError, Link

LOOK = 2.0  # seconds between two looks for new keys


def serve(
    keys: Path | None, host: str, port: int, state: Path, say: Callable[[str], None] = print
) -> None:
    """Run a server until it is interrupted; takes in every device whose public key is in `keys`.

    Without keys everything is open: no TLS, and anyone who reaches the port may take part.
    """
    state = state.absolute()
    state.mkdir(parents=True, exist_ok=True)
    line = ["--database", str(state / "superlink.db")]
    if keys:
        keys = keys.absolute()
        line += secured(keys)
    certificate = keys / "ca.pem" if keys else None
    link = Link(f"{host}:{port}", certificate, state / "flower")
    with flower.superlink(link, *line, log=state / "superlink.log") as process:
        here = Link(f"127.0.0.1:{port}", certificate, link.home)
        here.write()
        say(f"serving on {host}:{port}; log: {state / 'superlink.log'}")
        registered: set[str] = set()
        while process.poll() is None:
            if keys:
                register(here, keys, registered, say)
            time.sleep(LOOK)
    raise FlowerError(f"the server ended by itself, see {state / 'superlink.log'}")


def secured(keys: Path) -> list[str]:
    """TLS, and only devices whose key is known."""
    files = {
        "--ssl-ca-certfile": "ca.pem",
        "--ssl-certfile": "server.pem",
        "--ssl-keyfile": "server.key",
    }
    for name in files.values():
        if not (keys / name).is_file():
            raise ValueError(f"{keys} has no {name}: gradfilter federate-keys makes it")
    pairs = [word for option, name in files.items() for word in (option, str(keys / name))]
    return [*pairs, "--enable-supernode-auth"]


def register(link: Link, keys: Path, registered: set[str], say: Callable[[str], None]) -> None:
    """Make devices known whose public key is new in the folder."""
    for path in sorted(keys.glob("*.pub")):
        if path.name in registered:
            continue
        registered.add(path.name)
        try:
            link.flwr("supernode", "register", str(path), flower.CONNECTION, "--name", path.stem)
        except FlowerError as error:
            if "already" not in str(error):  # known from before a restart
                say(f"{path.stem} was not registered: {error}")
                continue
        say(f"{path.stem} may take part")


def join(
    server: str,
    keys: Path | None,
    node: dict[str, str | int],
    home: Path,
    log: Path | None = None,
) -> subprocess.Popen:
    """A device's client, which stays until it is stopped and trains when it is asked to.

    `keys` is the device's own folder. `node` says which pictures it trains on: `data` of its own,
    or the part `partition-id` of `num-partitions`.
    """
    line = ["--superlink", server, "--port", str(flower.free_port())]
    if keys:
        secret = sorted(keys.glob("*.key"))
        if len(secret) != 1 or not (keys / "ca.pem").is_file():
            raise ValueError(f"{keys} is no folder of a device: it should hold one .key and ca.pem")
        line += ["--root-certificates", str(keys / "ca.pem")]
        line += ["--auth-supernode-private-key", str(secret[0])]
    else:
        line += ["--insecure"]
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in node.items())
    return flower.start("flower-supernode", *line, "--node-config", config, home=home, log=log)

"""Long-running parts of a deployment: the server that devices connect to, and a device's client."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gradfilter.federated import flower, processes
from gradfilter.federated import keys as certificates
from gradfilter.federated.flower import FlowerError, Link
from gradfilter.recipes.checkpoint import write

LOOK = 2.0  # seconds between two looks for new keys
TRIES = 3  # to make a device known
DEVICES = "devices.json"  # beside the server's database: the number of each device in it


def serve(
    keys: Path | None, host: str, port: int, state: Path, say: Callable[[str], None] = print
) -> None:
    """Run a server until it is interrupted; takes in every device whose public key is in `keys`.

    Without keys everything is open: no TLS, and anyone who reaches the port may take part.
    """
    state = state.absolute()
    state.mkdir(mode=0o700, parents=True, exist_ok=True)  # Flower's database holds tokens
    processes.end_orphans(state / "flower")
    flower.check_free(host, port)
    line = ["--database", str(state / "superlink.db")]
    if keys:
        keys = keys.absolute()
        line += secured(keys)
    certificate = keys / "ca.pem" if keys else None
    link = Link(f"{host}:{port}", certificate, state / "flower")
    with flower.superlink(link, *line, log=state / "superlink.log") as process:
        here = Link(f"{flower.reached(host)}:{port}", certificate, link.home)
        here.write()
        say(f"serving on {host}:{port}; log: {state / 'superlink.log'}")
        if keys:
            say(f"certificates {certificates.told(keys)}")
        devices = Devices(here, keys, state, say) if keys else None
        while process.poll() is None:
            if devices:
                devices.look()
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
    certificates.check(keys / "server.pem")
    pairs = [word for option, name in files.items() for word in (option, str(keys / name))]
    return [*pairs, "--enable-supernode-auth"]


class Devices:
    """The devices that the server knows, kept as those are whose public keys lie in a folder."""

    def __init__(self, link: Link, keys: Path, state: Path, say: Callable[[str], None]):
        self.link, self.keys, self.say = link, keys, say
        self.file = state / DEVICES
        # The server's database outlives it, and Flower tells nodes from each other by number only.
        self.numbers: dict[str, int] = (
            json.loads(self.file.read_text()) if self.file.exists() else {}
        )
        self.done: set[str] = set()
        self.tries: Counter[tuple[str, str]] = Counter()

    def look(self) -> None:
        """Make devices known whose key is new in the folder; forget those whose key has gone."""
        paths = {path.stem: path for path in sorted(self.keys.glob("*.pub"))}
        for name in [name for name in self.numbers if name not in paths]:
            if self._attempt(name, "removed", "unregister", str(self.numbers[name])) is not None:
                del self.numbers[name]
                self._save()
                self.say(f"{name} may no longer take part")
        self.done &= paths.keys()
        for name in [name for name in paths if name not in self.done]:
            found = self._attempt(name, "registered", "register", str(paths[name]), "--name", name)
            if found is not None:
                self.numbers |= {name: found["node-id"]} if found else {}
                self._save()
                self.done.add(name)
                self.say(f"{name} may take part")

    def _attempt(self, name: str, what: str, verb: str, *arguments: str) -> dict | None:
        """The answer of `flwr supernode`, {} where it did so before, None where it did not."""
        if self.tries[name, what] == TRIES:
            return None
        try:
            return self.link.flwr(
                "supernode", verb, arguments[0], flower.CONNECTION, *arguments[1:]
            )
        except FlowerError as error:
            if "already" in str(error) and name in self.numbers:  # known from before a restart
                return {}
            self.tries[name, what] += 1
            left = "" if self.tries[name, what] < TRIES else "; not tried again before a restart"
            self.say(f"{name} was not {what}: {error}{left}")
            return None

    def _save(self) -> None:
        write(self.file, json.dumps(self.numbers).encode())


def join(
    server: str,
    keys: Path | None,
    node: dict[str, str | int],
    home: Path,
    log: Path | None = None,
) -> processes.Program:
    """A device's client, which stays until it is stopped and trains when it is asked to.

    `keys` is the device's own folder. `node` says which pictures it trains on: `data` of its own,
    or the part `partition-id` of `num-partitions`.
    """
    line = ["--superlink", server, "--port", str(flower.free_port())]
    if keys:
        secret = sorted(keys.glob("*.key"))
        if len(secret) != 1 or not (keys / "ca.pem").is_file():
            raise ValueError(f"{keys} is no folder of a device: it should hold one .key and ca.pem")
        certificates.check(keys / "ca.pem")
        line += ["--root-certificates", str(keys / "ca.pem")]
        line += ["--auth-supernode-private-key", str(secret[0])]
    else:
        line += ["--insecure"]
    config = " ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in node.items())
    processes.end_orphans(home)
    return processes.start("flower-supernode", *line, "--node-config", config, home=home, log=log)

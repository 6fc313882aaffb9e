"""Servers of Flower's, and commands to them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradfilter.federated.processes import Program, environment, program, start, stop

CONNECTION = "gradfilter"  # the name of our connection in Flower's config
START = 120  # seconds in which a server has to be up
ANSWER = 120  # seconds in which a command has to answer


class FlowerError(RuntimeError):
    """Something that one of Flower's programs did not do."""


@dataclass(frozen=True)
class Link:
    """A server, as `flwr` reaches it."""

    address: str  # host:port
    certificate: Path | None  # of the authority that signed the server's; None is without TLS
    home: Path  # FLWR_HOME

    def write(self) -> None:
        """Name the server in Flower's config."""
        path = json.dumps(str(self.certificate), ensure_ascii=False)
        secure = f"root-certificates = {path}" if self.certificate else "insecure = true"
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{self.address}"\n{secure}\n',
            encoding="utf-8",
        )

    def flwr(self, *arguments: str) -> dict:
        """What a `flwr` command answers, as JSON."""
        done = self.call(*arguments, "--format", "json")
        try:
            found = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            found = {}
        if done.returncode or not found.get("success", True) or not found:
            why = found.get("error-message") or done.stderr or done.stdout
            raise FlowerError(f"flwr {arguments[0]}: {last_line(why)}")
        return found

    def call(self, *arguments: str) -> subprocess.CompletedProcess:
        line = [program("flwr"), *arguments]
        options = {"capture_output": True, "text": True, "timeout": ANSWER}
        try:  # in a session of its own: Ctrl-C is for us, who may want to hear the answer first
            return subprocess.run(
                line, env=environment(self.home), start_new_session=True, **options
            )
        except subprocess.TimeoutExpired:
            raise FlowerError(f"flwr {arguments[0]}: no answer in {ANSWER} s") from None


@contextmanager
def superlink(link: Link, *arguments: str, log: Path) -> Iterator[Program]:
    """A server for a while, once it answers."""
    host, _, port = link.address.rpartition(":")
    secure = () if link.certificate else ("--insecure",)
    line = ("--host", host, "--port", port, *secure, *arguments)
    process = start("flower-superlink", *line, home=link.home, log=log)
    try:
        await_server(link, process, log)
        link.write()
        yield process
    finally:
        stop(process)


def await_server(link: Link, process: Program, log: Path) -> None:
    """Come back when the server answers."""
    host, _, port = link.address.rpartition(":")
    host = reached(host)
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.2)
            continue
        if link.certificate or healthy(f"http://{host}:{port}/health"):
            return
    why = last_line(log.read_text(errors="replace")) if log.exists() else ""
    raise FlowerError(f"the server on {link.address} did not start: {why} (see {log})")


def reached(host: str) -> str:
    """The address at which one listening on `host` is reached from the same machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, or that something else listens on."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # just after a restart
            found.bind((host, port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}:{port}: {why}") from error


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def last_line(text: str) -> str:
    """The last line that says something, without colours."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "it says nothing")

"""Flower's own programs: their environment, their processes, and runs handed to them.

Everything works without a network and leaves the user's own Flower settings alone: telemetry,
update checks and installations are off unless the user's environment says otherwise, and
`FLWR_HOME` is a folder of the run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECTION = "gradfilter"  # the name of our connection in Flower's config
START = 120  # seconds in which a server has to be up
ANSWER = 120  # seconds in which a command has to answer
STOP = 15  # seconds in which a process has to end by itself


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


def environment(home: Path) -> dict[str, str]:
    """For Flower's programs: quiet, and with each other on the path."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", "")])
    return QUIET | os.environ | {"FLWR_HOME": str(home), "PATH": path}


def program(name: str) -> str:
    """One of Flower's programs, beside this Python."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        raise ModuleNotFoundError(f"there is no {found}", name="flwr")
    return str(found)


class Program(subprocess.Popen):
    """One of Flower's programs as a process group of its own.

    What comes of it bears its mark in the environment, in whatever session and below whatever
    parent: the workers of a simulation outlive theirs.
    """

    def __init__(self, line: list[str], home: Path, output: IO | None):
        self.mark = uuid.uuid4().hex
        env = environment(home) | {"GRADFILTER_PROGRAM": self.mark}
        super().__init__(line, env=env, stdout=output, stderr=output, start_new_session=True)

    def family(self) -> list[int]:
        """The processes that bear the mark; none where there is no /proc."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended, or another user's
                if self.mark.encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found


def start(name: str, *arguments: str, home: Path, log: Path | None) -> Program:
    """Begin one of Flower's programs; `log` takes what it says."""
    home.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") if log else nullcontext() as output:
        return Program([program(name), *arguments], home, output)


def stop(process: Program) -> None:
    """End a program and all that came of it; come back when they are gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP)
    deadline = time.monotonic() + STOP
    while (family := process.family()) and time.monotonic() < deadline:
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP are as Ctrl-C for a while: what we began is ended too.

    A hangup that is ignored, as under nohup, stays so.
    """

    def interrupt(*_):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, signal.SIGHUP]
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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

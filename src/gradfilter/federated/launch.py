"""A federated run from the command line: in this process, simulated, or on a running server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gradfilter import documents, methods
from gradfilter.federated import flower, processes
from gradfilter.federated import settings as options
from gradfilter.federated.flower import FlowerError, Link
from gradfilter.federated.folder import LOG, PROGRESS, RESULT, alone
from gradfilter.federated.settings import Both
from gradfilter.recipes import checkpoint, recording
from gradfilter.recipes.datasets import names, open_data
from gradfilter.recipes.interrupts import interrupts
from gradfilter.recipes.screen import Screen

APP, HOME = "app", "flower"  # folders in the run's: the app as written, Flower's own files
LOOK = 1.0  # seconds between two looks at a run that goes on elsewhere
ASK = 10.0  # seconds between two questions whether it still goes on

PROJECT = """# Written by gradfilter federate; `flwr run` takes this folder.
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "gradfilter-federated"
version = "1.0.0"
description = "Federated training with gradfilter"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "gradfilter"

[tool.flwr.app.components]
serverapp = "gradfilter_server:app"
clientapp = "gradfilter_client:app"

[tool.flwr.app.config]
"""


class NotFinished(RuntimeError):
    """A run that stopped before its end."""


def federate(both: Both, *, resume: bool = False, quiet: bool = False) -> Path:
    """Run as the settings say, in their folder `out`; `resume` goes on with the run there."""
    screen = Screen(quiet)
    both = prepared(both, resume)
    settings, federation = both
    out = Path(settings.out)
    processes.end_orphans(out / HOME)
    with alone(out):  # not under the feet of a run that is at work there
        write_app(both)
        documents.write(out / recording.CONFIG, options.as_dict(both))
        (out / RESULT).unlink(missing_ok=True)
    try:
        if federation.in_process:
            in_process(both, screen)
        else:
            with processes.terminable(), runtime(both) as link:
                hand_over(both, link, screen)
    except KeyboardInterrupt as stop:
        told = str(stop) or "stopped"
        raise KeyboardInterrupt(f"{told}; {how_to_go_on(out)}") from None
    except FlowerError as error:
        raise NotFinished(f"{error}; {how_to_go_on(out)}") from error
    except (ValueError, OSError) as error:
        if not checkpoint.saved(out):
            raise
        told = " ".join(str(error).split())
        raise ValueError(f"{told}; then {how_to_go_on(out)}") from error
    return out


def prepared(both: Both, resume: bool) -> Both:
    """With full paths and a folder, and checked as far as can be without starting anything."""
    settings, federation = both
    if not settings.data:
        raise ValueError("which pictures? --data FOLDER, or the name of a data set")
    if settings.data not in names() and not Path(settings.data).expanduser().is_dir():
        open_data(settings.data)  # knows what to say
    if settings.plan is None:
        methods.named(settings.method, **settings.knobs())
    if not federation.simulate and not federation.server:
        raise ValueError("where? --simulate N clients here, or --server HOST:PORT")
    if federation.in_process and not federation.simulate:
        raise ValueError("in-process is for simulate: --simulate N")
    if federation.simulate and not federation.in_process:
        check_resources(federation)
    out = Path(settings.out) if settings.out else recording.new_folder(settings.data, "federated")
    if not resume and checkpoint.saved(out):
        raise ValueError(f"{out} holds a run: --resume goes on with it, or change --out")
    if federation.keys:
        federation = replace(federation, keys=Path(federation.keys).absolute())
    return options.full_paths(settings.changed(out=out)), federation


def check_resources(federation: options.Federation) -> None:
    """Refuse clients that are larger than the machine: Flower would end without a word of why."""
    import torch

    have = {"cpus": os.cpu_count() or 1, "gpus": torch.cuda.device_count()}
    for name, count in have.items():
        if getattr(federation, name) > count:
            raise ValueError(f"{name}: {getattr(federation, name):g} a client, there are {count}")


def in_process(both: Both, screen: Screen) -> None:
    """Server and clients in this process, one after the other."""
    from gradfilter.federated import app, grid
    from gradfilter.federated.server import Failed, serve

    clients = grid.parts(both[1].simulate)
    here = grid.InProcess(app.client, options.to_config(both), clients)
    try:
        serve(both, screen, here, poll=0.0)
    except Failed as error:
        raise NotFinished(f"{error}; {how_to_go_on(Path(both[0].out))}") from error


@contextmanager
def runtime(both: Both) -> Iterator[Link]:
    """The server to hand the run to: one of our own that simulates, or the one asked for."""
    settings, federation = both
    home = Path(settings.out) / HOME
    if federation.simulate:
        home.mkdir(parents=True, exist_ok=True)
        link = Link(f"127.0.0.1:{flower.free_port()}", None, home)
        with flower.superlink(link, "--simulation", log=home / "superlink.log"):
            yield link
        return
    link = Link(federation.server, trusted(federation.keys), home)
    link.write()
    yield link


def hand_over(both: Both, link: Link, screen: Screen) -> None:
    """Have a server run the app, and follow it to its end; Ctrl-C stops the run there too.

    While the app is handed over, Ctrl-C has to wait for the number that a run is stopped by.
    """
    settings, federation = both
    watch = Watch(Path(settings.out), federation.rounds, screen)  # before the run says anything
    run = None
    try:
        with interrupts() as asked:
            run = submit(both, link)
        if asked:
            raise KeyboardInterrupt
        follow(watch, link, run)
    except KeyboardInterrupt:
        told = stop(link, run)
        # a server of our own ends with us
        raise KeyboardInterrupt("stopped" if federation.simulate else told) from None


def stop(link: Link, run: str | None) -> str:
    """Have the server stop a run; what came of that."""
    by_hand = f"FLWR_HOME={shlex.quote(str(link.home))} {processes.program('flwr')}"
    if run is None:
        seen = f"{by_hand} list {flower.CONNECTION}"
        return f"stopped, but the server may have taken the run just before: {seen}"
    try:
        with interrupts():
            link.flwr("stop", run, flower.CONNECTION)
    except (FlowerError, KeyboardInterrupt) as error:
        if "already finished" in str(error):
            return f"stopped; run {run} on the server had ended already"
        why = str(error) or "interrupted"
        again = f"{by_hand} stop {run} {flower.CONNECTION}"
        return f"stopped, but run {run} may go on on the server ({why}); stop it with: {again}"
    return f"stopped, and run {run} on the server too"


def trusted(keys: Path | None) -> Path | None:
    """The certificate of the authority whose server is trusted; None is without TLS."""
    if keys is None:
        return None
    from gradfilter.federated.keys import check  # only now: simulations need no certificates

    certificate = Path(keys) / "ca.pem"
    if not certificate.is_file():
        raise ValueError(f"{keys} has no ca.pem: gradfilter federate-keys makes it")
    check(certificate)
    return certificate


def submit(both: Both, link: Link) -> str:
    """Hand the app to the server; the number of its run."""
    arguments = ["run", str(Path(both[0].out) / APP), flower.CONNECTION]
    federation = both[1]
    if federation.simulate:
        resources = (
            f"num-supernodes={federation.simulate} client-resources-num-cpus={federation.cpus} "
            f"client-resources-num-gpus={float(federation.gpus)}"
        )
        arguments += ["--federation-config", resources]
    return str(link.flwr(*arguments)["run-id"])


def write_app(both: Both) -> Path:
    """The Flower app over our recipe, as a folder that `flwr run` takes."""
    config = options.to_config(both)  # TOML takes a JSON text, but not its pairs of surrogates
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in config.items()]
    app = Path(both[0].out) / APP
    shutil.rmtree(app, ignore_errors=True)
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT + "\n".join(lines) + "\n", encoding="utf-8")
    for side in ("server", "client"):
        text = f"from gradfilter.federated.app import {side} as app\n\n__all__ = ['app']\n"
        (app / f"gradfilter_{side}.py").write_text(text)
    return app


def follow(watch: Watch, link: Link, run: str) -> None:
    """Show what a run says until it ends; raises where it did not finish."""
    out, asked = watch.out, time.monotonic()
    with watch.screen.bar("rounds", watch.rounds) as advance:
        while not (out / RESULT).exists():
            watch.look(advance)
            time.sleep(LOOK)
            if time.monotonic() - asked > ASK:
                if ended(link, run):
                    break
                asked = time.monotonic()
        watch.look(advance)
    check(out, link, run)


class Watch:
    """Reads on in a run's log."""

    def __init__(self, out: Path, rounds: int, screen: Screen):
        self.out, self.rounds, self.screen = out, rounds, screen
        log = out / LOG
        self.place = log.stat().st_size if log.exists() else 0
        self.done = 0

    def look(self, advance) -> None:
        """Say what is new."""
        log, progress = self.out / LOG, self.out / PROGRESS
        if log.exists():
            with open(log, "rb") as file:
                file.seek(self.place)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.place += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self.screen.say(line)
        if progress.exists():
            found = json.loads(progress.read_text())
            advance(max(0, found["round"] - 1 - self.done),
                    note=f"round {found['round']}: {found['answered']} of {found['asked']}",
                    )  # fmt: skip
            self.done = max(self.done, found["round"] - 1)


def ended(link: Link, run: str) -> bool:
    """Whether the server says so; it is asked once more before it counts as gone."""
    try:
        found = link.flwr("list", "--run-id", run, flower.CONNECTION)
    except FlowerError:
        time.sleep(ASK / 2)
        found = link.flwr("list", "--run-id", run, flower.CONNECTION)
    runs = found.get("runs", [])
    return bool(runs) and str(runs[0].get("status", "")).startswith("finished")


def check(out: Path, link: Link, run: str) -> None:
    """Flower's own commands succeed whatever a run came to: the result says how it was."""
    result = out / RESULT
    found = json.loads(result.read_text()) if result.exists() else {}
    if found.get("finished"):
        return
    told = found.get("error") or why(link, run) or "the server ended it and does not say why"
    if found.get("mistake"):
        raise ValueError(told)
    raise NotFinished(f"the run did not finish: {told}; {how_to_go_on(out)}")


def why(link: Link, run: str) -> str:
    """The last complaint in Flower's log of a run."""
    try:
        lines = link.call("log", run, flower.CONNECTION, "--show").stdout.splitlines()
    except FlowerError:
        return ""
    complaints = [line for line in lines if "INFO" not in line and line.strip()]
    return flower.last_line("\n".join(complaints)) if complaints else ""


def how_to_go_on(out: Path) -> str:
    return f"go on with: gradfilter federate --resume {out}"

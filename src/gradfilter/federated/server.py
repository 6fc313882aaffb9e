"""The server's side of a run: rounds of asking clients, averaging and testing, each one saved."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from gradfilter import documents
from gradfilter.federated import client as clients
from gradfilter.federated import strategy
from gradfilter.federated.client import ARRAYS, CONFIG, METRICS, NUMBERS, WEIGHT
from gradfilter.federated.exchange import Exchange, count_bytes, some, to_array, to_tensor, wide
from gradfilter.federated.folder import MIB, Folder, Row, alone
from gradfilter.federated.settings import Both
from gradfilter.recipes import checkpoint, recording
from gradfilter.recipes.datasets import Data, open_data
from gradfilter.recipes.loading import mixed
from gradfilter.recipes.parallel import deterministic
from gradfilter.recipes.screen import Screen
from gradfilter.recipes.trainer import Trainer

TRIES = 3  # of a round that brings nothing
GONE = "no answer"


class Failed(RuntimeError):
    """A run that cannot go on; what it finished is saved."""


class Server:
    """A run from its first round, or from its last finished one, to its end."""

    def __init__(self, both: Both, screen: Screen, *, poll: float = 1.0):
        self.settings, self.federation = both
        self.both, self.screen, self.poll = both, screen, poll
        self.out = Path(self.settings.out)
        self.folder = Folder(self.out, screen)
        self.data = self._open()
        self.trainer = self._trainer()
        self.settings = self.trainer.settings
        self.exchange = Exchange(self.trainer.model)
        self.strategy = strategy.build(self.federation)
        self.round, self.rounds, self.clients = 0, [], []
        self.known: set[int] = set()
        self.arrays = wide(self.exchange.record())
        if self.federation.simulate:  # what no client could do is better said once, and now
            clients.part(self.settings, 0, self.federation.simulate, self.data)
        self._restore()

    def run(self, grid: Grid) -> None:
        """All rounds that are left."""
        if not self.rounds:
            self._begin()
        while self.round < self.federation.rounds:
            self._next(grid, self.round + 1)
        self._finish()

    def _next(self, grid: Grid, number: int) -> None:
        """One round: as often as it takes to get something usable, within reason."""
        begin, before = time.monotonic(), len(self.clients)
        # Flower draws clients from Python's own generator; a resumed run draws the same.
        random.seed(mixed("clients", self.settings.seed, number))
        for left in reversed(range(TRIES)):
            self._gather(grid)
            asked, wire = self._messages(grid, number)
            used, rows = self._answers(grid, number, asked, count_bytes(wire))
            self.clients += rows
            if used:
                break
            once_more = "; once more" if left else ""
            self.folder.say(f"round {number}: nothing usable ({reasons(rows)}){once_more}")
        else:
            self.folder.tables(self.rounds, self.clients)
            raise Failed(f"round {number} brought nothing usable in {TRIES} tries: {reasons(rows)}")
        self.arrays, _ = self.strategy.aggregate_train(number, used)
        self.exchange.load(self.exchange.narrow(self.arrays))
        self.round = number
        self._record(used, len(rows), self.clients[before:], time.monotonic() - begin)

    def _gather(self, grid: Grid) -> None:
        """Wait until enough clients are there; say who is new and who has gone."""
        deadline = time.monotonic() + 60 * self.federation.join_minutes
        told = False
        while len(here := set(grid.get_node_ids())) < self.federation.clients:
            if time.monotonic() > deadline:
                raise Failed(
                    f"{len(here)} clients are there after {self.federation.join_minutes:g} "
                    f"minutes, {self.federation.clients} are needed"
                )
            if not told:
                self.folder.say(f"waiting for {self.federation.clients} clients")
                told = True
            time.sleep(self.poll or 0.1)
        if here != self.known and self.known:
            new, gone = len(here - self.known), len(self.known - here)
            self.folder.say(f"{len(here)} clients: {new} joined, {gone} left")
        self.known = here

    def _messages(self, grid: Grid, number: int) -> tuple[dict[str, int], ArrayRecord]:
        """Ask clients to train: {message: client}, and the arrays they were sent."""
        data = self.data
        config = ConfigRecord(
            {
                "classes": json.dumps(data.classes),
                "task": data.task,
                "ignore": -1 if data.ignore is None else data.ignore,
                "level": data.augment,
                "backbone-lr": self.settings.backbone_lr,
                "kept": self.exchange.kept(),
                "layout": self.exchange.layout,
            }
        )
        here = Present(self.known)
        messages = list(self.strategy.configure_train(number, self.arrays, config, here))
        wire = self.exchange.narrow(self.arrays)
        for message in messages:
            message.content[ARRAYS] = wire
        nodes = [message.metadata.dst_node_id for message in messages]
        sent = list(grid.push_messages(messages))
        return {str(i): node for i, node in zip(sent, nodes, strict=True) if i}, wire

    def _answers(
        self, grid: Grid, number: int, asked: dict[str, int], sent: int
    ) -> tuple[list[Message], list[Row]]:
        """The usable answers, as the strategy wants them, and a row for everyone asked."""
        used, rows, waiting = [], [], dict(asked)
        with self.screen.bar(f"round {number}", len(asked)) as advance:
            for reply in self._replies(grid, waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                why = strategy.problem(reply, self.exchange)
                rows.append(self._row(number, node, sent, reply, why))
                if why is None:
                    reply.content[ARRAYS] = wide(reply.content[ARRAYS])
                    used.append(reply)
                else:
                    self.folder.say(f"round {number}, client {rows[-1]['client']}: {why}")
                self.folder.progress(number, len(rows), len(asked))
                advance(note=f"{rows[-1]['client']}")
        for node in waiting.values():
            rows.append(self._row(number, node, sent, None, GONE))
            self.folder.say(f"round {number}, client {rows[-1]['client']}: {GONE}")
        # The order of arrival is not to change the last bits of the average.
        return sorted(used, key=lambda reply: self._name(reply)), rows

    def _replies(self, grid: Grid, waiting: dict[str, int]) -> Iterator[Message]:
        """Answers as they arrive, until all are there or the time is up."""
        deadline = time.monotonic() + 60 * self.federation.answer_minutes
        while waiting and time.monotonic() < deadline:
            found = list(grid.pull_messages(list(waiting)))
            yield from (r for r in found if r.metadata.reply_to_message_id in waiting)
            if not found and waiting:
                time.sleep(self.poll)

    def _row(self, number: int, node: int, sent: int, reply: Message | None, why) -> Row:
        """What is known of a client in a round."""
        row: Row = {"round": number, "client": self._name(reply) or self._called(node)}
        row |= {"node": str(node), "status": why or "used", "bytes_down": sent, "bytes_up": 0}
        if reply is not None and reply.has_content():
            row["bytes_up"] = sum(count_bytes(r) for r in reply.content.array_records.values())
            numbers = reply.content.get(METRICS) or {}
            row |= {k.replace("-", "_").replace("num_examples", "pictures"): v
                    for k, v in numbers.items()
                    if k in NUMBERS and isinstance(v, int | float)}  # fmt: skip
        return row

    def _name(self, reply: Message | None) -> str:
        """What a client calls itself."""
        if reply is None or not reply.has_content() or CONFIG not in reply.content:
            return ""
        return str(reply.content[CONFIG].get("name", ""))

    def _called(self, node: int) -> str:
        """What a client called itself before, else the end of its number."""
        before = [r["client"] for r in self.clients if r["node"] == str(node)]
        return str(before[-1]) if before else f"...{node % 10**6:06d}"

    def _record(self, used: list[Message], asked: int, rows: list[Row], seconds: float) -> None:
        """Test, add a row, keep the best, save; `rows` are of all tries, which all cost traffic."""
        weights = [reply.content[METRICS][WEIGHT] for reply in used]
        losses = [reply.content[METRICS]["loss"] for reply in used]
        sent = sum(row["bytes_down"] + row["bytes_up"] for row in rows)
        both_ways = sum(1 + (row["bytes_up"] > 0) for row in rows)
        self.rounds.append(
            {
                "round": self.round,
                "asked": asked,
                "used": len(used),
                "train_loss": sum(w * v for w, v in zip(weights, losses, strict=True))
                / sum(weights),
                **self._test(),
                "bytes": sent,
                "full_bytes": both_ways * self.exchange.full_bytes,
                "seconds": seconds,
            }
        )
        self.folder.say(told(self.rounds[-1], self.federation.rounds))
        self._save()

    def _test(self) -> dict[str, float]:
        with deterministic(self.trainer.device, self.settings.deterministic):
            metrics, _ = self.trainer.evaluate(self.data.test)
        return {f"test_{name}": value for name, value in metrics.items()}

    def _begin(self) -> None:
        """Write down what is to be done, and how good the network is before."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.trainer.plan.save(self.out / recording.PLAN)
        if (config := self.out / recording.CONFIG).is_file():  # as it was asked for
            found = documents.read(config) | {"backbone_lr": self.settings.backbone_lr}
            documents.write(config, found)
        shared, whole = count_bytes(self.exchange.record()), self.exchange.full_bytes
        plan = self.trainer.plan
        self.folder.say(
            f"{self.data.name}: {len(self.data.test):,} pictures to test on, "
            f"{len(self.data.classes)} classes; {self.settings.model}, weights: "
            f"{self.trainer.network.weights}; {self.federation.strategy}, "
            f"{self.federation.rounds} rounds\n{len(plan) - len(plan.frozen)} of {len(plan)} "
            f"layers trained; {shared / MIB:.2f} MiB of {whole / MIB:.2f} MiB travel each way"
        )
        blank = {k: math.nan for k in ("asked", "used", "train_loss")}
        self.rounds.append(
            {"round": 0, **blank, **self._test(), "bytes": 0, "full_bytes": 0, "seconds": 0.0}
        )
        self.folder.say(told(self.rounds[0], self.federation.rounds))
        self._save()

    def _save(self) -> None:
        """The state to go on from, the best network so far, and the tables."""
        settings = self.settings.changed(split=None, plan=None)
        model = self.trainer.record(self.data, self.round, settings) | {"metrics": self.rounds[-1]}
        if best_of(self.rounds, self.trainer.task.headline) is self.rounds[-1]:
            checkpoint.save(self.out / checkpoint.BEST, model)
        last = model | {
            "wide": self._wide(),
            "strategy": strategy.memory(self.strategy),
            "rounds": self.rounds,
            "clients": self.clients,
        }
        checkpoint.save(self.out / checkpoint.LAST, last, self.out / checkpoint.PREVIOUS)
        self.folder.tables(self.rounds, self.clients)

    def _wide(self) -> dict:
        """The arrays that the server holds in more bits than the network does."""
        found = {kind: to_tensor(array) for kind, array in self.arrays.items()}
        return {kind: t for kind, t in found.items() if f"torch.{kind}" != str(t.dtype)}

    def _restore(self) -> None:
        """Go back to the last finished round, where there is one."""
        if not checkpoint.saved(self.out):
            return
        found, problem = checkpoint.latest(self.out)
        if problem:
            self.folder.say(problem)
        self.trainer.model.load_state_dict(found["model"])
        arrays = wide(self.exchange.record())
        arrays.update({name: to_array(t) for name, t in found["wide"].items()})
        self.arrays = arrays
        strategy.remember(self.strategy, found["strategy"])
        self.round, self.rounds, self.clients = found["step"], found["rounds"], found["clients"]
        self.folder.say(f"going on after round {self.round} of {self.federation.rounds}")

    def _open(self) -> Data:
        s = self.settings
        if not s.data:
            raise ValueError("which pictures? --data FOLDER, or the name of a data set")
        root = Path(s.root) if s.root else None
        return open_data(s.data, root=root, download=s.download, cache=s.in_memory)

    def _trainer(self) -> Trainer:
        s, data = self.settings, self.data
        trainer = Trainer(s, data.task, data.classes, ignore=data.ignore, level=data.augment)
        trainer.check_batch(trainer.batch)  # here rather than by every client
        return trainer

    def _finish(self) -> None:
        """Draw, and leave the sign that all went well."""
        self.trainer.close()
        headline = self.trainer.task.headline
        self.folder.draw(self.rounds, headline)
        best = best_of(self.rounds, headline)
        sent, whole = (sum(row[k] for row in self.rounds) for k in ("bytes", "full_bytes"))
        self.folder.say(
            f"{headline} {self.rounds[0][f'test_{headline}']:.1%} -> "
            f"{best[f'test_{headline}']:.1%} (round {best['round']}); "
            f"{sent / MIB:.1f} MiB sent in all, whole networks: {whole / MIB:.1f} MiB "
            f"({whole / max(1, sent):.1f}x)\nrun: {self.out}"
        )
        self.folder.result(finished=True, rounds=self.round, best=best, bytes=sent)


def serve(both: Both, screen: Screen, grid: Grid, *, poll: float = 1.0) -> None:
    """A run in its folder; what stops it is written there too."""
    out = Path(both[0].out)
    with alone(out):  # a folder that another server holds is not ours to write a result in
        try:
            Server(both, screen, poll=poll).run(grid)
        except Exception as error:
            told = " ".join(str(error).split())
            mistake = isinstance(error, ValueError | OSError)
            if not mistake and not isinstance(error, Failed):
                told = f"{type(error).__name__}: {told}"
            Folder(out, screen).result(finished=False, error=told, mistake=mistake)
            raise


@dataclass(frozen=True)
class Present:
    """The clients that were there a moment ago, as a strategy asks a grid for them.

    Asked itself, it may have lost one since, and Flower would wait for as many without an end.
    """

    nodes: set[int]

    def get_node_ids(self) -> list[int]:
        return sorted(self.nodes)


def reasons(rows: list[Row]) -> str:
    """Why answers could not be used, each reason once, with whom it is of."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(str(row["status"]), []).append(str(row["client"]))
    return "; ".join(f"{some(who)}: {status}" for status, who in found.items())


def best_of(rounds: list[Row], headline: str) -> Row:
    """The best round after some training, by the metric that counts."""

    def worth(row: Row) -> float:
        value = row[f"test_{headline}"]
        return -math.inf if math.isnan(value) else value

    return max(rounds[1:] or rounds, key=worth)


def told(row: Row, rounds: int) -> str:
    """A round in a line."""
    tests = [
        f"{name} {value:.4f}" if name == "loss" else f"{name} {value:.1%}"
        for key, value in row.items()
        if (name := key.removeprefix("test_")) != key and not name.startswith("iou ")
    ]
    if not row["round"]:
        return f"before training: test {', '.join(tests)}"
    return (
        f"round {row['round']}/{rounds}: {row['used']:.0f} of {row['asked']:.0f} clients; loss "
        f"{row['train_loss']:.4f}; test {', '.join(tests)}; {row['bytes'] / MIB:.1f} MiB, "
        f"{row['seconds']:.1f} s"
    )

"""A Flower grid within one process: clients train one after the other, when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from gradfilter.federated.client import RAISED


class InProcess(Grid):
    """Runs a ClientApp for every message; what a client raises is an error reply, as elsewhere."""

    def __init__(self, app: ClientApp, config: dict, nodes: list[dict]):
        self.app = app
        self.contexts = {
            number: Context(1, number, node, RecordDict(), config)
            for number, node in enumerate(nodes, start=1)
        }
        self.asked: dict[str, Message] = {}
        logging.getLogger("flwr").setLevel(logging.ERROR)  # the server says the same in its words
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(str(uuid4()))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.asked[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """One more answer, of the first of these that still has to be worked on."""
        for i in message_ids:
            if i in self.asked:
                return [self._run(self.asked.pop(i))]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        ids = list(self.push_messages(messages))
        return [reply for i in ids for reply in self.pull_messages([i])]

    def _run(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # a client's failure is not the server's
            told = f"{type(error).__name__}: {error}"
            return Message(error=Error(RAISED, told), reply_to=message)

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("a grid in one process has no run of Flower's")

    @property
    def run(self) -> Run:
        raise NotImplementedError("a grid in one process has no run of Flower's")


def parts(count: int) -> list[dict]:
    """The node configs of so many clients, one part each, as Flower's simulation gives them."""
    return [{"partition-id": i, "num-partitions": count} for i in range(count)]

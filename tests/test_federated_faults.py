"""Clients that fail, lie, fall silent or come late, and servers that break."""

import json

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

import tiny  # noqa: E402
from flwr.app import Array, ArrayRecord, Error, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from rounds import asked, rows, run, trained  # noqa: E402

from gradfilter.federated import app, client, grid, server, settings  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_networks", "fresh_clients")


def spoil(reply: Message, how: str) -> Message:
    """An answer as no healthy client gives it."""
    content = reply.content
    flat = content["arrays"]["float32"].numpy().copy()
    if how == "nan":
        flat[7] = float("nan")
        content["arrays"] = ArrayRecord({"float32": Array(flat)})
    elif how == "shape":
        content["arrays"] = ArrayRecord({"float32": Array(flat[:-2])})
    elif how == "names":
        content["config"]["layout"] = json.dumps(json.loads(content["config"]["layout"])[1:])
    elif how == "nothing":
        del content["arrays"]
    elif how == "numbers":
        del content["metrics"]["steps"]
    elif how == "columns":
        content["metrics"]["status"] = content["metrics"]["bytes_up"] = float("nan")
    elif how == "weight":
        content["metrics"]["num-examples"] = float("nan")
    elif how == "heavy":  # of two such the sum is infinite, and the average is no number
        content["metrics"]["num-examples"] = 1e308
    elif how == "raised":
        raise ZeroDivisionError("a bug of the client's")
    elif how == "error":
        return Message(error=Error(2, "no space left"), reply_to=reply)
    return reply


def faulty(how: str, who: set[int]) -> ClientApp:
    clients = ClientApp()

    @clients.train()
    def train(message, context):
        reply = client.answer(message, context)
        if context.node_id not in who:
            return reply
        if how == "error":
            return Message(error=Error(2, "no space left"), reply_to=message)
        return spoil(reply, how)

    return clients


FAULTS = {
    "nan": "dropped: 0.weight has 1 values that are no numbers",
    "shape": "dropped: an array should be",
    "names": "dropped: other tensors than are trained: missing 0.weight",
    "nothing": "dropped: not the records",
    "numbers": "dropped: not the numbers",
    "columns": "dropped: not the numbers",
    "weight": "dropped: trained on nan pictures",
    "heavy": "dropped: trained on 1e+308 pictures",
    "raised": "failed: ZeroDivisionError: a bug of the client's",
    "error": "failed: no space left",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_bad_answer_is_dropped_and_reported(how, photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=1)
    run(both, faulty(how, {2}))
    clients = rows(tmp_path / "run")
    bad = [r["status"] for r in clients if r["node"] == "2"]
    assert len(bad) == 1 and bad[0].startswith(FAULTS[how])
    assert [r["status"] for r in clients if r["node"] != "2"] == ["used", "used"]
    assert FAULTS[how] in (tmp_path / "run" / "log.txt").read_text()
    (a, n), (b, m) = trained(both, 0), trained(both, 2)
    found = tiny.weights(tmp_path / "run")
    for name in ("0.weight", "9.bias"):
        torch.testing.assert_close(found[name], (n * a[name] + m * b[name]) / (n + m))


def test_nobody_answers_well(photos, tmp_path):
    both = asked(photos, tmp_path / "run")
    with pytest.raises(server.Failed, match="round 1 brought nothing usable in 3 tries"):
        run(both, faulty("nan", {1, 2, 3}))
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["finished"] is False and "nothing usable" in found["error"]
    assert found["mistake"] is False and found["error"].count("no numbers") == 1
    assert len(rows(tmp_path / "run")) == 9  # three tries, and why each answer was dropped
    run(both)  # and it can go on
    assert json.loads((tmp_path / "run" / "result.json").read_text())["finished"] is True


def test_what_a_fruitless_try_sent_counts_too(photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=1)
    calls = []

    def improves(message, context):
        calls.append(1)
        return spoil(client.answer(message, context), "nan" if len(calls) <= 3 else "")

    run(both, here=grid.InProcess(improves, settings.to_config(both), grid.parts(3)))
    (row,) = rows(tmp_path / "run", "rounds.csv")[1:]
    clients = rows(tmp_path / "run")
    assert len(clients) == 6 and (row["asked"], row["used"]) == ("3", "3")
    assert int(row["bytes"]) == sum(int(r["bytes_down"]) + int(r["bytes_up"]) for r in clients)
    assert int(row["full_bytes"]) % 12 == 0 < int(row["full_bytes"])


def test_a_bug_of_the_server_is_in_the_result(photos, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Trainer, "evaluate", broken)
    with pytest.raises(RuntimeError):
        run(asked(photos, tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found == {"finished": False, "error": "RuntimeError: out of memory", "mistake": False}


class Moody(grid.InProcess):
    """A grid on which some never answer, and others come later."""

    silent: set[int] = set()
    late: set[int] = set()

    def get_node_ids(self):
        asked_before = getattr(self, "seen", 0)
        return [n for n in self.contexts if n not in self.late or asked_before]

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        self.seen = getattr(self, "seen", 0) + 1
        for i in ids:
            if self.asked[i].metadata.dst_node_id in self.silent:
                del self.asked[i]
        return ids


def test_one_that_does_not_answer_in_time_is_left_out(photos, tmp_path):
    both = asked(photos, tmp_path / "run", rounds=2, answer_minutes=0.02)
    here = Moody(app.client, settings.to_config(both), grid.parts(3))
    here.silent = {3}
    run(both, here=here)
    status = {(r["round"], r["node"]): r["status"] for r in rows(tmp_path / "run")}
    assert status["1", "3"] == status["2", "3"] == "no answer"
    assert status["1", "1"] == status["2", "2"] == "used"


def test_one_that_joins_late_takes_part_from_then_on(photos, tmp_path):
    both = asked(photos, tmp_path / "run")
    here = Moody(app.client, settings.to_config(both), grid.parts(3))
    here.late = {3}
    run(both, here=here)
    joined = [r["round"] for r in rows(tmp_path / "run") if r["node"] == "3"]
    assert joined == ["2", "3"]
    assert "3 clients: 1 joined, 0 left" in (tmp_path / "run" / "log.txt").read_text()


class Leaving(grid.InProcess):
    """A grid that loses a client right after it has counted them."""

    def get_node_ids(self):
        found = list(self.contexts)
        self.contexts.pop(3, None)
        return found

    def _run(self, message):
        if message.metadata.dst_node_id not in self.contexts:
            return Message(error=Error(3, "gone"), reply_to=message)
        return super()._run(message)


def test_one_that_leaves_while_clients_are_drawn_is_not_waited_for(photos, tmp_path, monkeypatch):
    from flwr.serverapp.strategy import strategy_utils

    def waits(_):
        raise AssertionError("Flower waits for a client, without an end")

    monkeypatch.setattr(strategy_utils, "sleep", waits)
    both = asked(photos, tmp_path / "run", rounds=1)
    run(both, here=Leaving(app.client, settings.to_config(both), grid.parts(3)))
    status = {r["node"]: r["status"] for r in rows(tmp_path / "run")}
    assert status == {"1": "used", "2": "used", "3": "failed: gone"}


def test_too_few_clients(photos, tmp_path):
    both = asked(photos, tmp_path / "run", join_minutes=0.005, clients=3)
    here = Moody(app.client, settings.to_config(both), grid.parts(3))
    here.late = {2, 3}
    with pytest.raises(server.Failed, match="1 clients are there .* 3 are needed"):
        run(both, here=here)

"""The server of a deployment and whom it takes in, without Flower's processes."""

import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from commands import mistake  # noqa: E402

from gradfilter.federated import flower, nodes  # noqa: E402
from gradfilter.federated.flower import FlowerError  # noqa: E402


class Flower:
    """A server that knows keys by their text, as long as it has its database."""

    def __init__(self):
        self.known, self.removed, self.broken = {}, set(), 0

    def flwr(self, group, verb, what, connection, *_):
        if self.broken:
            self.broken -= 1
            raise FlowerError("flwr supernode: no answer")
        if verb == "unregister":
            self.removed.add(int(what))
            return {"success": True}
        with open(what) as file:
            key = file.read()
        if key in self.known:
            raise FlowerError("flwr supernode: Public key already in use")
        self.known[key] = 11 + len(self.known)
        return {"node-id": self.known[key]}


@pytest.fixture
def there(tmp_path):
    """A server, its folder of keys, what was said, and devices as after a restart."""
    found = SimpleNamespace(flower=Flower(), keys=tmp_path / "keys", said=[])
    found.keys.mkdir()
    found.start = lambda: nodes.Devices(found.flower, found.keys, tmp_path, found.said.append)
    return found


def put(there, name: str, key: str | None = None) -> None:
    (there.keys / f"{name}.pub").write_text(key or f"key of {name}")


def test_devices_come_later_and_are_known_after_a_restart(there):
    put(there, "a")
    devices = there.start()
    devices.look()
    put(there, "b")
    devices.look()
    devices.look()
    assert there.said == ["a may take part", "b may take part"]
    there.start().look()
    assert there.said[2:] == there.said[:2] and not there.flower.removed


@pytest.mark.parametrize("restarted", [False, True])
def test_a_device_whose_key_is_taken_away_may_no_longer_take_part(there, restarted):
    put(there, "a")
    put(there, "b")
    devices = there.start()
    devices.look()
    (there.keys / "a.pub").unlink()
    devices = there.start() if restarted else devices
    devices.look()
    devices.look()
    assert there.flower.removed == {11}
    assert there.said.count("a may no longer take part") == 1
    put(there, "a")  # Flower does not take a key again
    devices.look()
    assert there.said[-1].startswith("a was not registered: ")
    put(there, "a", "another")
    devices.look()
    assert there.said[-1] == "a may take part"


def test_a_device_is_tried_again_but_not_for_ever(there):
    put(there, "a")
    there.flower.broken = 1
    devices = there.start()
    devices.look()
    devices.look()
    assert there.said[0].startswith("a was not registered") and there.said[1] == "a may take part"
    put(there, "b")
    there.flower.broken = 100
    for _ in range(10):
        devices.look()
    assert there.flower.broken == 100 - nodes.TRIES
    assert there.said[-1].endswith("not tried again before a restart")


@pytest.mark.parametrize("host, reached", [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")])
def test_devices_are_registered_where_the_server_listens(host, reached, tmp_path, monkeypatch):
    process = SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(flower, "superlink", lambda *_, **__: nullcontext(process))
    with pytest.raises(FlowerError, match="ended by itself"):
        nodes.serve(None, host, flower.free_port(), tmp_path, lambda _: None)
    assert f'address = "{reached}:' in (tmp_path / "flower" / "config.toml").read_text()


def test_a_port_that_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = ["federate-server", "--insecure", "--host", "127.0.0.1", "--port"]
        assert f"cannot listen on 127.0.0.1:{port}" in mistake(capsys, *line, port)
    assert "0-65535" in mistake(capsys, *line, 70000)

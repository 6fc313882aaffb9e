"""federate-keys: certificates and keys, and the day on which they end."""

import shutil
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("torchvision")

from commands import gradfilter, mistake  # noqa: E402

from gradfilter.federated import flower, keys  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_networks", "fresh_clients")


def handshake(context: ssl.SSLContext, folder: Path, name: str) -> None:
    """A TLS connection between two objects in memory."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    pipes = [ssl.MemoryBIO() for _ in range(4)]
    here = context.wrap_bio(pipes[0], pipes[1], server_hostname=name)
    there = server.wrap_bio(pipes[2], pipes[3], server_side=True)
    for _ in range(4):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            finally:
                pipes[2].write(pipes[1].read())
                pipes[0].write(pipes[3].read())
    assert here.version() == "TLSv1.3" and here.getpeercert()


def test_keys(tmp_path, capsys):
    folder = tmp_path / "keys"
    line = ["federate-keys", "pi", "--out", folder, "--address", "10.0.0.7", "server.lan"]
    assert gradfilter(*line) == 0
    for secret in (folder / "ca.key", folder / "server.key", folder / "pi" / "pi.key"):
        assert secret.stat().st_mode & 0o777 == 0o600
    trusting = ssl.create_default_context(cafile=folder / "pi" / "ca.pem")
    for name in ("10.0.0.7", "server.lan", "localhost"):
        handshake(trusting, folder, name)
    for context, name in ((trusting, "other.lan"), (ssl.create_default_context(), "server.lan")):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(context, folder, name)
    before = (folder / "pi" / "pi.key").read_bytes(), (folder / "ca.pem").read_bytes()
    assert gradfilter("federate-keys", "pi", "phone", "--out", folder) == 0
    assert gradfilter(*line) == 0
    assert "not for new.lan" in mistake(capsys, *line, "new.lan")
    assert (folder / "phone" / "ca.pem").read_bytes() == before[1]
    assert before == ((folder / "pi" / "pi.key").read_bytes(), (folder / "ca.pem").read_bytes())


def test_certificates_end_on_a_day_that_is_told(tmp_path, capsys):
    folder, now = tmp_path / "keys", datetime.now(timezone.utc)
    line = ["federate-keys", "pi", "--out", folder]
    assert gradfilter(*line, "--address", "server.lan", "--days", "90") == 0
    for name in ("ca.pem", "server.pem", "pi/ca.pem"):
        assert abs(keys.ends(folder / name) - now - timedelta(days=90)) < timedelta(minutes=5)
    day = f"certificates end on {keys.ends(folder / 'server.pem'):%Y-%m-%d}\n"
    assert capsys.readouterr().out.endswith(day)
    assert gradfilter(*line) == 0
    assert capsys.readouterr().out.endswith(day)
    assert "are there already, and end on" in mistake(capsys, *line, "--days", "9")
    keys.make(tmp_path / "usual", ["server.lan"], [])
    end = keys.ends(tmp_path / "usual" / "server.pem")
    assert abs(end - now - timedelta(days=365)) < timedelta(minutes=5)
    keys.make(tmp_path / "short", ["server.lan"], [], days=20)
    assert "to renew" in keys.told(tmp_path / "short") and "to renew" not in keys.told(folder)


def test_certificates_that_have_ended(photos, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "keys"
    past = lambda hours=0, days=0: timedelta(days=-1 if days else 2)  # noqa: E731
    monkeypatch.setattr(keys, "timedelta", past)
    keys.make(folder, ["127.0.0.1"], ["pi"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flower, "start", lambda *_, **__: pytest.fail("it was started"))
    where = ["--server", "127.0.0.1:1", "--data", photos]
    for line in (
        ["federate-server", "--host", "127.0.0.1", "--port", flower.free_port(), "--keys", folder],
        ["federate-client", *where, "--keys", folder / "pi"],
        ["federate", *where, "--keys", folder, "--out", tmp_path / "run"],
    ):
        told = mistake(capsys, *line)
        assert "ended on" in told and "to renew" in told


def test_certificates_are_renewed_and_devices_keep_their_keys(tmp_path):
    folder = tmp_path / "keys"
    keys.make(folder, ["server.lan"], ["pi", "moved"])
    shutil.move(folder / "moved", tmp_path / "moved")
    before = {p: p.read_bytes() for p in (folder / "pi" / "pi.key", folder / "pi.pub")}
    old = (folder / "ca.pem").read_bytes()
    for path in [*folder.glob("ca.*"), *folder.glob("server.*")]:
        path.unlink()
    assert gradfilter("federate-keys", "--out", folder, "--address", "server.lan") == 0
    assert all(p.read_bytes() == content for p, content in before.items())
    assert (folder / "pi" / "ca.pem").read_bytes() == (folder / "ca.pem").read_bytes() != old
    assert (folder / "moved" / "ca.pem").exists()
    handshake(ssl.create_default_context(cafile=folder / "pi" / "ca.pem"), folder, "server.lan")

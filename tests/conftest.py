"""Fixtures that several suites use."""

import signal

import pytest
import torch


def pytest_configure():
    """A shell's background jobs ignore Ctrl-C, and hand that on: tests that press it would hang."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread():
    """Other processes have one, and sums depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_networks(monkeypatch, one_thread):
    """Every network is the tiny one of `tiny`, on one thread; nothing is drawn."""
    import tiny

    from gradfilter.recipes import models, training

    monkeypatch.setattr(models, "build", tiny.build)
    monkeypatch.setattr(training.Run, "_draw", lambda run, headline: None)


@pytest.fixture(params=[1, 2])
def threads(request):
    """PyTorch's, and so the kernels'."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, photos):
    """A small network, exported to be trained on a suite's own `photos` by gradfilter-device."""
    from on_device import exported

    return exported(tmp_path_factory.mktemp("device") / "exported", photos, epochs=1)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    import tiny

    return tiny.photographs(tmp_path_factory.mktemp("photos") / "photos")


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    import tiny

    return tiny.scenes(tmp_path_factory.mktemp("scenes") / "scenes")


@pytest.fixture
def quick_stopwatch(monkeypatch):
    """A full collection looks at all that the suite has imported."""
    from gradfilter import stopwatch

    monkeypatch.setattr(stopwatch.gc, "collect", lambda: 0)
    monkeypatch.setattr(stopwatch, "TURNS", 1)


@pytest.fixture
def fresh_clients(monkeypatch):
    """No network or data of another federated run; nothing is drawn."""
    from gradfilter.federated import client
    from gradfilter.federated.folder import Folder

    for cached in (client._trainer, client.opened):
        cached.cache_clear()
    monkeypatch.setattr(Folder, "draw", lambda *_: None)

"""Checkpoints: in place at once or not at all, and read without running code."""

import errno
import os
import pickle

import pytest
import torch
from torch import nn

import gradfilter as gf
from gradfilter.recipes import checkpoint
from gradfilter.recipes.checkpoint import Damaged, NotWritten


def content(number: int) -> dict:
    return {"model": {"w": torch.full((50,), float(number))}, "step": number}


@pytest.fixture
def saved(tmp_path):
    """A folder with two checkpoints."""
    for number in (1, 2):
        save(tmp_path, number)
    return tmp_path


def save(folder, number):
    last, previous = folder / checkpoint.LAST, folder / checkpoint.PREVIOUS
    checkpoint.save(last, content(number), previous)


def test_the_one_before_is_kept(saved):
    assert checkpoint.load(saved / "last.pt")["step"] == 2
    assert checkpoint.load(saved / "previous.pt")["step"] == 1
    assert {p.name for p in saved.iterdir()} == {"last.pt", "previous.pt"}


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_leaves_what_was_there(saved, monkeypatch, call, code):
    def fails(*args):
        raise OSError(code, os.strerror(code))

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return fails if name == "write" else getattr(self.file, name)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: self.file.close()  # noqa: E731

    if call == "write":
        monkeypatch.setattr(
            checkpoint,
            "open",
            lambda *args: Full(open(*args)),  # noqa: SIM115
            raising=False,
        )
    else:
        monkeypatch.setattr(os, call, fails)
    with pytest.raises(NotWritten, match=f"{os.strerror(code)}; last.pt from before is whole"):
        save(saved, 3)
    monkeypatch.undo()
    assert checkpoint.latest(saved)[0]["step"] == 2
    assert {p.name for p in saved.iterdir()} == {"last.pt", "previous.pt"}


def test_a_real_full_disk(tmp_path):
    """A tiny file system in memory, where one may be mounted."""
    import subprocess

    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    try:
        save(tmp_path, 1)
        big = content(2) | {"ballast": torch.zeros(100_000)}
        with pytest.raises(NotWritten, match=os.strerror(errno.ENOSPC)):
            checkpoint.save(tmp_path / "last.pt", big, tmp_path / "previous.pt")
        assert checkpoint.latest(tmp_path)[0]["step"] == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_torn_file_gives_way_to_the_one_before(saved, share):
    last = saved / "last.pt"
    data = last.read_bytes()
    last.write_bytes(data[: int(share * len(data))])
    with pytest.raises(Damaged, match="last.pt is damaged"):
        checkpoint.load(last)
    found, told = checkpoint.latest(saved)
    assert found["step"] == 1 and "going on from previous.pt, step 1" in told


def test_between_two_renames_the_one_before_counts(saved):
    (saved / "last.pt").unlink()
    found, told = checkpoint.latest(saved)
    assert found["step"] == 1 and told is None


def test_nothing_whole_is_left(saved):
    for path in saved.iterdir():
        path.write_bytes(b"PK")
    with pytest.raises(Damaged, match="no whole one"):
        checkpoint.latest(saved)


def test_nothing_was_saved_yet(tmp_path):
    found, told = checkpoint.latest(tmp_path)
    assert found is None and "starts from its beginning" in told


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_code_in_a_file_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(Damaged):
            checkpoint.load(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no .*last.pt"):
        checkpoint.load(tmp_path / "last.pt")


def test_what_warm_started_layers_remember(tmp_path):
    def network():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        gf.convert(model, gf.SubspaceIteration(rank=2))
        return model

    def gradient(model):
        model.zero_grad()
        model(torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(5))).sum().backward()
        return model[2].weight.grad

    first, fresh = network(), network()
    for seed in range(3):
        x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(seed))
        first(x).sum().backward()
    states = checkpoint.method_states(first)
    torch.save(states, tmp_path / "states.pt")
    cold = gradient(fresh)
    restored = network()
    checkpoint.restore_methods(restored, torch.load(tmp_path / "states.pt", weights_only=True))
    warm = gradient(restored)
    assert torch.equal(warm, gradient(first)) and not torch.equal(warm, cold)

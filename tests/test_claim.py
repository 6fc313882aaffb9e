"""Two runs never write into one folder."""

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("rich")

import tiny  # noqa: E402

from gradfilter.recipes import claim  # noqa: E402
from gradfilter.recipes.training import Run  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_networks")


def meanwhile(monkeypatch, call):
    """Have `call` made once, when a run is ready to take its first step."""
    go, calls = Run.go, [call]

    def after(run):
        while calls:
            calls.pop()()
        return go(run)

    monkeypatch.setattr(Run, "go", after)


def test_runs_that_begin_together_get_a_folder_each(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin, others = Run._begin, []

    def late(run, new):
        if not others:
            others.append(None)
            others[0] = tiny.go(photos, "").out
        begin(run, new)

    monkeypatch.setattr(Run, "_begin", late)
    result = tiny.go(photos, "")
    assert result.out != others[0]
    assert {result.out.parent, others[0].parent} == {Path("runs")}


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_in_which_a_run_is_at_work_is_refused(photos, tmp_path, monkeypatch, resume):
    monkeypatch.setattr(claim, "PATIENCE", 0.0)
    again = tiny.go_on if resume else lambda out: tiny.go(photos, out)
    refused = []

    def try_it():
        with pytest.raises(ValueError, match="another process trains|holds a run") as told:
            again(tmp_path / "run")
        refused.append(str(told.value))

    meanwhile(monkeypatch, try_it)
    tiny.go(photos, tmp_path / "run")
    assert len(refused) == 1
    tiny.go_on(tmp_path / "run")  # which is free again


def test_a_run_that_could_not_begin_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in ("", tmp_path / "deep" / "run"):
        with pytest.raises(ValueError, match="is no folder"):
            tiny.go("nowhere", out)
    assert not list(tmp_path.iterdir())
    kept = tmp_path / "mine"
    kept.mkdir()
    with contextlib.suppress(ValueError):
        tiny.go("nowhere", kept)
    assert kept.is_dir()

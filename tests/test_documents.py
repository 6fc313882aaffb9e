"""Settings and plans as files."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("yaml")

from gradfilter import documents  # noqa: E402


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, name):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("replace"), replace(*names)))
    documents.write(tmp_path / name, {"data": "Bäume"})
    assert done == ["fsync", "replace"]
    assert documents.read(tmp_path / name) == {"data": "Bäume"}


@pytest.mark.skipif(os.name != "posix", reason="sets a locale as POSIX has them")
def test_a_file_is_utf8_whatever_the_locale(tmp_path):
    (tmp_path / "options.yaml").write_text("data: Bäume 木\n", encoding="utf-8")
    code = "from gradfilter import documents; print(ascii(documents.read('options.yaml')))"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=os.environ | plain, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ascii({"data": "Bäume 木"})

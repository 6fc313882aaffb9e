"""The package as it is installed and imported."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import gradfilter

ROOT = Path(__file__).parent.parent
HEAVY = ("torchvision", "timm", "segmentation_models_pytorch", "sklearn", "rich", "matplotlib",
         "tensorboard", "triton", "onnx", "onnxruntime", "flwr", "PIL", "scipy")  # fmt: skip


def run(*command, **options) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_torch_and_nothing_heavier():
    code = f"""
import sys, torch
before = set(sys.modules)
import gradfilter
print([name for name in {HEAVY} if name in set(sys.modules) - before])
print(torch.cuda.is_initialized())
"""
    assert run(sys.executable, "-c", code, cwd=ROOT / "src").split("\n")[:2] == ["[]", "False"]


def test_public_names_exist():
    assert all(hasattr(gradfilter, name) for name in gradfilter.__all__)
    assert gradfilter.METHODS.keys() == {
        "exact", "gradient-filter", "galerkin", "svd", "hosvd", "asi", "walsh-hadamard", "int8"
    }  # fmt: skip


def test_every_method_has_its_row_in_the_readme():
    rows = re.findall(r"^\| `(\w+)\(.*?\| `([\w-]+)`", (ROOT / "README.md").read_text(), re.M)
    assert [(cls, name) for cls, name in rows] == [
        (cls.__name__, name) for name, cls in gradfilter.METHODS.items()
    ]


def test_readme_quickstart_runs():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert len(code.strip().split("\n")) <= 12
    pytest.importorskip("torchvision")
    exec(compile(code.replace("224", "64"), "README.md", "exec"), {})


@pytest.mark.slow
def test_wheel_installs_and_runs_in_an_empty_environment(tmp_path):
    tree = tmp_path / "tree"  # a copy: building leaves files behind
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree, cwd=tmp_path)
    (wheel,) = tmp_path.glob("gradfilter-*.whl")

    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    assert (site / "gradfilter" / "py.typed").exists()
    assert (site / "gradfilter" / "recipes" / "web" / "page.html").exists()
    # torch comes from the environment that the tests run in, gradfilter does not
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    code = "import gradfilter; print(gradfilter.__file__, gradfilter.__version__)"
    file, version = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(site)
    assert version == gradfilter.__version__ == wheel.name.split("-")[1]
    script = tmp_path / "env" / "bin" / "gradfilter"
    assert run(script, "--version", cwd=tmp_path).strip() == version
    assert run(script, "info", cwd=tmp_path).startswith("gradfilter")

"""The command line, as a user meets it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gradfilter import cli, environment

SRC = Path(__file__).parent.parent / "src"


def gradfilter(command: str) -> int:
    return cli.main(command.split())


def test_help_names_the_commands_without_loading_torch():
    code = """
import sys, gradfilter_cli
sys.argv = ["gradfilter", "--help"]
try:
    gradfilter_cli.main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    env = os.environ | {"PYTHONPATH": str(SRC)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout.endswith("0 False\n"), out.stderr
    assert all(name in out.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("module", ["gradfilter", "gradfilter_cli"])
def test_both_entries_run_a_command(module):
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-m", module, "info"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = {line.split("  ")[0] for line in done.stdout.splitlines()}
    assert {"gradfilter", "python", "torch", "threads", "cuda", "kernels, cpu"} <= names


def test_cost_prints_the_plan_that_was_asked_for(capsys):
    pytest.importorskip("timm")
    assert gradfilter("cost mobilenet_v2 --method galerkin --grid 5 --last 4") == 0
    rows = capsys.readouterr().out.splitlines()
    trained = [r for r in rows if " conv " in r and " yes " in r]
    assert len(trained) == 4
    assert all("GalerkinFilter(grid=5" in r for r in trained)
    assert rows[-1].startswith("total")


def test_cost_of_a_rank_that_depends_on_data(capsys):
    pytest.importorskip("timm")
    assert gradfilter("cost squeezenet1_1 --method hosvd --energy 0.7 --size 64") == 0
    assert "Hosvd(energy=0.7)" in capsys.readouterr().out


def test_bits_wrap_the_method(capsys):
    pytest.importorskip("timm")
    assert gradfilter("cost squeezenet1_1 --method galerkin --bits 8 --size 64") == 0
    assert "Int8(inner=GalerkinFilter(grid=7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked, says",
    [
        ("cost mobilenetv2", "mobilenet_v2"),
        ("cost resnet99", "near names: resnet50, resnet34, resnet26, resnet18"),
        ("profile mobilenet_v2 --plan p.yaml --grid 3", "leave --grid out"),
        ("fidelity mobilenet_v2 --data x --plan p.yaml --method svd", "leave --method out"),
        ("cost mobilenet_v2 --method galerkn", "did you mean galerkin?"),
        ("cost mobilenet_v2 --method galerkin --energy 0.8", "galerkin has no energy"),
        ("cost mobilenet_v2 --method galerkin --grid 7 --patch 2", "not both"),
        ("cost mobilenet_v2 --method svd --energy 1.5", "energy"),
        ("cost mobilenet_v2 --method int8 --bits 8", "inner"),
        ("cost mobilenet_v2 --last 1000", "last=1000"),
        ("cost inception_v3 --size 16", "inception_v3"),
        ("cost mobilenet_v2 --patch 0", "whole number"),
        ("cost", "MODEL"),
        ("demo --methods exact hosdv", "did you mean hosvd?"),
        ("demo --steps x", "whole number"),
        ("demo --out /dev/null/here", "/dev/null/here"),
        ("trane", "demo"),
        ("", "COMMAND"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(asked, says, capsys):
    pytest.importorskip("timm")
    try:
        code = gradfilter(asked)
    except SystemExit as end:  # argparse's own way
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("gradfilter")
    assert says in err


@pytest.mark.parametrize("make", [torch.empty, np.empty])
def test_too_little_memory_gets_one_line(make, monkeypatch, capsys):
    monkeypatch.setattr(environment, "about", lambda: make(2**57))
    assert cli.main(["info"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gradfilter info: out of memory: try fewer") and err.count("\n") == 1


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert gradfilter("cost tf_efficientnet_lite0") == 2
    assert "timm: pip install 'gradfilter[train]'" in capsys.readouterr().err

"""Which kernels run, with how many threads, and how the C ones are built."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradfilter import kernels
from gradfilter.kernels import cpu, cpu_library, eager

BUILT = not isinstance(cpu_library.library(), cpu_library.Unavailable)


def some_map(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def test_c_has_every_activation():
    assert set(cpu.ACTS) == set(eager.ACTIVATIONS)


def test_both_builds_use_the_same_flags():
    setup = (cpu_library.SOURCE.parents[3] / "setup.py").read_text()
    assert all(f'"{flag}"' in setup for flag in cpu_library.FLAGS)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_the_library_compiles_from_a_plain_source_tree(tmp_path):
    cpu_library.compile_into(tmp_path / "here" / "cpu.so", "hash")
    assert cpu_library._open(tmp_path / "here" / "cpu.so").gf_source() == b"hash"


def test_without_a_compiler_the_reason_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)  # may be a whole path
    with pytest.raises(cpu_library.Unavailable, match="no C compiler"):
        cpu_library.compile_into(tmp_path / "cpu.so", "hash")


@pytest.mark.skipif(not BUILT, reason="no C library")
def test_threads_do_not_change_results():
    x, w = some_map(3, 40, 33, 31), torch.randn(40, 1, 3, 3)
    g, taps = some_map(3, 40, 11, 8), (torch.randn(3, 11, 33), torch.randn(3, 8, 31))
    pool = (3, 3), (2, 2), (1, 1), (1, 1), (4, 4), (4, 4)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append([
            *cpu.epilogue(x.clone(), None, None, "relu", (4, 4)),
            *cpu.depthwise(x, w, None, None, "relu", (1, 1), (1,) * 4, (1, 1), (4, 4)),
            *cpu.depthwise_grid_backward(g, x, w, *taps),
            *cpu.max_pool(x, None, None, "relu", *pool),
        ])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_arguments_choose_the_backend():
    x = some_map(2, 3, 4, 4)
    assert kernels._backend(x) is (cpu if BUILT else eager)
    assert kernels._backend(x.contiguous()) is eager  # rows first
    assert kernels._backend(x.double()) is eager
    assert kernels._backend(x.bfloat16()) is eager
    for t in kernels.epilogue(x.bfloat16(), None, x[0, :, 0, 0], "relu", (2, 2)):
        assert t.dtype == torch.bfloat16


@pytest.mark.skipif(not BUILT, reason="no C library")
def test_wrong_arguments_do_not_reach_c():
    x = some_map(1, 4, 3, 3)
    with pytest.raises(ValueError, match="unknown activation 'relu7'"):
        kernels.epilogue(x, None, None, "relu7", (1, 1))
    with pytest.raises(TypeError, match="expected 4 float32"):
        kernels.epilogue(x, torch.ones(3), None, "relu", (1, 1))
    with pytest.raises(TypeError, match="float32 CPU map"):
        kernels.epilogue(x, None, None, "relu", (1, 1), residual=x.double())
    with pytest.raises(ValueError, match="residual"):
        kernels.epilogue(x, None, None, "relu", (1, 1), residual=x[:, :2])


def test_a_missing_library_is_reported_once(monkeypatch):
    monkeypatch.setattr(cpu_library, "library", lambda: cpu_library.Unavailable("no compiler"))
    kernels._cpu.cache_clear()
    x = some_map(1, 2, 4, 4)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        first = kernels.patch_mean(x, (2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(kernels.patch_mean(x, (2, 2)), first)
    assert "no compiler" in kernels.status()["cpu"]
    kernels._cpu.cache_clear()


def run(*command: str, **environment: str) -> str:
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_environment_can_force_eager():
    program = "from gradfilter import kernels as k; print(k._backend(None).__name__)"
    source = str(Path(eager.__file__).parents[2])
    assert "kernels.eager" in run(
        sys.executable, "-c", program, PYTHONPATH=source, GRADFILTER_KERNELS="eager"
    )


TARGETS = {"native": ("cc", []), "aarch64": ("aarch64-linux-gnu-gcc", ["qemu-aarch64"])}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_c_tests_itself(target, tmp_path):
    compiler, emulator = TARGETS[target]
    for tool in [compiler, *emulator]:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    flags = [*cpu_library.FLAGS, "-O1", "-Wall", "-Wextra", "-Werror", "-DSELF_TEST"]
    run(compiler, *flags, str(cpu_library.SOURCE), "-o", str(tmp_path / "test"), "-lm")
    library_path = ["-L", f"/usr/{target}-linux-gnu"] if emulator else []
    assert "0 mismatches" in run(*emulator, *library_path, str(tmp_path / "test"))

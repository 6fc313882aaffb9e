"""The C library of cpu.c: the one built with the package, or one compiled on this machine.

In a plain source tree, or when the built one is older than its sources, it is compiled once into
the user's cache with the system's C compiler.
"""

import ctypes
import functools
import hashlib
import importlib.machinery
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu.c")
# What the kernels take and give, whatever PyTorch makes where nothing is said.
FLOATS = {"dtype": torch.float32, "device": torch.device("cpu")}
# As in setup.py. No -ffast-math: NaN and infinity must come through.
FLAGS = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
FLAGS += ["-fvisibility=hidden"]

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGTYPES = {
    "gf_patch_mean": [_P] * 2 + [_N] * 6 + [_I],
    "gf_epilogue": [_P] * 6 + [_N] * 6 + [_I, _F, _I],
    "gf_pointwise": [_P] * 8 + [_N] * 7 + [_I, _F, _I],
    "gf_depthwise": [_P] * 7 + [_N] * 6 + [_P] + [_N] * 2 + [_I, _F, _I],
    "gf_grid_backward": [_P] * 7 + [_N] * 8 + [_I],
    "gf_max_pool": [_P] * 8 + [_N] * 6 + [_P, _I, _F, _I],
    "gf_slope_backward": [_P] * 4 + [_F] + [_P] * 3 + [_N] * 3 + [_I] * 2,
    "gf_pointwise_backward": [_P] * 3 + [_F] + [_P] * 7 + [_F] * 2 + [_N] * 4 + [_I] * 2,
    "gf_spread": [_P] * 4 + [_N] * 8 + [_I],
    "gf_row_dots": [_P] * 3 + [_N] * 2 + [_I],
    "gf_winograd": [_P] * 5 + [_N] * 5 + [_I],
    "gf_winograd_forward": [_P] * 3 + [_N] * 5 + [_I] * 2,
    "gf_product": [_P] * 3 + [_N] * 5 + [_I],
    "gf_play": [_P, _N, _P, _P, _N, _N, _I],
    "gf_pool_grid_backward": [_P] * 5 + [_N] * 8 + [_I],
}


class Unavailable(RuntimeError):
    """Why there is no C library."""


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, argtypes in _ARGTYPES.items():
        getattr(library, name).argtypes = argtypes
    library.gf_select.argtypes = [ctypes.c_char_p]
    library.gf_select.restype = library.gf_source.restype = ctypes.c_char_p
    return library


def _installed(source_hash: str | None) -> Path | None:
    """The library built with the package, unless its sources have changed since."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = SOURCE.with_name("_cpu" + suffix)
        if path.exists() and source_hash in (None, _source_of(path)):
            return path
    return None


def hash_of_sources() -> str:
    """As in setup.py."""
    files = sorted(SOURCE.parent.glob("**/*.c"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def _source_of(path: Path) -> str:
    """The hash of the sources a library was built from; an old one may lack newer kernels."""
    source = ctypes.CDLL(str(path)).gf_source
    source.restype = ctypes.c_char_p
    return source().decode()


def compile_into(path: Path, source_hash: str) -> None:
    """Compile cpu.c into a shared library; another process may be doing the same."""
    names = os.environ.get("CC", "cc"), "gcc", "clang"
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise Unavailable("not built with the package, and no C compiler (cc, gcc, clang) found")
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger(__name__).info("compiling %s with %s", SOURCE, compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, "-fPIC", "-shared", f'-DSOURCE_HASH="{source_hash}"']
        result = subprocess.run(
            [*command, str(SOURCE), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise Unavailable(f"{compiler} failed on {SOURCE}: {result.stderr.strip()[-500:]}")
        made.replace(path)


def _find() -> Path:
    source_hash = hash_of_sources() if SOURCE.exists() else None
    installed = _installed(source_hash)
    if installed is not None:
        return installed
    if source_hash is None:
        raise Unavailable("not built with the package")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradfilter"
    path = cache / f"cpu-{source_hash}-{platform.machine()}.so"
    if not path.exists():
        compile_into(path, source_hash)
    return path


def _product():
    """The sgemm that PyTorch multiplies by, where it lets others call it."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    return getattr(torch_cpu, "sgemm_", None)


class Library:
    """The loaded library: its path, instruction set, threads, and functions."""

    def __init__(self) -> None:
        try:
            self.path = _find()
            handle = _open(self.path)
        except OSError as error:
            raise Unavailable(str(error)) from error
        self.handle = handle
        self.isa = handle.gf_select(None).decode()
        # PyTorch's own OpenMP runtime lends its threads: one pool in the process, not two.
        fork = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
        self.threads = "PyTorch's OpenMP pool" if fork else "one (no GOMP_parallel in the process)"
        if fork:
            handle.gf_set_fork(fork)
        product = _product() if handle.gf_wants_product() else None
        self.products = "PyTorch's sgemm" if product else "its own"
        if product:
            handle.gf_set_product(product)
        for name in _ARGTYPES:
            setattr(self, name, getattr(handle, name))


@functools.cache
def library() -> Library | Unavailable:
    """The C library, or the reason there is none; found, or built, at the first call."""
    try:
        return Library()
    except Unavailable as reason:
        return reason

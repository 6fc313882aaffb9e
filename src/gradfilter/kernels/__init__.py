"""The kernels of the patch grid, each run by the fastest backend that can take its arguments.

`eager` is the meaning, in plain PyTorch. `cpu` (C) takes float32 channels-last maps on the CPU,
`triton` takes maps on a CUDA device; everything else runs on `eager`, and so does everything when
the environment variable GRADFILTER_KERNELS is "eager". `status()` says what is in use.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from gradfilter.kernels import cpu, cpu_library, eager
from gradfilter.kernels.eager import ACTIVATIONS, pool_reach, wide

__all__ = [
    "ACTIVATIONS",
    "conv3x3_backward",
    "conv3x3_pays",
    "convolve",
    "depthwise",
    "depthwise_grid_backward",
    "epilogue",
    "joined",
    "max_pool",
    "max_pool_grid_backward",
    "patch_mean",
    "pool_reach",
    "product",
    "row_dots",
    "slope_backward",
    "spread",
    "status",
    "using",
    "wide",
]

_FORCED = os.environ.get("GRADFILTER_KERNELS", "")
if _FORCED not in ("", "eager"):
    raise ValueError(f"GRADFILTER_KERNELS is {_FORCED!r}; it may only be 'eager' or unset")


@functools.cache
def _cpu() -> ModuleType:
    """The C kernels if they are there, else the eager ones and a warning, once."""
    library = cpu_library.library()
    if not isinstance(library, cpu_library.Unavailable):
        return cpu
    warnings.warn(
        f"gradfilter runs on its slow PyTorch kernels, because the C ones are missing: {library}",
        RuntimeWarning,
        stacklevel=4,
    )
    return eager


@functools.cache
def _triton() -> ModuleType | ImportError:
    """The Triton kernels, or the reason there are none."""
    try:
        from gradfilter.kernels import triton
    except ImportError as reason:
        return reason
    return triton


@functools.cache
def _cuda() -> ModuleType:
    triton = _triton()
    if isinstance(triton, ModuleType):
        return triton
    warnings.warn(f"gradfilter runs on PyTorch kernels, no Triton: {triton}", stacklevel=4)
    return eager


_chosen: ContextVar[ModuleType | None] = ContextVar("chosen", default=None)


@contextmanager
def using(backend: ModuleType) -> Iterator[None]:
    """Every kernel by this backend for a while, and what it lacks by `eager`."""
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


def _backend(x: Tensor) -> ModuleType:
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if _FORCED:
        return eager
    if x.is_cuda:
        return _cuda() if x.dtype in (torch.float32, torch.bfloat16, torch.float16) else eager
    if (
        x.dtype is torch.float32
        and x.is_cpu
        and x.is_contiguous(memory_format=torch.channels_last)
    ):
        return _cpu()
    return eager


def _dispatched(body: Callable) -> Callable:
    """The kernel of that name in the backend that suits its first argument."""
    name = body.__name__

    @functools.wraps(body)
    def kernel(x: Tensor, *args, **kwargs):
        return getattr(_backend(x), name, body)(x, *args, **kwargs)

    return kernel


conv3x3_backward = _dispatched(eager.conv3x3_backward)
convolve = _dispatched(eager.convolve)
patch_mean = _dispatched(eager.patch_mean)
epilogue = _dispatched(eager.epilogue)
depthwise = _dispatched(eager.depthwise)
depthwise_grid_backward = _dispatched(eager.depthwise_grid_backward)
max_pool = _dispatched(eager.max_pool)
max_pool_grid_backward = _dispatched(eager.max_pool_grid_backward)
slope_backward = _dispatched(eager.slope_backward)
spread = _dispatched(eager.spread)


def joined(x: Tensor) -> ModuleType | None:
    """The backend that has `pointwise` and `pointwise_grid_backward` for maps like this one.

    They do at once what `convolve` and `epilogue`, `slope_backward`, the two matrix products and
    `row_dots` do one after another.
    """
    backend = _backend(x)
    return backend if backend is cpu else None


def conv3x3_pays(g: Tensor, channels: int) -> bool:
    """Whether this map's backend has a `conv3x3_backward` that is faster than other ways."""
    return _backend(g) is cpu and cpu.conv3x3_pays(g, channels)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, in rows or columns."""
    floats = a.dtype is torch.float32 and b.dtype is torch.float32 and a.is_cpu
    plain = _FORCED or _chosen.get() is not None or not floats
    return (eager if plain else _cpu()).product(a, b)


def row_dots(a: Tensor, b: Tensor, out: Tensor) -> None:
    """<a[o], b[o]> of two weights [O, C, kh, kw], whatever their layouts, into out [O]."""
    floats = a.dtype is torch.float32 and b.dtype is torch.float32
    plain = _FORCED or _chosen.get() is not None or not floats
    body = eager if plain else _cpu() if a.is_cpu else _backend(a)
    body.row_dots(a, b, out)


def status() -> dict[str, str]:
    """Which kernels run where: the C library's path or why it is missing, and Triton's state."""
    if _FORCED:
        return {"cpu": "eager, forced by GRADFILTER_KERNELS", "cuda": "eager, likewise"}
    library = cpu_library.library()
    if isinstance(library, cpu_library.Unavailable):
        found = {"cpu": f"eager: {library}"}
    else:
        found = {"cpu": str(library.path), "isa": library.isa}
        found |= {"threads": library.threads, "products": library.products}
    if not torch.cuda.is_available():
        return found | {"cuda": "no CUDA device"}
    triton = _triton()
    return found | {"cuda": "triton" if isinstance(triton, ModuleType) else f"eager: {triton}"}

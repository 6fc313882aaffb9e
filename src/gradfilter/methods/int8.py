"""8-bit activations and gradients, alone or around another method (CVPR 2023, supplement H)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradfilter.layers import Op
from gradfilter.methods.exact import Exact
from gradfilter.methods.method import Kept, Method, Shape

LEVELS = 255


def quantise(x: Tensor, stochastic: bool, generator: torch.Generator | None = None):
    """x as (int8 codes, lowest value, step), one range per sample (dimension 0).

    Nearest rounding, or stochastic rounding, whose expectation is x.
    """
    flat = x.flatten(1) if x.ndim > 1 else x[:, None]
    low, high = flat.amin(1), flat.amax(1)
    step = ((high - low) / LEVELS).clamp(min=torch.finfo(x.dtype).tiny)
    scaled = (x - _per_sample(low, x)) / _per_sample(step, x)  # [0, 255]
    if stochastic:
        noise = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        scaled = (scaled + noise).floor()
    else:
        scaled = scaled.round()
    return (scaled.clamp(0, LEVELS) - 128).to(torch.int8), low, step


def dequantise(codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
    return (codes.to(low.dtype) + 128) * _per_sample(step, codes) + _per_sample(low, codes)


def _per_sample(v: Tensor, like: Tensor) -> Tensor:
    return v.reshape(-1, *(1,) * (like.ndim - 1))


@dataclass(frozen=True, repr=False)
class Int8(Method):
    """Another method with what it keeps in 8 bits, and g rounded to 8 bits per sample.

    Keeps int8 codes with a range per sample. g is rounded stochastically (PSQ), so its expectation
    is the inner method's g; x is rounded to nearest. `generator` makes the rounding reproducible
    on its own, else torch's default generator is used. Never exact.
    """

    inner: Method = Exact()
    generator: torch.Generator | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if not isinstance(self.inner, Method) or isinstance(self.inner, Int8):
            raise ValueError(f"Int8: inner must be another method, got {self.inner!r}")

    @property
    def stateful(self) -> bool:
        return self.inner.stateful

    def supports(self, op: Op) -> str | None:
        return self.inner.supports(op)

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        kept = self.inner.keep(op, x, state)
        if not all(t.is_floating_point() for t in kept):
            name = type(self.inner).__name__  # a repr would not trace
            raise RuntimeError(f"Int8 around {name} cannot be compiled: compile {name} alone")
        return tuple(part for t in kept for part in quantise(t, stochastic=False))

    def next_state(self, kept: Kept) -> Kept:
        return self.inner.next_state(_unpack(kept))

    def filter(self, op: Op, g: Tensor) -> Tensor:
        g = self.inner.filter(op, g)
        return dequantise(*quantise(g, stochastic=True, generator=self.generator))

    def grad_input(self, op: Op, g: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        return self.inner.grad_input(op, g, w, x_shape)

    def grad_weight(self, op: Op, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        return self.inner.grad_weight(op, g, _unpack(kept), x_shape)

    def keep_macs(self, op: Op, x_shape: Shape, kept: Kept) -> int:
        return self.inner.keep_macs(op, x_shape, kept[::3])

    def macs(self, op: Op, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        return self.inner.macs(op, x_shape, w_shape, kept[::3])


def _unpack(kept: Kept) -> Kept:
    return tuple(dequantise(*kept[i : i + 3]) for i in range(0, len(kept), 3))

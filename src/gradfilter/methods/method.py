"""What a method is: how one layer keeps its input and computes its two gradients.

The bodies here are exact backpropagation; a method overrides only what it changes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from gradfilter.layers import ConvOp, Op

Kept = tuple[Tensor, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Method:
    """Exact backpropagation, the reference each method is an approximation of."""

    stateful: ClassVar[bool] = False  # whether a layer remembers something between batches

    def __repr__(self) -> str:
        """As one would write it: without what is not set, or named by default."""
        shown = (
            f"{f.name}={value!r}"
            for f in fields(self)
            if f.repr and (value := getattr(self, f.name)) is not None
            if not (isinstance(value, str) and value == f.default)
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def supports(self, op: Op) -> str | None:
        """Why this method cannot take the layer, or None when it can."""
        return None

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        """What is stored of x from forward to backward."""
        return (x,)

    def next_state(self, kept: Kept) -> Kept:
        """What the layer remembers for its next batch; nothing unless a method warm-starts."""
        return ()

    def filter(self, op: Op, g: Tensor) -> Tensor:
        """The form of g from which both gradients are computed."""
        return g

    def grad_input(self, op: Op, g: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        """Gradient at x, from the filtered g."""
        return op.grad_input(g, w, x_shape)

    def grad_weight(self, op: Op, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        """Gradient at w, from the filtered g and what was kept of x."""
        return op.grad_weight(g, kept[0])

    def keep_macs(self, op: Op, x_shape: Shape, kept: Kept) -> int:
        """Multiply-adds the forward pass spends on keeping."""
        return 0

    def macs(self, op: Op, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        """Multiply-adds of (grad_input, grad_weight)."""
        dense = op.macs(x_shape, w_shape)
        return dense, dense


def takes_convolutions(method: Method, op: Op) -> str | None:
    """The reason shared by the methods that filter maps."""
    if not isinstance(op, ConvOp):
        return f"{type(method).__name__} takes convolutions, this is a {op.kind} layer"
    return None


def positive(owner: Method, **values: int | None) -> None:
    """Refuse a knob that is not a whole number of at least 1 (None is allowed)."""
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not whole or value < 1):
            raise ValueError(
                f"{type(owner).__name__}: {name} must be a whole number >= 1, got {value!r}"
            )


def fraction(owner: Method, **values: float | None) -> None:
    """Refuse a knob that is not in (0, 1] (None is allowed)."""
    for name, value in values.items():
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{type(owner).__name__}: {name} must be in (0, 1], got {value!r}")

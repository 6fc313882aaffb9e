"""Low-rank backpropagation by Walsh-Hadamard transform (LBP-WHT; Yang et al.; NeurIPS 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradfilter.layers import ConvOp, Op
from gradfilter.methods.method import Kept, Method, Shape, positive
from gradfilter.patches import divide_up

PREFIX = 8  # at most so many class or register tokens before a square grid of tokens


@dataclass(frozen=True, repr=False)
class WalshHadamard(Method):
    """A few low-pass Walsh-Hadamard coefficients per patch of x and of g.

    For layers that act on every pixel or token alone: 1x1 convolutions and Linear. Keeps `bases`
    coefficients of x per patch of patch x patch pixels, lowest sequency first; gx and gW are
    computed from coefficients. With 1 basis it is GradientFilter; with patch*patch it is exact.

    The tokens [N, T, C] of a Linear are taken as a square grid after at most 8 leading tokens
    (class, registers), which are kept as they are; else as one row. [..., H, W, C] is a grid.
    """

    patch: int = 4
    bases: int = 3

    def __post_init__(self):
        positive(self, patch=self.patch, bases=self.bases)
        if self.patch & (self.patch - 1):
            raise ValueError(f"WalshHadamard: patch must be a power of 2, got {self.patch}")
        if self.bases > self.patch**2:
            raise ValueError(
                f"WalshHadamard: a patch of side {self.patch} has {self.patch**2} bases, "
                f"got bases={self.bases}"
            )

    def supports(self, op: Op) -> str | None:
        if isinstance(op, ConvOp) and not op.pointwise:
            return "WalshHadamard takes 1x1 convolutions without padding, and Linear layers"
        return None

    def keep(self, op: Op, x: Tensor, state: Kept = ()) -> Kept:
        if isinstance(op, ConvOp):
            x = x[..., :: op.stride[0], :: op.stride[1]]
        return (self._compress(op, x),)

    def filter(self, op: Op, g: Tensor) -> Tensor:
        return self._compress(op, g)

    def grad_input(self, op: Op, g: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        if not isinstance(op, ConvOp):
            return self._expand(op, g @ w, x_shape)
        n, m, _ = g.shape
        gg = g.reshape(n, m, op.groups, -1)
        taps = w.reshape(op.groups, -1, w.shape[1])
        gx = torch.einsum("nmgo,goc->nmgc", gg, taps).flatten(2)
        size = op.output_size(x_shape[-2:])
        gx = self._expand(op, gx, (*x_shape[:2], *size))
        if op.stride == (1, 1):
            return gx
        full = gx.new_zeros(x_shape)
        full[..., :: op.stride[0], :: op.stride[1]] = gx
        return full

    def grad_weight(self, op: Op, g: Tensor, kept: Kept, x_shape: Shape) -> Tensor:
        (x,) = kept
        if not isinstance(op, ConvOp):
            return op.grad_weight(g, x)
        gg, xx = (t.reshape(*t.shape[:2], op.groups, -1) for t in (g, x))
        return torch.einsum("nmgo,nmgc->goc", gg, xx).flatten(0, 1)[..., None, None]

    def macs(self, op: Op, x_shape: Shape, w_shape: Shape, kept: Kept) -> tuple[int, int]:
        n, m, _ = kept[0].shape
        return (n * m * math.prod(w_shape),) * 2

    def _compress(self, op: Op, x: Tensor) -> Tensor:
        """Coefficients of a map or of tokens, one row per patch and basis. [N, M, C]"""
        lead, grid = _grid(op, x)
        rows, columns = self._axes(grid)
        c = torch.einsum("nhwc,hpi,wqj->npqijc", grid, rows, columns)
        c = torch.stack([c[:, :, :, i, j] for i, j in self._sequencies()], 3)
        return torch.cat([lead, c.flatten(1, 3)], 1)

    def _expand(self, op: Op, c: Tensor, shape: Shape) -> Tensor:
        """The map or tokens of `shape` that has these coefficients."""
        lead, grid = _grid(op, c.new_zeros(()).expand(shape))
        rows, columns = self._axes(grid)
        count = lead.shape[1]
        n, _, channels = c.shape
        kept = c[:, count:].reshape(n, rows.shape[1], columns.shape[1], -1, channels)
        pairs = self._sequencies()
        low = torch.stack([rows[..., i] for i, _ in pairs], -1)  # [h, P, K]
        across = torch.stack([columns[..., j] for _, j in pairs], -1)
        grid = torch.einsum("npqkc,hpk,wqk->nhwc", kept, low, across)
        if isinstance(op, ConvOp):
            return grid.movedim(-1, 1)
        return torch.cat([c[:, :count], grid.flatten(1, 2)], 1).reshape(shape)

    def _axes(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Orthonormal bases of both axes of a grid [N, h, w, C]. [size, patches, patch]"""
        return tuple(
            torch.tensor(_basis(size, self.patch), dtype=grid.dtype, device=grid.device)
            for size in grid.shape[1:3]
        )

    def _sequencies(self) -> list[tuple[int, int]]:
        """The kept (row, column) sequencies: lowest total first."""
        every = [(i, j) for i in range(self.patch) for j in range(self.patch)]
        return sorted(every, key=lambda ij: (sum(ij), max(ij), ij))[: self.bases]


def _grid(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    """x as (leading tokens [N, t, C], grid [N, h, w, C])."""
    if isinstance(op, ConvOp):
        x = x.movedim(1, -1)
    if x.ndim == 2:
        x = x[:, None, None]
    if x.ndim > 4:
        x = x.flatten(0, -4)
    if x.ndim == 4:
        return x[:, :0, 0], x
    tokens = x.shape[1]
    side = math.isqrt(tokens)
    lead = tokens - side * side
    if lead > PREFIX:
        return x[:, :0], x[:, None]
    return x[:, :lead], x[:, lead:].unflatten(1, (side, side))


@lru_cache(maxsize=256)
def _basis(size: int, patch: int) -> list:
    """One axis in patches, each with its orthonormal Walsh functions. [size, patches, patch]

    The functions of a cut-off edge patch are made orthonormal over the pixels it really has;
    those that are then no longer independent are 0.
    """
    count = divide_up(size, patch)
    table = [[[0.0] * patch for _ in range(count)] for _ in range(size)]
    for p in range(count):
        pixels = range(p * patch, min((p + 1) * patch, size))
        for k, f in enumerate(_orthonormal([w[: len(pixels)] for w in _walsh(patch)])):
            for i, value in zip(pixels, f, strict=True):
                table[i][p][k] = value
    return table


def _walsh(n: int) -> list[list[int]]:
    """The n Walsh functions of length n (a power of 2), by number of sign changes."""
    rows = [[1]]
    while len(rows) < n:
        rows = [r + [s * v for v in r] for r in rows for s in (1, -1)]
    return sorted(rows, key=lambda r: sum(a != b for a, b in zip(r, r[1:], strict=False)))


def _orthonormal(functions: list[list[float]]) -> list[list[float]]:
    """Gram-Schmidt in order; dependent functions become 0."""
    done: list[list[float]] = []
    for f in functions:
        f = [float(v) for v in f]
        for e in done:
            dot = sum(a * b for a, b in zip(f, e, strict=True))
            f = [a - dot * b for a, b in zip(f, e, strict=True)]
        norm = math.sqrt(sum(v * v for v in f))
        done.append([v / norm for v in f] if norm > 1e-9 else [0.0] * len(f))
    return done

"""From a module to its op: which nn.Conv2d and nn.Linear (and subclasses) we understand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradfilter.layers import ConvOp, LinearOp, Op
from gradfilter.patches import divide_up


@dataclass(frozen=True)
class Geometry:
    """How a layer reads its input: padding first if its mode is not zeros, then the op."""

    op: Op
    same: bool = False  # TensorFlow's SAME padding, which depends on the size of x
    mode: str = "zeros"
    border: tuple[int, ...] = ()  # of a mode other than zeros

    def __call__(self, x: Tensor) -> tuple[Tensor, Op]:
        """x ready for the op, and the op for its size."""
        if self.mode != "zeros":
            x = F.pad(x, self.border, self.mode)
        if self.same:
            return x, _padded(self.op, _same_padding(self.op, x.shape[-2:]))
        return x, self.op


def geometry(module: nn.Module) -> Geometry | str:
    """The geometry of a convolution or Linear layer, or the reason we leave it alone."""
    name = type(module).__name__
    if parametrize.is_parametrized(module):
        return "its weight is parametrised"
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return "it is lazy and has no shape yet: run the model once first"
    if isinstance(module, nn.Linear):
        same = type(module).forward is nn.Linear.forward
        return Geometry(LinearOp()) if same else f"{name} changes the forward of nn.Linear"
    own = _own_geometry(module)
    cls = type(module)
    if (cls.forward, cls._conv_forward) == (nn.Conv2d.forward, nn.Conv2d._conv_forward):
        return own
    for candidate in (own, *_padding_variants(module, own.op)):
        if _same_forward(module, candidate):
            return candidate
    return f"{name} changes more of nn.Conv2d than its padding"


def _own_geometry(conv: nn.Conv2d) -> Geometry:
    """What nn.Conv2d's own attributes say."""
    op = ConvOp(
        kernel=conv.kernel_size, stride=conv.stride, dilation=conv.dilation, groups=conv.groups
    )
    if conv.padding == "valid":
        pads = (0, 0, 0, 0)
    elif conv.padding == "same":
        extra = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        pads = tuple(p for e in extra for p in (e // 2, e - e // 2))
    else:
        pads = tuple(p for p in conv.padding for _ in (0, 1))
    if conv.padding_mode == "zeros" or not any(pads):
        return Geometry(_padded(op, pads))
    top, bottom, left, right = pads
    return Geometry(op, mode=conv.padding_mode, border=(left, right, top, bottom))


def _padding_variants(conv: nn.Conv2d, op: ConvOp) -> list[Geometry]:
    """Paddings that known subclasses use: SAME by the size of x, or a padding child."""
    bare = _padded(op, (0, 0, 0, 0))
    variants = [Geometry(bare, same=True), Geometry(bare)]
    for child in conv.children():
        if isinstance(child, nn.ZeroPad2d):
            left, right, top, bottom = child.padding
            variants.append(Geometry(_padded(op, (top, bottom, left, right))))
    return variants


def _same_forward(conv: nn.Conv2d, candidate: Geometry) -> bool:
    """Whether the candidate gives the module's own output, tried on inputs of several sizes."""
    w, b = conv.weight, conv.bias
    reach = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    for extra in range(4):
        size = [r + 2 * s + extra for r, s in zip(reach, conv.stride, strict=True)]
        noise = torch.Generator().manual_seed(extra)
        x = torch.randn(1, conv.in_channels, *size, generator=noise).to(w.device, w.dtype)
        with torch.no_grad():
            try:
                expected = type(conv).forward(conv, x)
                padded, op = candidate(x)
                found = op.forward(padded, w, b)
            except (RuntimeError, TypeError, ValueError):
                return False
        if not isinstance(expected, Tensor) or expected.shape != found.shape:
            return False
        if not w.is_meta and not torch.allclose(expected, found, rtol=1e-3, atol=1e-5):
            return False
    return True


def _same_padding(op: ConvOp, size: tuple[int, int]) -> tuple[int, int, int, int]:
    pads = []
    for length, k, s, d in zip(size, op.kernel, op.stride, op.dilation, strict=True):
        total = max((divide_up(length, s) - 1) * s + d * (k - 1) + 1 - length, 0)
        pads += [total // 2, total - total // 2]
    return tuple(pads)


def _padded(op: ConvOp, pads: tuple[int, ...]) -> ConvOp:
    return ConvOp(op.kernel, op.stride, pads, op.dilation, op.groups)

"""From a module to its op: which nn.Conv2d and nn.Linear (and subclasses) we understand."""

from __future__ import annotations

import dis
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    if reason := _unusual(module):
        return reason
    cls = type(module)
    if isinstance(module, nn.Linear):
        same = cls.forward is nn.Linear.forward
        return Geometry(LinearOp()) if same else f"{cls.__name__} changes the forward of nn.Linear"
    own = _own_geometry(module)
    if (cls.forward, cls._conv_forward) == (nn.Conv2d.forward, nn.Conv2d._conv_forward):
        return own
    if not any((*child.parameters(), *child.buffers()) for child in module.children()):
        for candidate in (own, *_padding_variants(module, own.op)):
            if _same_forward(module, candidate):
                return candidate
    return f"{cls.__name__} changes more of nn.Conv2d than its padding"


def _unusual(module: nn.Module) -> str | None:
    """Why a module cannot be understood by its class and attributes, if so."""
    if not isinstance(module, nn.Conv2d | nn.Linear):
        return f"{type(module).__name__} is not supported"
    if "weight" not in module._parameters:
        return "its weight is computed from other parameters (parametrised, normed or pruned)"
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return "it is lazy and has no shape yet: run the model once first"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}"
    if "forward" in module.__dict__:
        return "its forward is replaced on the object itself"
    return None


def read_by_parent(parent: nn.Module) -> list[str]:
    """Names of the children whose weight the parent's forward reads, perhaps instead of a call."""
    if isinstance(parent, nn.TransformerEncoderLayer):
        return []  # reads them for inference alone
    code = getattr(type(parent).forward, "__code__", None)
    names = [i.argval for i in dis.get_instructions(code)] if code else []
    return [
        child
        for child, attribute, then in zip(names, names[1:], [*names[2:], None], strict=False)
        if attribute == "weight" and child in parent._modules
        if then not in ("dtype", "device", "shape")
    ]


def _own_geometry(conv: nn.Conv2d) -> Geometry:
    """What nn.Conv2d's own attributes say."""
    # tuples, for a subclass may have put lists there
    kernel, stride, dilation = map(tuple, (conv.kernel_size, conv.stride, conv.dilation))
    op = ConvOp(kernel=kernel, stride=stride, dilation=dilation, groups=conv.groups)
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
    noise = torch.Generator().manual_seed(0)
    trial = _with_random_weights(conv, noise)
    reach = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    for extra in range(4):
        size = [r + 2 * s + extra for r, s in zip(reach, conv.stride, strict=True)]
        x = _random((1, conv.in_channels, *size), noise)
        with torch.no_grad():
            try:
                expected = type(conv).forward(trial, x)
                padded, op = candidate(x)
                found = op.forward(padded, trial.weight, trial.bias)
            except Exception:  # a foreign forward may raise anything
                return False
        if not isinstance(expected, Tensor) or expected.shape != found.shape:
            return False
        if not torch.allclose(expected, found):
            return False
    return True


def _with_random_weights(conv: nn.Conv2d, noise: torch.Generator) -> nn.Conv2d:
    """A shallow copy to try: weights that are 0, half precision or on meta would prove nothing."""
    trial = object.__new__(type(conv))
    trial.__dict__ = dict(conv.__dict__)
    for group in ("_parameters", "_buffers"):
        tensors = getattr(conv, group).items()
        trial.__dict__[group] = {
            name: _random(t.shape, noise) if t is not None and t.is_floating_point() else t
            for name, t in tensors
        }
    return trial


def _random(shape: tuple[int, ...], noise: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=noise, dtype=torch.float64, device="cpu")


def _same_padding(op: ConvOp, size: tuple[int, int]) -> tuple[int, int, int, int]:
    pads = []
    for length, k, s, d in zip(size, op.kernel, op.stride, op.dilation, strict=True):
        total = max((divide_up(length, s) - 1) * s + d * (k - 1) + 1 - length, 0)
        pads += [total // 2, total - total // 2]
    return tuple(pads)


def _padded(op: ConvOp, pads: tuple[int, ...]) -> ConvOp:
    return ConvOp(op.kernel, op.stride, pads, op.dilation, op.groups)

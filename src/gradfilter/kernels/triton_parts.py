"""What the Triton kernels share: activations inside a kernel, tiles and maps on the host."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradfilter.kernels.eager import Pair


@triton.jit
def _sigmoid(z):
    return 1 / (1 + tl.exp(-z))


@triton.jit
def _cut(z):
    return tl.where(z < -3, 0.0, tl.where(z > 3, 1.0, (z + 3) / 6))


@triton.jit
def activate(z, parameter, ACT: tl.constexpr):
    """f(z) and f'(z). `where` and not `maximum`, so that NaN goes through."""
    one = tl.full(z.shape, 1.0, tl.float32)
    if ACT == "relu":
        return tl.where(z < 0, 0.0, z), tl.where(z > 0, one, 0.0)
    elif ACT == "relu6":
        a = tl.where(z < 0, 0.0, tl.where(z > 6, 6.0, z))
        return a, tl.where((z > 0) & (z < 6), one, 0.0)
    elif ACT == "hardswish":
        return z * _cut(z), tl.where(z <= -3, 0.0, tl.where(z < 3, z / 3 + 0.5, one))
    elif ACT == "hardsigmoid":
        return _cut(z), tl.where((z > -3) & (z < 3), one / 6, 0.0)
    elif ACT == "silu":
        s = _sigmoid(z)
        return z * s, s * (1 + z * (1 - s))
    elif ACT == "sigmoid":
        s = _sigmoid(z)
        return s, s * (1 - s)
    elif ACT == "gelu":
        half = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
        return z * half, half + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    elif ACT == "gelu_tanh":
        t = 2 * _sigmoid(1.5957691216057308 * z * (1 + 0.044715 * z * z)) - 1
        inner = 0.7978845608028654 * (1 + 0.134145 * z * z)
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * inner
    elif ACT == "tanh":
        t = 2 * _sigmoid(2 * z) - 1
        return t, 1 - t * t
    elif ACT == "leaky_relu":
        slope = tl.where(z > 0, one, parameter)
        return z * slope, slope
    elif ACT == "elu":
        e = parameter * tl.exp(tl.where(z > 0, 0.0, z))
        return tl.where(z > 0, z, e - parameter), tl.where(z > 0, one, e)
    elif ACT == "mish":
        e = tl.exp(tl.where(z > 20, 20.0, z))  # tanh(softplus) is 1 in float32 from there on
        n = e * (e + 2)
        t = n / (n + 2)
        return z * t, t + z * _sigmoid(z) * (1 - t * t)
    else:
        return z, one


@triton.jit
def affine(z, scale, shift, c, C):
    """z [pixels, channels] * scale + shift, either of which may be None."""
    if scale is not None:
        z = z * tl.load(scale + c, c < C, 0.0).to(tl.float32)[None, :]
    if shift is not None:
        z = z + tl.load(shift + c, c < C, 0.0).to(tl.float32)[None, :]
    return z


# Triton's own cdiv and next_power_of_2 cost microseconds a call on the host.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=1024)
def blocks(pixels: int, channels: int, most: int = 128) -> tuple[int, int, int]:
    """Tile sizes, powers of 2, for that many pixels and channels; and warps for such a tile.

    Channels lie side by side in memory, so the widest block that wastes little comes first.
    """
    pixels = power_of_2(pixels)
    block = max(most, 1024 // pixels)
    while block > 16 and cdiv(channels, block) * block > 1.125 * channels:
        block //= 2
    pixels = min(pixels, 2048 // block)
    return pixels, block, min(max(pixels * block // 512, 1), 4)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def new_map(like: Tensor, h: int, w: int) -> Tensor:
    form = {"dtype": like.dtype, "device": like.device, "memory_format": torch.channels_last}
    return torch.empty((*like.shape[:2], h, w), **form)


def new_grid(like: Tensor, side: Pair) -> Tensor:
    return new_map(like, cdiv(like.shape[2], side[0]), cdiv(like.shape[3], side[1]))


@functools.lru_cache(maxsize=256)
def on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)

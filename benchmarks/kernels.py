"""How much time does each C kernel take, against the PyTorch operations it replaces?

MobileNetV2 shapes at 224 px, grid 7, one thread. The two sides are timed in turn, best of many.

    PYTHONPATH=src taskset -c 1 python benchmarks/kernels.py [--batch 8] [--only NAME]
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfilter import kernels
from gradfilter.kernels import cpu_library

Case = tuple[str, Callable[[], object], Callable[[], object]]  # name, PyTorch, kernel
GRID = 7


def best_of(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Best time of each call in milliseconds, the calls taken in turn."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return [1e3 * seconds for seconds in best]


def random_map(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def patch_of(size: int) -> tuple[int, int]:
    return (-(-size // GRID),) * 2


def tap_table(size: int, out: int, k: int, stride: int) -> Tensor:
    """N_a[p, q] of one axis for a centred kernel (docs: the Galerkin filter): [k, P, Q]."""
    side_in, side_out = patch_of(size)[0], patch_of(out)[0]
    table = torch.zeros(k, -(-out // side_out), -(-size // side_in))
    for a in range(k):
        for i in range(out):
            j = stride * i + a - k // 2
            if 0 <= j < size:
                table[a, i // side_out, j // side_in] += 1
    return table


def mean_cases(batch: int) -> list[Case]:
    cases = []
    for c, size in [(96, 112), (144, 56), (192, 28), (384, 14), (960, 7)]:
        x, side = random_map(batch, c, size, size), patch_of(size)
        cases.append((
            f"patch_mean {c}x{size}x{size} vs avg_pool2d",
            lambda x=x, side=side: F.avg_pool2d(x, side, ceil_mode=True),
            lambda x=x, side=side: kernels.patch_mean(x, side),
        ))
    return cases


def epilogue_cases(batch: int) -> list[Case]:
    cases = []
    shapes = [(32, 112), (96, 112), (144, 56), (192, 28), (384, 14), (960, 7)]
    for act, reference in [("relu6", F.relu6), ("silu", F.silu)]:
        for c, size in shapes if act == "relu6" else shapes[2:4]:
            y, z = random_map(batch, c, size, size), random_map(batch, c, size, size)
            scale, shift, side = torch.ones(c), torch.zeros(c), patch_of(size)
            cases.append((
                f"epilogue {act} {c}x{size}x{size} vs {act}_",
                lambda z=z, reference=reference: reference(z, inplace=True),
                lambda y=y, scale=scale, shift=shift, side=side, act=act: kernels.epilogue(
                    y, scale, shift, act, side
                ),
            ))
    return cases


def depthwise_cases(batch: int) -> list[Case]:
    cases = []
    shapes = [(32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 3, 2), (192, 28, 3, 1)]
    shapes += [(384, 14, 3, 1), (576, 14, 3, 2), (960, 7, 3, 1), (144, 56, 5, 2), (240, 28, 5, 1)]
    shapes += [(672, 14, 5, 1), (1152, 7, 5, 1)]
    for c, size, k, stride in shapes:
        x, w = random_map(batch, c, size, size), torch.randn(c, 1, k, k)
        scale, shift, side = torch.ones(c), torch.zeros(c), patch_of(-(-size // stride))
        p = k // 2
        cases.append((
            f"depthwise {k}x{k} s{stride} {c}x{size}x{size} vs conv2d + relu6_",
            lambda x=x, w=w, shift=shift, s=stride, p=p: F.relu6(
                F.conv2d(x, w, shift, s, p, 1, x.shape[1]), inplace=True
            ),
            lambda x=x, w=w, a=(scale, shift), s=stride, p=p, side=side: kernels.depthwise(
                x, w, *a, "relu6", (s, s), (p,) * 4, (1, 1), side
            ),
        ))
    return cases


def grid_cases(batch: int) -> list[Case]:
    cases = []
    for c, size, k, stride in [(96, 112, 3, 2), (144, 56, 3, 1), (384, 14, 3, 1), (960, 7, 3, 1),
                               (1152, 7, 5, 1)]:
        out = -(-size // stride)
        taps = tap_table(size, out, k, stride)
        x, w = random_map(batch, c, GRID, GRID), torch.randn(c, 1, k, k)
        g = random_map(batch, c, GRID, GRID)
        args = g, x, w, None, (1, 1), (k // 2, k // 2), (1, 1), False, (0, 0), c
        cases.append((
            f"grid backward {k}x{k} s{stride} {c}x{size}x{size} vs conv2d's backward on the grid",
            lambda args=args: torch.ops.aten.convolution_backward(*args, (True, True, False)),
            lambda g=g, x=x, w=w, taps=taps: kernels.depthwise_grid_backward(g, x, w, taps, taps),
        ))
    return cases


def pool_cases(batch: int) -> list[Case]:
    y = random_map(batch, 64, 112, 112)
    scale, shift, geometry = torch.ones(64), torch.zeros(64), ((3, 3), (2, 2), (1, 1), (1, 1))
    return [(
        "max_pool 64x112x112 vs relu_ + max_pool2d with indices",
        lambda: F.max_pool2d(F.relu(y, inplace=True), *geometry, return_indices=True),
        lambda: kernels.max_pool(y, scale, shift, "relu", *geometry, (16, 16), (8, 8)),
    )]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--isa", help="sse2, avx2 or avx512 instead of the best there is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(kernels.status())
    if options.isa:
        cpu_library.library().handle.gf_select(options.isa.encode())
    groups = [mean_cases, epilogue_cases, depthwise_cases, grid_cases, pool_cases]
    print(f"{'kernel vs PyTorch':<75} {'PyTorch ms':>10} {'kernel ms':>10} {'ratio':>6}")
    for name, pytorch, kernel in (case for group in groups for case in group(options.batch)):
        if options.only in name:
            with torch.no_grad():
                ours, theirs = best_of([kernel, pytorch], options.repeats)
            print(f"{name:<75} {theirs:>10.3f} {ours:>10.3f} {ours / theirs:>6.2f}", flush=True)


if __name__ == "__main__":
    main()

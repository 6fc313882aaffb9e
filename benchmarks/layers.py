"""How much faster is the backward pass of a single layer than the exact one?

The paper's seven 3x3 layers (arXiv 2301.00330), each a network of its own, by the engine: both
gradients of a convolution without bias, channels-last, from and to maps of full size, all methods
timed in turns, best of all turns. What the forward pass does more than a plain one, to keep the
patch means, is timed too. `--engine layer` times the reference instead.

    PYTHONPATH=src python benchmarks/layers.py --batch 4
    PYTHONPATH=src python benchmarks/layers.py --device cuda --out layers.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import measure
import torch
from torch import Tensor, nn

import gradfilter as gf

# name -> channels, height, width, and the paper's CPU speed-up with patch 2 and 4 (batch 32)
SHAPES = {
    "128@120x160": (128, 120, 160, 7, 19),
    "256@60x80": (256, 60, 80, 16, 58),
    "512@30x40": (512, 30, 40, 25, 102),
    "512@14x14": (512, 14, 14, 29, 67),
    "256@14x14": (256, 14, 14, 26, 63),
    "128@28x28": (128, 28, 28, 24, 70),
    "64@56x56": (64, 56, 56, 9, 50),
}
METHODS = {
    "exact": None,  # plain PyTorch
    "gradient-filter patch=2": gf.GradientFilter(patch=2),
    "gradient-filter patch=4": gf.GradientFilter(patch=4),
    "galerkin patch=2": gf.GalerkinFilter(patch=2),
    "galerkin patch=4": gf.GalerkinFilter(patch=4),
    "galerkin grid=7": gf.GalerkinFilter(grid=7),
}


class Layer:
    """A 3x3 layer with one method, its forward and its backward pass."""

    def __init__(self, method: gf.Method | None, x: Tensor, g: Tensor, engine: str):
        torch.manual_seed(0)
        conv = nn.Conv2d(x.shape[1], x.shape[1], 3, padding=1, bias=False)
        self.conv = conv.to(x.device, memory_format=torch.channels_last)
        self.model = nn.Sequential(self.conv)
        if method is not None:
            example = {"example": x[:1]} if engine == "auto" else {}
            gf.convert(self.model, method, engine=engine, **example)
        self.x, self.g, self.y = x.detach().requires_grad_(), g, None

    def forward(self) -> Tensor:
        return self.model(self.x)

    def backward(self) -> tuple[Tensor, ...]:
        if self.y is None:
            self.y = self.forward()
        return torch.autograd.grad(self.y, (self.x, self.conv.weight), self.g, retain_graph=True)


def measure_shape(shape: tuple, args: argparse.Namespace) -> dict[str, dict[str, measure.Samples]]:
    """Seconds of the backward and of the forward pass of every method."""
    channels, height, width = shape[:3]
    x, g = (torch.randn(args.batch, channels, height, width, device=args.device) for _ in range(2))
    x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))
    layers = {name: Layer(method, x, g, args.engine) for name, method in METHODS.items()}
    clock = measure.cuda_clock if args.device == "cuda" else measure.cpu_clock
    found = {}
    for kind in ("backward", "forward"):
        calls = {name: getattr(layer, kind) for name, layer in layers.items()}
        for call in calls.values():
            call()
        found[kind] = measure.in_turns(calls, args.repeats, clock)
    return found


def report(result: dict) -> str:
    """Speed-ups of the backward pass, beside the paper's on a desktop CPU; then of both passes."""
    tables = []
    for kinds in (["backward"], ["forward", "backward"]):
        names = [name for name in METHODS if name != "exact"]
        header = [f"speed-up, {' + '.join(kinds)}", "exact ms", *names]
        header += ["paper CPU patch=2", "paper CPU patch=4"] if len(kinds) == 1 else []
        rows = []
        for shape, found in result["shapes"].items():
            best = {n: sum(_best(found[k][n], result["clock"]) for k in kinds) for n in METHODS}
            cells = [f"{1e3 * best['exact']:.2f}"]
            cells += [f"{best['exact'] / best[n]:.1f}" for n in names]
            paper = [str(n) for n in SHAPES[shape][3:]] if len(kinds) == 1 else []
            rows.append([shape, *cells, *paper])
        tables.append(measure.table(header, rows))
    return "\n\n".join(tables)


def _best(samples: measure.Samples, clock: str) -> float:
    return min(samples[clock])


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--engine", choices=["auto", "layer"], default="auto")
    p.add_argument("--threads", type=int, default=1, help="on the CPU; 1 stays on one core")
    p.add_argument("--repeats", type=int, default=5, help="turns, of two timings each")
    p.add_argument("--out", type=Path, help="JSON file of the result")
    return p


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    measure.use_cuda() if args.device == "cuda" else measure.use_cpu(args.threads)
    torch.manual_seed(0)
    # CPU time is disturbed less than wall time, but says little of several threads
    clock = "cuda" if args.device == "cuda" else "cpu" if args.threads == 1 else "wall"
    shapes = {}
    for name in args.shapes:
        print(f"measuring {name}, batch {args.batch}", file=sys.stderr, flush=True)
        shapes[name] = measure_shape(SHAPES[name], args)
    result = measure.about(__file__, argv) | {"batch": args.batch, "clock": clock, "shapes": shapes}
    print(report(result))
    if args.out:
        measure.write(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

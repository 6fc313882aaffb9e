"""Does a long training run leak? Resident memory every 200 of 2,000 steps.

    python benchmarks/leak.py [--steps 2000] [--model mobilenet_v2] [--size 96] [--batch 2]

Every fifth step has another image size, so that what is cached by size is seen as well.
"""

import argparse
import resource
from pathlib import Path

import torch
import torchvision

import gradfilter as gf


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = torchvision.models.get_model(args.model, num_classes=10)
    inputs = [torch.randn(args.batch, 3, s, s) for s in (args.size, args.size + 16)]
    gf.convert(model, gf.GalerkinFilter(grid=7), example=inputs[0])
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    first = 0.0
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        model(inputs[step % 5 == 0]).square().mean().backward()
        optimizer.step()
        if step % 200 == 0:
            now = resident_mib()
            first = first or now
            print(f"step {step:5d}  resident {now:8.1f} MiB  {now - first:+.1f}", flush=True)


if __name__ == "__main__":
    main()

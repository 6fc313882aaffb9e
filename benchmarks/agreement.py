"""How much of a layer's gradient do batches agree on? By quarters of a network.

`gf.plan` takes the energy of a layer's gradient on one batch for what it can learn. Of that energy
only the part counts that other batches share: the mean product of the gradients of two batches over
the mean energy of one. Networks, data and batches are those of pays.py, before any training:

    PYTHONPATH=src python benchmarks/agreement.py --shared FOLDER
    PYTHONPATH=src python benchmarks/agreement.py --table
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import measure
import pays
import torch
from torch import Tensor, nn

from gradfilter import trial

FILE = pays.RESULTS / "agreement.json"
BATCHES = 6


def products(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
    """For each layer the mean energy of a batch's gradient, and the mean product of two."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    found: dict[str, list[Tensor]] = {name: [] for name in layers}
    for x, target in batches:
        loss = nn.functional.cross_entropy(model(x), target)
        grads = torch.autograd.grad(loss, [m.weight for m in layers.values()])
        for name, grad in zip(layers, grads, strict=True):
            found[name].append(grad.flatten())
    told = {}
    for name, grads in found.items():
        each = torch.stack(grads) @ torch.stack(grads).T  # [batches, batches]
        same = torch.eye(len(each), dtype=torch.bool)
        told[name] = [float(each[same].mean()), float(each[~same].mean())]
    return told


def measured(row: pays.Row, args: argparse.Namespace) -> dict[str, list[float]]:
    """Of one network on one data set, with the output layer that a plan would see."""
    torch.manual_seed(0)
    model, x, target = pays.example(row, args, BATCHES * pays.BATCH)
    model = trial.exact_copy(model).eval()
    trial.wake_head(model)
    order = torch.randperm(len(x)).split(pays.BATCH)
    return products(model, [(x[i], target[i]) for i in order])


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Share of the energy, and share of that in which batches agree, by quarters of the layers."""
    lines = []
    for name, layers in found.items():
        values = list(layers.values())
        cuts = [len(values) * k // 4 for k in range(5)]
        total = sum(energy for energy, _ in values)
        cells = []
        for a, b in zip(cuts, cuts[1:], strict=False):
            energy, shared = (sum(part) for part in zip(*values[a:b], strict=True))
            cells.append(f"{energy / total:.0%}, {shared / energy:+.2f}")
        lines.append([name, *cells])
    quarters = ("first quarter", "second", "third", "last quarter of the layers")
    return measure.table(["energy, agreement", *quarters], lines)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shared", type=Path, help="folder of the data and the ImageNet weights")
    p.add_argument("--file", type=Path, default=FILE, help="the result")
    p.add_argument("--table", action="store_true", help="print the table and measure nothing")
    p.set_defaults(size=pays.SIZE, lr=None, device="cpu", workers=0)
    args = p.parse_args(argv)
    if not args.table:
        torch.set_num_threads(1)
        rows = [pays.Row(*column, pays.BUDGETS[0], pays.PLANNED, 0) for column in pays.COLUMNS]
        found = {pays.told(row.data, row.model): measured(row, args) for row in rows}
        about = measure.about(sys.argv[0], sys.argv[1:])
        args.file.write_text(json.dumps(about | {"layers": found}, indent=1) + "\n")
    print(table(json.loads(args.file.read_text())["layers"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

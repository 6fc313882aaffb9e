"""How much faster is Hosvd.keep than decomposing the whole unfoldings of the same activations?

The inputs of MobileNetV2's convolutions at batch 32 and 224 px. The other side takes, mode by
mode, the SVD of the whole unfolding, the leading left singular vectors that hold the energy, and
then the same core; both sides must find the same ranks and subspaces. The two are timed in turn,
best of a few, in processor time of one thread, so that other programs on the machine do not count.
All 52 layers are timed unless --every asks for fewer; which ones is in the result. Finished layers
are kept in the result file, so that a stopped run of the same code goes on where it was.

    PYTHONPATH=src taskset -c 0 python benchmarks/hosvd.py [--every 5] [--repeats 3]
"""

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch import Tensor

import gradfilter as gf
from gradfilter import tucker

RESULT = Path(__file__).parent / "results" / "hosvd.json"


def convolution_inputs(batch: int, size: int, weights: str | None) -> dict[str, Tensor]:
    """Layer name -> its input in a forward pass over one batch of noise images."""
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v2(weights=None)
    if weights:
        model.load_state_dict(torch.load(weights, weights_only=True))
    inputs: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            # copied: the ReLU6 that comes next works in place
            module.register_forward_pre_hook(
                lambda _, args, name=name: inputs.update({name: args[0].clone()})
            )
    with torch.no_grad():
        model.train()(torch.randn(batch, 3, size, size))
    return inputs


def decompose_unfoldings(x: Tensor, energy: float) -> tuple[Tensor, ...]:
    """The core and the factors of x by an SVD of each whole unfolding."""
    factors = []
    for mode in range(x.ndim):
        u, s, _ = torch.linalg.svd(tucker.unfold(x, mode), full_matrices=False)
        share = s.square().cumsum(0)
        rank = int((share < energy * share[-1]).sum()) + 1
        factors.append(u[:, :rank].contiguous())
    return tucker.core(x, factors), *factors


def check_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Same ranks and subspaces, to float32 rounding of the rank and of the vectors."""
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        if abs(a.shape[1] - b.shape[1]) > 1:
            raise SystemExit(f"ranks differ: {a.shape[1]} and {b.shape[1]}")
        rank = min(a.shape[1], b.shape[1])
        overlap = (a.T @ b).square().sum().item() / rank
        if abs(overlap - 1) > 0.02:
            raise SystemExit(f"subspaces differ: overlap {overlap}")


def time_layer(x: Tensor, energy: float, repeats: int) -> dict[str, float]:
    """Best seconds of both sides, taken in turn."""
    sides = {
        "gram": lambda: gf.Hosvd(energy=energy).keep(None, x),
        "svd": lambda: decompose_unfoldings(x, energy),
    }
    best = dict.fromkeys(sides, math.inf)
    kept = {}
    for _ in range(repeats):
        for side, run in sides.items():
            start = time.process_time()
            kept[side] = run()
            best[side] = min(best[side], time.process_time() - start)
    check_same(kept["gram"], kept["svd"])
    return best


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def settings(args: argparse.Namespace) -> dict:
    return {
        "batch": args.batch,
        "size": args.size,
        "energy": args.energy,
        "repeats": args.repeats,
        "weights": args.weights or "random",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "gradfilter": gf.__version__,
            "tucker.py": hashlib.sha256(Path(tucker.__file__).read_bytes()).hexdigest()[:12],
        },
        "machine": processor(),
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="time every n-th layer only")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="image side")
    parser.add_argument("--energy", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights", help="a state dict of torchvision's mobilenet_v2")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)

    result = {**settings(args), "command": " ".join(["python", *sys.argv]), "layers": {}}
    if args.out.exists():
        earlier = json.loads(args.out.read_text())
        if all(earlier.get(key) == value for key, value in settings(args).items()):
            result["layers"] = earlier["layers"]
    inputs = convolution_inputs(args.batch, args.size, args.weights)
    chosen = list(inputs)[:: args.every]
    print(f"timing {len(chosen)} of {len(inputs)} layers: {', '.join(chosen)}", flush=True)
    for i, name in enumerate(chosen, start=1):
        x = inputs[name]
        if name not in result["layers"]:
            best = time_layer(x, args.energy, args.repeats)
            row = {"input": list(x.shape), **best, "ratio": best["svd"] / best["gram"]}
            result["layers"][name] = row
        row = result["layers"][name]
        print(
            f"[{i:2}/{len(chosen)}] {name:22} {str(tuple(x.shape)):20} "
            f"unfoldings {1e3 * row['svd']:9.1f} ms   ours {1e3 * row['gram']:8.1f} ms   "
            f"{row['ratio']:6.1f}x",
            flush=True,
        )
        done = [result["layers"][n] for n in inputs if n in result["layers"]]
        result["timed"] = f"{len(done)} of {len(inputs)} convolutions"
        result["geometric_mean_ratio"] = geometric_mean([r["ratio"] for r in done])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"geometric mean over {result['timed']}: {result['geometric_mean_ratio']:.1f}x faster\n"
        f"written to {args.out}"
    )


if __name__ == "__main__":
    main()

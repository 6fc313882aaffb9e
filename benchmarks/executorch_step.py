"""Tries the training step in ExecuTorch: exported exact and filtered, compared with PyTorch, timed.

Needs `pip install executorch`. Prints what works and what fails, for a small network.

    python benchmarks/executorch_step.py
"""

from __future__ import annotations

import time

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import gradfilter as gf
from gradfilter import kernels
from gradfilter.export.optimizers import Sgd
from gradfilter.export.step import TrainingStep, together
from gradfilter.kernels import eager
from gradfilter.order import evaluating
from gradfilter.region import engine

SIZE, REPEATS = 32, 5


def main() -> None:
    for method in (gf.Exact(), gf.GalerkinFilter(grid=7)):
        graph, tensors, count = step(method)
        exported = torch.export.export(graph, tensors)
        for backend, lower in (("portable", portable), ("XNNPACK", xnnpack)):
            try:
                told = tried(lower(exported), graph, tensors, count)
            except Exception as error:  # it raises whatever its compiler and runtime raise
                told = f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
            print(f"{method!r}, {backend}: {told}", flush=True)


def step(method) -> tuple[fx.GraphModule, tuple, int]:
    """A step of SGD of a small network as one graph of core operators, and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    x, target = torch.randn(1, 3, SIZE, SIZE), torch.tensor([1])
    gf.convert(model, method, example=x)
    own = {name: p.detach() for name, p in model.named_parameters()}
    tensors = (*own.values(), torch.tensor(0.01), x, target)
    taken = TrainingStep(model, tuple(own), (), together(own, {}), Sgd())
    with evaluating(model), kernels.using(eager), engine.traced():
        taken(*tensors)
        seen = make_fx(lambda *t: taken(*t)[: len(own) + 1])(*tensors)
        seen.graph.eliminate_dead_code()
        seen.recompile()
        pure = make_fx(torch.func.functionalize(seen))(*tensors)
    for node in pure.graph.nodes:  # ExecuTorch has no memory that is not set
        if node.op == "call_function" and "empty" in str(node.target):
            node.args, node.kwargs = (list(node.meta["tensor_meta"].shape), 0.0), {}
            node.target = torch.ops.aten.full.default
    pure.recompile()
    return pure, tensors, len(own)


def portable(exported):
    from executorch.exir import to_edge

    return to_edge(exported).to_executorch()


def xnnpack(exported):
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    parts = [XnnpackPartitioner()]
    return to_edge_transform_and_lower(exported, partitioner=parts).to_executorch()


def tried(program, graph, tensors, count: int) -> str:
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(program.buffer).load_method("forward")
    found, expected = method.execute(tensors), graph(*tensors)
    pairs = zip(found[:count], expected[:count], strict=True)
    error = max(float((a - b).abs().max()) for a, b in pairs)
    seconds = []
    for _ in range(REPEATS):
        begin = time.process_time()
        method.execute(tensors)
        seconds.append(time.process_time() - begin)
    size = len(program.buffer) / 1e3
    return f"{1e3 * min(seconds):.1f} ms a step, {size:.0f} kB, off PyTorch by {error:.0e}"


if __name__ == "__main__":
    main()

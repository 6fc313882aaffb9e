"""A training step as one CUDA graph: recorded once for each size of batch, then replayed.

Launched one by one, the small kernels of a filtered backward pass leave a GPU waiting for Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradfilter import Method
from gradfilter.recipes.loading import Batch
from gradfilter.recipes.trainer import LOOK_EVERY, Trainer

WARM_UP = 3  # steps before recording, in which kernels are built and constants are copied


class Captured:
    """Takes the steps of a trainer, as `Trainer.step` does, by replaying graphs."""

    def __init__(self, trainer: Trainer):
        if why := refusal(trainer):
            raise ValueError(f"the step cannot be recorded as a CUDA graph: {why}")
        self.trainer = trainer
        self.rate = torch.zeros((), device=trainer.device)
        self.momenta = [_momentum(trainer.optimizer, p) for p in trainer.parameters]
        self.recorded: dict[tuple, Recorded] = {}

    def step(self, batch: Batch, number: int, rate: float) -> None:
        inputs, target = self.trainer.here(batch)
        shapes = tuple(t.shape for t in (*inputs, target))
        if shapes not in self.recorded:
            self.recorded[shapes] = Recorded(self, inputs, target)
        self.trainer.seed(number)
        self.rate.fill_(rate)
        self.recorded[shapes].replay(inputs, target)
        if number % LOOK_EVERY == 0:
            self.trainer.check(number)

    def take(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The step itself, without anything that a GPU would wait for."""
        for p in self.trainer.parameters:
            p.grad = None
        sums = self.trainer.gradients((inputs, target))
        self.update()
        self.trainer.sums += sums

    @torch.no_grad()
    def update(self) -> None:
        """SGD as the trainer's optimizer does it, with a rate that is read when it runs."""
        optimizer = self.trainer.optimizer
        for group in optimizer.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            momenta = [optimizer.state[p]["momentum_buffer"] for p in weights]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, [p.grad for p in weights])
            torch._foreach_add_(momenta, weights, alpha=group["weight_decay"])
            torch._foreach_sub_(weights, torch._foreach_mul(momenta, self.rate * group["share"]))

    def state(self) -> list[Tensor]:
        """All that a step changes."""
        trainer = self.trainer
        return [*trainer.parameters, *self.momenta, trainer.sums, trainer.healthy]


class Recorded:
    """The graph of a step, and the memory that it reads a batch from."""

    def __init__(self, captured: Captured, inputs: tuple[Tensor, ...], target: Tensor):
        self.inputs, self.target = tuple(t.clone() for t in inputs), target.clone()
        before = [t.detach().clone() for t in captured.state()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                captured.take(self.inputs, self.target)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            captured.take(self.inputs, self.target)
        with torch.no_grad():
            for t, old in zip(captured.state(), before, strict=True):
                t.copy_(old)

    def replay(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        for mine, given in zip((*self.inputs, self.target), (*inputs, target), strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()


def refusal(trainer: Trainer) -> str | None:
    """Why a trainer's steps cannot be recorded, or None."""
    if trainer.device.type != "cuda":
        return f"that needs a GPU, not {trainer.device.type}"
    if trainer.world.size > 1:
        return "this run has several processes"
    if trainer.settings.norm == "batch":
        return "batch-norm statistics are taken from each batch"
    for name, entry in trainer.plan.items():
        if entry.trained and not same_for_all(entry.method):
            return f"what {entry.method} does in {name} depends on the data"
    return None


def same_for_all(method: Method) -> bool:
    """Whether a method does the same for every batch: no ranks from the data, no state."""
    inner = getattr(method, "inner", method)
    return not method.stateful and getattr(inner, "energy", None) is None


def _momentum(optimizer: torch.optim.SGD, p: Tensor) -> Tensor:
    """The optimizer's own buffer; zero before the first step, which then starts as it would."""
    state = optimizer.state[p]
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(p)
    return state["momentum_buffer"]

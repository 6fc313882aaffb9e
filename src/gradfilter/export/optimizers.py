"""The update of an optimizer as plain arithmetic on tensors, the same as torch.optim's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Sgd:
    """torch.optim.SGD: momentum and weight decay, both 0 by default."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    name = "sgd"

    @property
    def keeps(self) -> tuple[str, ...]:
        """What it remembers of every parameter."""
        return ("momentum",) if self.momentum else ()

    def start(self, parameters: State) -> State:
        """The state before the first step, by the names of the graph's inputs."""
        return _zeros(self.keeps, parameters)

    def shared(self, state: State) -> State:
        """What all parameters have in common, of the step that is being taken."""
        return {}

    def update(self, p: Tensor, g: Tensor, rate: Tensor, state: State, _) -> tuple[Tensor, State]:
        """The parameter and its own state after a step; g has the state's shape."""
        if self.weight_decay:
            g = g + self.weight_decay * p.view_as(g)
        if not self.momentum:
            return p - rate * g.view_as(p), {}
        buffer = self.momentum * state["momentum"] + g
        step = g + self.momentum * buffer if self.nesterov else buffer
        return p - rate * step.view_as(p), {"momentum": buffer}


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    name = "adamw"
    keeps = ("mean", "square")

    def start(self, parameters: State) -> State:
        dtype = next(iter(parameters.values())).dtype
        return {"step": torch.zeros((), dtype=dtype)} | _zeros(self.keeps, parameters)

    def shared(self, state: State) -> State:
        step = state["step"] + 1
        like = torch.full_like(step, 1.0)
        return {
            "step": step,
            "bias1": 1 - torch.pow(like * self.beta1, step),
            "bias2": torch.sqrt(1 - torch.pow(like * self.beta2, step)),
        }

    def update(self, p: Tensor, g: Tensor, rate: Tensor, state: State, shared) -> tuple:
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * g
        square = self.beta2 * state["square"] + (1 - self.beta2) * (g * g)
        size = rate / shared["bias1"]
        step = size * (mean / (torch.sqrt(square) / shared["bias2"] + self.eps))
        decayed = p * (1 - rate * self.weight_decay) if self.weight_decay else p
        return decayed - step.view_as(p), {"mean": mean, "square": square}


Optimizer = Sgd | AdamW


def _zeros(keeps: tuple[str, ...], parameters: State) -> State:
    return {f"{k}.{name}": torch.zeros_like(p) for k in keeps for name, p in parameters.items()}


@dataclass(frozen=True)
class Own:
    """What a parameter has for itself: its share of the learning rate, and its weight decay."""

    share: float = 1.0
    weight_decay: float = 0.0


def understood(
    optimizer: torch.optim.Optimizer | Optimizer | None, trained: dict[str, Tensor]
) -> tuple[Optimizer, dict[str, Own]]:
    """The optimizer whose update is written down; refuses what that would change.

    With it what each parameter has for itself, of its group. `trained` are the parameters that
    require a gradient; frozen ones that the optimizer holds too have no part in anything.
    """
    if optimizer is None or isinstance(optimizer, Optimizer):
        found = optimizer or Sgd()
        return found, dict.fromkeys(trained, Own(weight_decay=found.weight_decay))
    kinds = {torch.optim.SGD: _sgd, torch.optim.AdamW: _adamw}
    if type(optimizer) not in kinds:
        kind = type(optimizer).__name__
        raise ValueError(f"export: the optimizer must be torch.optim.SGD or AdamW, not {kind}")
    read = kinds[type(optimizer)]
    groups = [g for g in optimizer.param_groups if any(p.requires_grad for p in g["params"])]
    _check_parameters([p for g in groups for p in g["params"] if p.requires_grad], trained)
    found = [read(group) for group in groups]
    if len({replace(f, weight_decay=0.0) for f in found}) > 1:
        raise ValueError(
            "export: all groups of the optimizer must have the same settings but for the rate and "
            "the weight decay"
        )
    highest = max(float(group["lr"]) for group in groups)
    own = {
        p: Own(float(g["lr"]) / highest if highest else 1.0, f.weight_decay)
        for g, f in zip(groups, found, strict=True)
        for p in g["params"]
    }
    return found[0], {name: own[p] for name, p in trained.items()}


def _check_parameters(held: list[Tensor], trained: dict[str, Tensor]) -> None:
    """Refuse an optimizer that would train something else than the exported step."""
    own, found = set(trained.values()), set(held)
    if not found <= own:
        raise ValueError(
            "export: the optimizer has parameters that are not the model's; "
            "make it from the parameters of the model that is exported"
        )
    missing = [name for name, p in trained.items() if p not in found]
    if missing:
        raise ValueError(
            f"export: the optimizer does not train {missing[0]!r}, which requires a gradient; "
            "freeze it (requires_grad_(False)), or give it to the optimizer"
        )


def _sgd(group: dict) -> Sgd:
    if group["dampening"] or group["maximize"]:
        raise ValueError("export: SGD with dampening or maximize is not supported")
    return Sgd(group["momentum"], group["weight_decay"], group["nesterov"])


def _adamw(group: dict) -> AdamW:
    if group["amsgrad"] or group["maximize"]:
        raise ValueError("export: AdamW with amsgrad or maximize is not supported")
    return AdamW(*group["betas"], group["eps"], group["weight_decay"])

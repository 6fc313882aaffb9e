"""One training step as a function of tensors: forward, loss, backward, clipping, update."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradfilter.export.optimizers import Optimizer, Own, State

SMALL = 4096  # elements of a parameter that is updated together with others; larger ones are rows
JOINT = "joint"  # in the names of what the optimizer remembers of those
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class TrainingStep:
    """Parameters, state, rate, images and targets in; parameters, state, loss and gradients out.

    `parameters` and `state` name what the first tensors are, shaped as `shaped` and `remembered`
    have them. The model runs in the mode it is in. `groups` are the parameters that are updated at
    once, by the name that their state has.
    """

    model: nn.Module
    parameters: tuple[str, ...]
    state: tuple[str, ...]
    groups: dict[str, list[str]]
    optimizer: Optimizer
    own: dict[str, Own]  # by parameter
    clip: float | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(self.parameters)
        old = dict(zip(self.parameters, tensors[:count], strict=True))
        state = dict(zip(self.state, tensors[count:-3], strict=True))
        rate, images, target = tensors[-3:]
        loss, grads = self._gradients(old, images, target)
        if self.clip is not None:
            grads = clipped(grads, self.clip)
        new, new_state = self._updated(old, grads, rate, state)
        return (
            *(new[name] for name in self.parameters),
            *(new_state[name] for name in self.state),
            loss,
            *grads.values(),
        )

    def _updated(self, old: State, grads: State, rate: Tensor, state: State) -> tuple[State, State]:
        """Parameters and state after the step."""
        shared = self.optimizer.shared(state)
        new, new_state = {}, {k: v for k, v in shared.items() if k in state}
        for group, names in self.groups.items():
            of = self.own[names[0]]
            like = [old[name] for name in names]
            p, g = _joined(like), _joined([grads[name] for name in names])
            own = {k: state[f"{k}.{group}"] for k in self.optimizer.keeps}
            g = g.reshape(next(iter(own.values()), p).shape)
            own_rate = rate if of.share == 1 else rate * of.share
            optimizer = replace(self.optimizer, weight_decay=of.weight_decay)
            p, after = optimizer.update(p, g, own_rate, own, shared)
            new |= dict(zip(names, _taken_apart(p, like), strict=True))
            new_state |= {f"{k}.{group}": v for k, v in after.items()}
        return new, new_state

    def _gradients(self, old: State, images: Tensor, target: Tensor) -> tuple[Tensor, State]:
        own = dict(self.model.named_parameters())
        leaves = {n: p.detach().view(own[n].shape).requires_grad_() for n, p in old.items()}
        output = functional_call(self.model, leaves, (images,))
        loss = cross_entropy(scores_of(output), target)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        missing = [name for name, g in zip(leaves, grads, strict=True) if g is None]
        if missing:
            raise ValueError(f"export: no gradient reaches the parameter {missing[0]!r}; freeze it")
        return loss.detach(), dict(zip(leaves, grads, strict=True))


def together(parameters: State, own: dict[str, Own]) -> dict[str, list[str]]:
    """The names of what is updated at once: small parameters of one rate and decay, as a row."""
    groups = {name: [name] for name, p in parameters.items() if as_row(p)}
    small: dict[Own, list[str]] = {}
    for name, p in parameters.items():
        if not as_row(p):
            small.setdefault(own[name], []).append(name)
    for i, names in enumerate(small.values()):
        joint = f"{JOINT}.{i}"
        while joint in parameters:  # a parameter may have any name
            joint += "_"
        groups[names[0] if len(names) == 1 else joint] = names
    return groups


def as_row(p: Tensor) -> bool:
    """Whether the step has a parameter as a row, see `products.by_rows`."""
    return p.numel() > SMALL


def shaped(parameters: State) -> State:
    """Parameters as the step has them."""
    return {n: p.reshape(1, -1) if as_row(p) else p for n, p in parameters.items()}


def of_products(parameters: State, groups: dict[str, list[str]]) -> set[str]:
    """The groups of one parameter whose gradient is a matrix product: of Linear and 1x1 layers."""
    alone = {group: parameters[names[0]] for group, names in groups.items() if len(names) == 1}
    return {n for n, p in alone.items() if p.ndim == 2 or tuple(p.shape[2:]) == (1, 1)}


def remembered(parameters: State, groups: dict[str, list[str]], matrices: set[str]) -> State:
    """Zeros for each group, in the shape in which the optimizer's memory of it is kept.

    A matrix can have the product that is its gradient added onto it, everything else is a row.
    """
    found = {}
    for group, names in groups.items():
        p = parameters[names[0]]
        if group in matrices:
            found[group] = torch.zeros_like(p.flatten(1))
        elif len(names) > 1 or as_row(p):
            found[group] = p.new_zeros(1, sum(parameters[name].numel() for name in names))
        else:
            found[group] = torch.zeros_like(p)
    return found


def cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of scores [N, C] or maps [N, C, h, w], which are enlarged to the target.

    A label that is no class has no part in it. Written with a comparison, not an index, so that
    the graph has nothing that depends on the runtime's rules for bad indices.
    """
    if target.ndim == 3:
        scores = enlarged(scores, target.shape[-2:])
    classes = torch.arange(scores.shape[1]).reshape(-1, *(1,) * (target.ndim - 1))
    chosen = (target[:, None] == classes).to(scores.dtype)
    terms = (F.log_softmax(scores, 1) * chosen).sum(1)
    while terms.ndim:  # axis by axis: ONNX Runtime may add up one number after the other
        terms = terms.sum(-1)
    return -terms / chosen.sum().clamp(min=1)


def enlarged(scores: Tensor, size) -> Tensor:
    """Maps of scores at the resolution of a mask."""
    if tuple(scores.shape[-2:]) == tuple(size):
        return scores
    return F.interpolate(scores, tuple(size), mode="bilinear", align_corners=False)


def clipped(grads: State, limit: float) -> State:
    """Gradients scaled down to a common norm of at most `limit`."""
    norm = torch.sqrt(torch.stack([(g * g).sum() for g in grads.values()]).sum())
    factor = (limit / (norm + CLIP_EPS)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}


def scores_of(output) -> Tensor:
    """The scores that a network gives, where it gives more than one thing."""
    if isinstance(output, dict) and isinstance(output.get("out"), Tensor):  # torchvision's heads
        return output["out"]
    if not isinstance(output, Tensor):
        raise ValueError(f"export: the model must give one tensor, not {type(output).__name__}")
    return output


def _joined(tensors: list[Tensor]) -> Tensor:
    """Several tensors as one row."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([t.flatten() for t in tensors]).view(1, -1)


def _taken_apart(row: Tensor, like: list[Tensor]) -> list[Tensor]:
    if len(like) == 1:
        return [row]
    parts = row.flatten().split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]

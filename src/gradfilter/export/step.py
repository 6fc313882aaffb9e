"""One training step as a function of tensors: forward, loss, backward, clipping, update."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradfilter.export.optimizers import Optimizer, State

SMALL = 4096  # elements of a parameter that is updated together with others
CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class TrainingStep:
    """Parameters, state, rate, images and targets in; parameters, state, loss and norm out.

    `parameters` and `state` name what the first tensors are. The model runs in the mode it is in.
    """

    model: nn.Module
    parameters: tuple[str, ...]
    state: tuple[str, ...]
    optimizer: Optimizer
    clip: float | None = None
    shares: dict[str, float] = field(default_factory=dict)  # of the rate, by parameter; 1 else

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
        """Parameters and state after the step; small ones of one rate all at once, as a vector."""
        shared = self.optimizer.shared(state)
        new, new_state = {}, {k: v for k, v in shared.items() if k in state}
        for names in self._together(old):
            share = self.shares.get(names[0], 1.0)
            own = {k: _joined([state[f"{k}.{n}"] for n in names]) for k in self.optimizer.keeps}
            vectors = _joined([old[n] for n in names]), _joined([grads[n] for n in names])
            own_rate = rate if share == 1 else rate * share
            joint, after = self.optimizer.update(*vectors, own_rate, own, shared)
            like = [old[name] for name in names]
            new |= dict(zip(names, _taken_apart(joint, like), strict=True))
            for k, v in after.items():
                parts = zip(names, _taken_apart(v, like), strict=True)
                new_state |= {f"{k}.{name}": part for name, part in parts}
        return new, new_state

    def _together(self, old: State) -> list[list[str]]:
        """The names of what is updated at once."""
        large = [[name] for name, p in old.items() if p.numel() > SMALL]
        small: dict[float, list[str]] = {}
        for name, p in old.items():
            if p.numel() <= SMALL:
                small.setdefault(self.shares.get(name, 1.0), []).append(name)
        return [*large, *small.values()]

    def _gradients(self, old: State, images: Tensor, target: Tensor) -> tuple[Tensor, State]:
        leaves = {name: p.detach().requires_grad_() for name, p in old.items()}
        output = functional_call(self.model, leaves, (images,))
        loss = cross_entropy(scores_of(output), target)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        missing = [name for name, g in zip(leaves, grads, strict=True) if g is None]
        if missing:
            raise ValueError(f"export: no gradient reaches the parameter {missing[0]!r}; freeze it")
        return loss.detach(), dict(zip(leaves, grads, strict=True))


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
    return tensors[0] if len(tensors) == 1 else torch.cat([t.flatten() for t in tensors])


def _taken_apart(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    if len(like) == 1:
        return [vector]
    parts = vector.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]

"""What a measurement runs on: checked input, copies of the model, a loss to differentiate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfilter.convert import Engined, revert
from gradfilter.order import call

Target = Tensor | Callable[[object], Tensor] | None
IGNORED = -100  # a target that does not count, as in torch


def exact_copy(model: nn.Module) -> nn.Module:
    """A plain copy that trains the same parameters, its modules in the same modes."""
    plain = copy.deepcopy(model)
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    modes = {name: m.training for name, m in plain.named_modules()}
    revert(plain)
    for name, p in plain.named_parameters():
        p.requires_grad_(name in trained)
    for name, m in plain.named_modules():
        m.training = modes[name]
    return _without_gradients(plain)


def planned_copy(model: nn.Module) -> nn.Module:
    """A copy that runs as the model does."""
    return _without_gradients(copy.deepcopy(model))


def layer_copy(model: nn.Module) -> nn.Module:
    """A copy that runs every layer by itself, no engine."""
    copied = planned_copy(model)
    for module in list(copied.modules()):
        if isinstance(module, Engined):
            module.__dict__.pop("gf_engine", None)
            module.__class__ = module.gf_original
    return copied


def _without_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = None
    return model


def has_engine(model: nn.Module) -> bool:
    return any(isinstance(m, Engined) for m in model.modules())


def loss_of(output, target: Target) -> Tensor:
    """The loss of an output.

    `target` is a function of the output, or a tensor for the cross-entropy (classes, masks to
    whose size the output is enlarged, or shares of each class), or None for the mean square.
    """
    loss = _loss(output, target)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = shape(loss) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a tensor of one number, got {got}")
    if not loss.requires_grad:
        raise ValueError("the loss depends on no trained parameter")
    return loss


def _loss(output, target: Target):
    if callable(target) and not isinstance(target, Tensor):
        return target(output)
    if target is None:
        return sum(t.float().square().mean() for t in tensors(output))
    (scores,) = tensors(output)[:1] or (None,)
    if scores is None:
        raise ValueError("the model's output has no tensor to take a loss of")
    if scores.ndim == 4 and target.ndim == 3 and scores.shape[-2:] != target.shape[-2:]:
        size = tuple(target.shape[-2:])
        scores = F.interpolate(scores, size, mode="bilinear", align_corners=False)
    _check_shape(target, scores)
    if not target.is_floating_point():
        _check_classes(target, scores.shape[1])
        target = target.long()
    return F.cross_entropy(scores.float(), target, ignore_index=IGNORED)


def _check_shape(target: Tensor, scores: Tensor) -> None:
    if scores.ndim < 2:
        told = f"an output of {shape(scores)} has no scores of classes"
        raise ValueError(f"{told}: give the loss as a function of the output")
    fits = [*scores.shape] if target.is_floating_point() else [len(scores), *scores.shape[2:]]
    if [*target.shape] != fits:
        told = f"for an output of {shape(scores)} the target must be {fits}"
        raise ValueError(f"{told}, got {shape(target)}")


def _check_classes(target: Tensor, count: int) -> None:
    counted = target[target != IGNORED]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < count:
        raise ValueError(
            f"the target has classes {int(counted.min())}..{int(counted.max())}, "
            f"the model has 0..{count - 1}"
        )


def tensors(tree) -> list[Tensor]:
    """The floating-point tensors of an output or example, at any depth."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_floating_point() else []
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [t for part in tree for t in tensors(part)] if isinstance(tree, list | tuple) else []


def mapped(tree, change: Callable[[Tensor], Tensor]):
    """An example with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(part, change) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [mapped(part, change) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def apart(example, target: Target) -> tuple[object, Target]:
    """Copies of the user's tensors, so that theirs get no gradient and no other values.

    What asks for a gradient goes on doing so. A loss that is a module is copied too, for it may
    have parameters; what another function holds is out of our sight.
    """
    own = mapped(example, lambda x: x.detach().clone().requires_grad_(x.requires_grad))
    if isinstance(target, nn.Module):
        return own, copy.deepcopy(target)
    return own, target.detach() if isinstance(target, Tensor) else target


def check(who: str, model: nn.Module, example, target: Target) -> torch.device:
    """Refuse what cannot be measured, in one line; gives the device of the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}: model must be an nn.Module, got {type(model).__name__}")
    trained = next((p for p in model.parameters() if p.requires_grad), None)
    if trained is None:
        raise ValueError(f"{who}: no parameter of this model is trained")
    if trained.device.type == "meta":
        raise ValueError(f"{who}: a model on the meta device cannot run; see gradfilter.cost")
    for x in tensors(example):
        if x.numel() == 0:
            raise ValueError(f"{who}: the batch is empty: {shape(x)}")
        if not bool(x.isfinite().all()):
            what = "NaN" if bool(x.isnan().any()) else "an infinite value"
            raise ValueError(f"{who}: the batch has {what}")
    if not (target is None or callable(target) or isinstance(target, Tensor)):
        kind = type(target).__name__
        raise TypeError(f"{who}: target must be a tensor or a function of the output, got {kind}")
    first = next(iter(tensors(example)), None)
    counted = isinstance(target, Tensor) and target.ndim and first is not None
    if counted and len(target) != len(first):
        raise ValueError(f"{who}: a batch of {len(first)}, but {len(target)} targets")
    return trained.device


def forward(who: str, model: nn.Module, example):
    """The output of a first forward pass; what the model cannot take is refused in one line."""
    try:
        return call(model, example)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, ValueError, TypeError, IndexError) as error:
        told = " and ".join(shape(x) for x in tensors(example)) or type(example).__name__
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{who}: the model cannot take {told}: {first}") from error


def shape(x: Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"


@contextmanager
def same_chance(device: torch.device) -> Iterator[None]:
    """torch's random numbers go on afterwards as if nothing had been drawn."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield


def wake_head(model: nn.Module) -> bool:
    """Draw an output layer at random that is all 0, as new ones start; whether it was."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    if not layers or bool(layers[-1].weight.any()):
        return False
    layers[-1].reset_parameters()
    return True

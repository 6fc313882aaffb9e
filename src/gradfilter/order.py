"""The order in which a forward pass calls the modules of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # a module's own
Calls = dict[nn.Module, tuple[tuple, Mapping]]  # arguments and keyword arguments


def call(model: nn.Module, example):
    """Run the model on a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


@contextmanager
def contents_kept(model: nn.Module) -> Iterator[None]:
    """Dicts, lists and sets that are attributes of modules have afterwards what they had before."""
    held = [
        (own, own.copy())
        for m in model.modules()
        for name, own in vars(m).items()
        if type(own) in (dict, list, set) and name not in TABLES
    ]
    try:
        yield
    finally:
        for own, before in held:
            own.clear()
            own.extend(before) if isinstance(own, list) else own.update(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: nothing random; flags, buffers and caches are put back."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    for module in modes:
        module.training = False
    try:
        with contents_kept(model):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for b, version, before in buffers:
                if b._version != version:  # a backward pass may still want it as it is
                    b.copy_(before)


def first_calls(model: nn.Module, example) -> Calls:
    """The arguments each module is first called with, in the order of those calls."""
    calls: Calls = {}

    def note(module, args, kwargs):
        calls.setdefault(module, (args, kwargs))

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules()]
    try:
        with torch.no_grad(), evaluating(model):
            call(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def execution_order(model: nn.Module, example) -> dict[nn.Module, int]:
    """Module -> position of its first call."""
    return {module: i for i, module in enumerate(first_calls(model, example))}

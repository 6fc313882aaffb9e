"""A small network before and after conversion: its gradients, and all that must stay as it was."""

import pytest
import torch
from cases import METHODS
from torch import nn

import gradfilter as gf

methods = pytest.mark.parametrize("method", METHODS, ids=repr)
FILTER = gf.GalerkinFilter(patch=2)
PATCH1 = gf.GalerkinFilter(patch=1)  # exact, by way of the converted layer


def batch(n=4, seed=0, dtype=torch.float32):
    return torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def loss_of(model, x=None):
    return model(batch() if x is None else x).square().mean()


def gradients(model, x=None):
    """Parameter gradients of one step, by name; the same rounding noise every time."""
    model.zero_grad()
    torch.manual_seed(0)
    loss_of(model, x).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name in found:
        error = (found[name] - expected[name]).abs().max()
        assert error <= tolerance * (1 + expected[name].abs().max()), name


def portrait(model):
    """Everything that must be the same objects and values after `revert`."""
    modules = {
        name: (
            id(m),
            type(m),
            m.training,
            sorted(m.__dict__),
            [[id(h) for h in hooks.values()] for hooks in (m._forward_hooks, m._backward_hooks)],
            list(m._modules),
        )
        for name, m in model.named_modules()
    }
    tensors = {
        name: (id(t), t.data_ptr(), t.requires_grad, t.dtype, t.device, t.stride())
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    grads = {n: p.grad.data_ptr() for n, p in model.named_parameters() if p.grad is not None}
    return modules, tensors, grads, list(model.state_dict())


def trained(model):
    return [n for n, p in model.named_parameters() if p.requires_grad]


class Backwards(nn.Module):
    """Registers its layers in the reverse of the order it calls them in."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.c = nn.Conv2d(4, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3)
        self.a = nn.Conv2d(3, 4, 3)
        self.spare = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        x = self.c(self.norm(self.b(self.a(x))))
        return self.head(x.mean((-1, -2)))

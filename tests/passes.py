"""Networks whose forward pass does more than call layers."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn


class Two(nn.Module):
    """Two convolutions; how they are called is the test's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.factor, self.calls, self.last = 3.0, 0, None
        self.register_buffer("std", torch.full((8,), 2.0))
        self.scale = nn.Parameter(torch.rand(8))


class WithoutGradient(Two):
    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
        return self.b(h * self.scale[:, None, None])


class SwitchedOff(Two):
    def forward(self, x):
        torch.set_grad_enabled(False)
        h = self.a(x)
        torch.set_grad_enabled(True)
        return self.b(h * self.scale[:, None, None])


class InAutocast(Two):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        return self.b(h.float() * self.scale[:, None, None])


class Island(Two):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            h = self.a(x)
        return self.b(h * self.scale[:, None, None])


class Drawing(Two):
    def forward(self, x):
        return self.b(self.a(x) * self.scale[:, None, None] + torch.randn(8, 1, 1))


class Skipping(Two):
    def forward(self, x):
        h = self.a(x) * self.scale[:, None, None]
        return self.b(h if random.random() < 0.5 else h * 2)


class SkippingByNumpy(Two):
    def forward(self, x):
        h = self.a(x) * self.scale[:, None, None]
        return self.b(h if np.random.rand() < 0.5 else h * 2)


class Counting(Two):
    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x) * self.scale[:, None, None])


class Remembering(Two):
    def forward(self, x):
        self.last = x.mean()
        return self.b(self.a(x) * self.scale[:, None, None])


class Normalising(Two):
    def forward(self, x):
        return self.b(self.a(x) / (2 * self.std)[:, None, None] * self.scale[:, None, None])


class Averaging(Two):
    def forward(self, x):
        y = self.a(x)
        self.std.mul_(0.5).add_(y.detach().mean((0, 2, 3)) * 0.5)
        return self.b(y * self.scale[:, None, None] * self.std[:, None, None])


class Multiplying(Two):
    def forward(self, x):
        return self.b(self.a(x) * self.scale[:, None, None] * self.factor)


class Caching(Two):
    """Keeps what it has computed in a dict, as timm's attention does."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        key = str(x.device)
        if self.training or key not in self.cache:
            self.cache[key] = self.scale[:, None, None] * 2
        return self.b(self.a(x) * self.cache[key])


class Accumulating(Two):
    def forward(self, x):
        total = torch.zeros(8, 1, 1)
        total.add_(self.scale[:, None, None])
        total += 1
        return self.b(self.a(x) * total)


class NotItsOwn(Two):
    """Computes with a parameter that it has in a list."""

    def __init__(self):
        super().__init__()
        self.held = [self.scale]

    def forward(self, x):
        return self.b(self.a(x) * (self.held[0] * 2)[:, None, None])


KINDS = [
    WithoutGradient, SwitchedOff, InAutocast, Island, Drawing, Skipping, SkippingByNumpy, Counting,
    Remembering, Normalising, Averaging, Multiplying, Caching, Accumulating, NotItsOwn,
]  # fmt: skip

"""A small network to profile, a batch for it, and the kept bytes of a profile."""

import torch
from torch import nn

from gradfilter.profiler import PLAN


def two_convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


def images(n=2, size=8):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def rows(found, name=PLAN):
    return {(r.name, r.kind): r.bytes for r in found.kept[name]}

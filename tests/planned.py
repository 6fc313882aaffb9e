"""Small networks that plans within a budget are made for, and a batch for them."""

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions beside a third one, which runs after them and reads what the first reads."""

    def __init__(self, channels, stride):
        super().__init__()
        wide = channels * stride
        self.one = unit(channels, wide, stride)
        self.two = unit(wide, wide)
        self.beside = nn.Conv2d(channels, wide, 1, stride)

    def forward(self, x):
        return torch.relu(self.two(self.one(x)) + self.beside(x))


def unit(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


def chained(wide=16):
    torch.manual_seed(0)
    body = [unit(3, 8, 2), unit(8, 8), unit(8, wide, 2), unit(wide, 16), unit(16, 32)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 5)]
    return nn.Sequential(*body, *tail)


def branched():
    torch.manual_seed(0)
    return nn.Sequential(
        unit(3, 8, 2), Block(8, 1), Block(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def images(n=4, size=32):
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


TARGET = torch.tensor([0, 1, 2, 3])
# whole training keeps about 1 MB in these networks; the output layer alone takes a few KB
SIZES = ["8KB", "40KB", "100KB", "400KB", "4MB"]

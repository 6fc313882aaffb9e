"""Ordinary backpropagation."""

from __future__ import annotations

from dataclasses import dataclass

from gradfilter.methods.method import Method


@dataclass(frozen=True, repr=False)
class Exact(Method):
    """Exact gradients; keeps x."""

"""Train convolutional networks on small devices: cheaper backward passes, as drop-ins."""

from gradfilter.convert import convert, revert
from gradfilter.cost import cost
from gradfilter.export import export
from gradfilter.fidelity import fidelity
from gradfilter.methods import (
    METHODS,
    Exact,
    GalerkinFilter,
    GradientFilter,
    Hosvd,
    Int8,
    Method,
    SubspaceIteration,
    Svd,
    WalshHadamard,
)
from gradfilter.plan import Plan
from gradfilter.planning.budget import plan
from gradfilter.profiler import profile

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Exact",
    "GalerkinFilter",
    "GradientFilter",
    "Hosvd",
    "Int8",
    "Method",
    "Plan",
    "SubspaceIteration",
    "Svd",
    "WalshHadamard",
    "convert",
    "cost",
    "export",
    "fidelity",
    "plan",
    "profile",
    "revert",
]

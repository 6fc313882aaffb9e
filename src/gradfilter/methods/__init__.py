"""The backward methods, one file each, and the one table of their command-line names."""

from gradfilter.methods.asi import SubspaceIteration
from gradfilter.methods.exact import Exact
from gradfilter.methods.galerkin import GalerkinFilter
from gradfilter.methods.gradient_filter import GradientFilter
from gradfilter.methods.hosvd import Hosvd
from gradfilter.methods.int8 import Int8
from gradfilter.methods.method import Method
from gradfilter.methods.svd import Svd
from gradfilter.methods.walsh_hadamard import WalshHadamard

METHODS: dict[str, type[Method]] = {
    "exact": Exact,
    "gradient-filter": GradientFilter,
    "galerkin": GalerkinFilter,
    "svd": Svd,
    "hosvd": Hosvd,
    "asi": SubspaceIteration,
    "walsh-hadamard": WalshHadamard,
    "int8": Int8,
}

__all__ = ["METHODS", "Method", *(cls.__name__ for cls in METHODS.values())]

"""The backward methods, one file each, and the one table of their command-line names."""

import difflib
from dataclasses import fields

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


def named(name: str, *, bits: int | None = None, **knobs) -> Method:
    """The method of that name with these knobs; with `bits=8` inside Int8."""
    if name not in METHODS:
        near = difflib.get_close_matches(str(name), METHODS, n=1, cutoff=0.4) or METHODS
        raise ValueError(f"no method is called {name!r}; did you mean {', '.join(near)}?")
    has = [f.name for f in fields(METHODS[name]) if f.name not in ("inner", "generator")]
    for knob in knobs:
        if knob not in has:
            raise ValueError(f"{name} has no {knob}; it has {', '.join(has) or 'no options'}")
    if bits not in (None, 8):
        raise ValueError(f"bits must be 8, got {bits!r}")
    method = METHODS[name](**knobs)
    return method if bits is None else Int8(method)


def described(method: Method) -> dict[str, object]:
    """The arguments of `named` that give this method."""
    if isinstance(method, Int8) and method.inner != Exact():
        return described(method.inner) | {"bits": 8}
    name = next((name for name, kind in METHODS.items() if kind is type(method)), None)
    if name is None:
        raise ValueError(f"{type(method).__name__} has no name in METHODS to write it by")
    knobs = {
        f.name: value
        for f in fields(method)
        if f.name not in ("inner", "generator")
        if (value := getattr(method, f.name)) is not None
    }
    return {"method": name, **knobs}

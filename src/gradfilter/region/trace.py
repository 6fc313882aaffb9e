"""From a module to a flat graph of calls, by torch.fx; what cannot be traced says why."""

from __future__ import annotations

import inspect
import sys

from torch import fx, nn

# modules that stay one call; everything else is traced into
LEAVES = (
    nn.Conv2d,
    nn.Linear,
    nn.modules.batchnorm._BatchNorm,
    nn.Dropout,
    nn.Identity,
    nn.MultiheadAttention,
)
# functions of other libraries whose body cannot be traced, or is better known by name
WRAPPED = (
    ("torchvision.models.shufflenetv2", "channel_shuffle"),
    ("torchvision.ops.stochastic_depth", "stochastic_depth"),
)
LEAF_NAMES = {"StochasticDepth", "DropPath"}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        from_torch = type(m).__module__.startswith("torch.nn.modules")
        return (
            isinstance(m, LEAVES)
            or hooked(m)
            or type(m).__name__ in LEAF_NAMES
            or (from_torch and not isinstance(m, nn.Sequential | nn.ModuleList))
            or type(m).__module__.startswith("timm.layers.activations")
        )


def hooked(m: nn.Module) -> bool:
    """Whether a module has hooks, which run only when it is called."""
    return any(hooks_of(m))


def hooks_of(m: nn.Module) -> tuple[dict, ...]:
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


def trace(module: nn.Module, count: int = 1) -> fx.Graph | str:
    """The graph of a module's forward pass of `count` arguments, or why there is none."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    defaults = {p.name: p.default for p in parameters[count:] if p.default is not p.empty}
    functions = tuple(
        getattr(sys.modules[name], function) for name, function in WRAPPED if name in sys.modules
    )
    try:
        return _Tracer(autowrap_functions=functions).trace(module, defaults)
    except Exception as error:  # fx raises whatever the traced code raises on a proxy
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"not traceable: {first}"

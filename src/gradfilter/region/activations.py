"""Which of the kernels' activations a module or a function is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gradfilter.kernels.eager import ACTIVATIONS
from gradfilter.region.step import Act

CLASSES: dict[str, str] = {
    "ReLU": "relu",
    "ReLU6": "relu6",
    "Hardswish": "hardswish",
    "HardSwish": "hardswish",
    "Hardsigmoid": "hardsigmoid",
    "HardSigmoid": "hardsigmoid",
    "SiLU": "silu",
    "Swish": "silu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "LeakyReLU": "leaky_relu",
    "ELU": "elu",
    "Mish": "mish",
}
FUNCTIONS: dict[object, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.relu6: "relu6",
    F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid",
    F.silu: "silu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.mish: "mish",
    "relu": "relu",
    "relu_": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
PARAMETER = {"LeakyReLU": "negative_slope", "ELU": "alpha"}


def activation_of(module: nn.Module) -> Act | None:
    """The activation a module is, or None."""
    name = type(module).__name__
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return ("relu6", 0.0) if (module.min_val, module.max_val) == (0, 6) else None
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return ("gelu_tanh", 0.0)
    if name not in CLASSES:
        return None
    known = CLASSES[name]
    if name not in PARAMETER:
        return known, ACTIVATIONS[known].parameter
    return known, float(getattr(module, PARAMETER[name]))

"""Weights from a file into a network: read as plain tensors, fitted by name and shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

State = dict[str, Tensor]

CLASSIFIERS = ("classifier.", "fc.", "head.", "last_linear.")  # what an encoder has no use for
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.", "aux_classifier.")  # heads only for training
UNWRAP = ("model", "state_dict")
HALVES = (127.5, 127.5, 127.5), (127.5, 127.5, 127.5)  # of MobileNet as TensorFlow trains it


def read(path: str | Path) -> dict:
    """The content of a .safetensors file, or of a torch.save file; never runs code from it."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no weights file {path}")
    try:
        content = _read(path)
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # what a file that is something else, or cut short, gives rise to
        raise ValueError(f"{path} does not read as plain tensors: {_why(error)}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict")
    return dict(content)


def _read(path: Path):
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    with numpy_arrays():
        return torch.load(path, map_location="cpu", weights_only=True)


def _why(error: Exception) -> str:
    """In short; torch's own words advise to run the file's code."""
    foreign = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if foreign:
        return f"it holds a {foreign[1]}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is of another kind, or damaged"


@contextmanager
def numpy_arrays():
    """Let `torch.load(weights_only=True)` also read arrays of numbers, for a while."""
    import numpy as np

    rebuild = np.empty(0).__reduce__()[0]
    places = ("numpy.core.multiarray", "numpy._core.multiarray")
    names = [(rebuild, f"{place}._reconstruct") for place in places]
    dtypes = {type(np.dtype(t)) for t in ("int8", "int32", "int64", "float32", "float64")}
    with torch.serialization.safe_globals([*names, np.ndarray, np.dtype, *dtypes]):
        yield


def state_dict(content: Mapping, path: str | Path) -> State:
    """The tensors of a state dict, out of what trainers wrap around it."""
    for key in UNWRAP:
        if isinstance(content.get(key), Mapping):
            content = content[key]
            break
    state = {str(key).removeprefix("module."): value for key, value in content.items()}
    strange = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if strange or not state:
        what = f"{strange[0]!r} is no tensor" if strange else "it is empty"
        raise ValueError(f"{path} holds no state dict: {what}")
    return state


def input_of(content: Mapping, path: str | Path) -> tuple[tuple, tuple] | None:
    """Mean and deviation of the input, in bytes, where a file or its name tells them."""
    found = [content.get(key) for key in ("mean", "std")]
    if all(isinstance(v, list | tuple) and len(v) == 3 for v in found):
        mean, std = (tuple(map(float, v)) for v in found)
        return mean, std
    return HALVES if "tfhub" in Path(path).name else None


def fit(
    model: nn.Module, state: State, num_classes: int, about: str, encoder: str | None = None
) -> set[str]:
    """Load a state dict whose classifier may be of another number of classes.

    Such a classifier stays as it is, new; returns the names of all that does. Anything else that
    does not fit is refused, by name. `encoder` names the part of a segmentation network that the
    state dict of a classification network is loaded into.
    """
    state = {k: v for k, v in state.items() if not k.startswith(AUXILIARY)}
    beside: set[str] = set()  # the encoder
    if encoder is not None and not any(k.startswith(f"{encoder}.") for k in state):
        beside = {k for k in model.state_dict() if not k.startswith(f"{encoder}.")}
        model = getattr(model, encoder)
        state = _trunk(state, model)
    own = model.state_dict()
    other = [k for k, v in state.items() if k in own and v.shape != own[k].shape]
    fresh = [
        k
        for k in other
        if own[k].shape[:1] == (num_classes,) and own[k].shape[1:] == state[k].shape[1:]
    ]
    problems = {
        "missing": [k for k in own if k not in state and not k.endswith("num_batches_tracked")],
        "unknown": [k for k in state if k not in own],
        "of another shape": [k for k in other if k not in fresh],
    }
    if any(problems.values()):
        told = "; ".join(f"{what} {_some(names)}" for what, names in problems.items() if names)
        raise ValueError(f"{about} do not fit: {told}")
    kept = {k: v for k, v in state.items() if k not in fresh}
    nn.Module.load_state_dict(model, kept, strict=False)  # some encoders have one of their own
    return {*fresh, *beside}


def _trunk(state: State, encoder: nn.Module) -> State:
    """A classification network's state dict without its classifier, by the encoder's names."""
    own = encoder.state_dict()
    deeper = "" if any(k.startswith("features.") for k in own) else "features."
    kept = {k: v for k, v in state.items() if not k.startswith(CLASSIFIERS) or k in own}
    return {k.removeprefix(deeper): v for k, v in kept.items()}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

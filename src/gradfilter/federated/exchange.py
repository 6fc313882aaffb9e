"""What travels between the server and a client: the tensors that training changes, nothing else.

Frozen parameters and fixed statistics stay where they are; both sides must have the same ones, of
which `Exchange.kept` is the proof. Integers (a batch norm's count of batches) never travel. NumPy
has no bfloat16: such a tensor travels as its bits, and is averaged in float32.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

BFLOAT16 = "bfloat16"


class BadArrays(ValueError):
    """Arrays that cannot be those of our network after training."""


class Exchange:
    """The tensors of one network that travel, by name; they stay the network's own."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.tensors = travelling(model)

    def record(self) -> ArrayRecord:
        """The tensors as they are now, to be sent."""
        return ArrayRecord({name: to_array(t) for name, t in self.tensors.items()})

    def load(self, record: ArrayRecord) -> None:
        """Put what has arrived into the network; refuses what does not fit."""
        self.check(record)
        with torch.no_grad():
            for name, t in self.tensors.items():
                t.copy_(to_tensor(record[name]))

    def check(self, record: ArrayRecord) -> None:
        """Refuse other names, kinds and shapes than ours, and what is no number."""
        missing = [name for name in self.tensors if name not in record]
        unknown = [name for name in record if name not in self.tensors]
        if missing or unknown:
            told = [f"{kind} {_some(n)}" for kind, n in
                    (("missing", missing), ("unknown", unknown)) if n]  # fmt: skip
            raise BadArrays(f"other tensors than are trained: {'; '.join(told)}")
        for name, t in self.tensors.items():
            _check(name, record[name], t)

    def wide(self, record: ArrayRecord) -> ArrayRecord:
        """Arrays that have arrived, as the server averages them: in float32 or wider."""
        return ArrayRecord({name: widened(array) for name, array in record.items()})

    def narrow(self, record: ArrayRecord) -> ArrayRecord:
        """The server's arrays as they travel: of the network's own kinds."""
        return ArrayRecord(
            {
                name: to_array(to_tensor(record[name]).to(t.dtype))
                for name, t in self.tensors.items()
            }
        )

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of the whole network, had it travelled."""
        return sum(len(to_array(t).data) for t in self.model.state_dict().values())

    def kept(self) -> str:
        """A hash of every number of the network that does not travel."""
        digest = hashlib.sha256()
        for name, t in self.model.state_dict().items():
            if name not in self.tensors and t.is_floating_point():
                digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
                bits = t.detach().cpu().contiguous().flatten().view(torch.uint8)
                digest.update(bits.numpy())
        return digest.hexdigest()


def travelling(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that are trained, and batch-norm statistics that training changes."""
    found: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training:
            buffers = module.named_buffers(prefix, recurse=False)
            found |= {name: b for name, b in buffers if b.is_floating_point()}
    if not found:
        raise ValueError("no layer is trained: there is nothing to exchange")
    return found


def count_bytes(record: ArrayRecord) -> int:
    """Bytes of the arrays as they are sent, each with its short header."""
    return sum(len(array.data) for array in record.values())


def to_array(t: Tensor) -> Array:
    t = t.detach().cpu().contiguous()
    if t.dtype != torch.bfloat16:
        return Array(t.numpy())
    bits = Array(t.view(torch.int16).numpy())
    return Array(BFLOAT16, tuple(t.shape), bits.stype, bits.data)


def to_tensor(array: Array) -> Tensor:
    values = torch.from_numpy(array.numpy())
    return values.view(torch.bfloat16) if array.dtype == BFLOAT16 else values


def widened(array: Array) -> Array:
    t = to_tensor(array)
    return to_array(t.float()) if t.element_size() < 4 else array


def _check(name: str, array: Array, expected: Tensor) -> None:
    try:
        found = to_tensor(array)
    except (ValueError, TypeError, OSError, EOFError, RuntimeError) as error:
        raise BadArrays(f"{name} cannot be read: {error}") from error
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise BadArrays(f"{name} is {_kind(found)}, not {_kind(expected)}")
    if not found.isfinite().all():
        raise BadArrays(f"{name} has {int((~found.isfinite()).sum())} values that are no numbers")


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""What travels between the server and a client: the tensors that training changes, nothing else.

Frozen parameters and fixed statistics stay where they are; both sides must have the same ones, of
which `Exchange.kept` is the proof. Integers (a batch norm's count of batches) never travel. The
tensors of one dtype travel end to end as one array, since Flower spends several requests on each;
the layout that comes with them names every tensor. NumPy has no bfloat16: such numbers travel as
their bits, and are averaged in float32.
"""

from __future__ import annotations

import hashlib
import json

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
        self.layout = json.dumps([[n, *_kind(t)] for n, t in self.tensors.items()])
        self.groups: dict[str, dict[str, Tensor]] = {}
        for name, t in self.tensors.items():
            self.groups.setdefault(_kind(t)[0], {})[name] = t

    def record(self) -> ArrayRecord:
        """The tensors as they are now, to be sent."""
        return ArrayRecord(
            {
                kind: to_array(torch.cat([t.detach().flatten() for t in group.values()]))
                for kind, group in self.groups.items()
            }
        )

    def load(self, record: ArrayRecord) -> None:
        """Put arrays that were checked, or averaged from such, into the network."""
        with torch.no_grad():
            for name, values in self.split(record).items():
                self.tensors[name].copy_(values)

    def split(self, record: ArrayRecord) -> dict[str, Tensor]:
        """Every tensor by its name again."""
        found = {}
        for kind, group in self.groups.items():
            pieces = to_tensor(record[kind]).split([t.numel() for t in group.values()])
            for (name, t), piece in zip(group.items(), pieces, strict=True):
                found[name] = piece.view(t.shape)
        return found

    def check(self, record: ArrayRecord, layout: str) -> None:
        """Refuse other names, kinds and shapes than ours, and what is no number."""
        if layout != self.layout:
            raise BadArrays(f"other tensors than are trained: {self._difference(layout)}")
        if set(record) != set(self.groups):
            raise BadArrays(f"arrays {sorted(record)} instead of {sorted(self.groups)}")
        for kind, group in self.groups.items():
            _check(kind, record[kind], sum(t.numel() for t in group.values()))
        for name, values in self.split(record).items():
            if bad := int((~values.isfinite()).sum()):
                raise BadArrays(f"{name} has {bad} values that are no numbers")

    def _difference(self, layout: str) -> str:
        """Which tensors a layout has less, more or otherwise."""
        try:
            theirs = {str(name): (kind, shape) for name, kind, shape in json.loads(layout)}
        except (ValueError, TypeError, RecursionError):
            return "they are not named"
        ours = {n: tuple(_kind(t)) for n, t in self.tensors.items()}
        told = {
            "missing": [n for n in ours if n not in theirs],
            "unknown": [n for n in theirs if n not in ours],
            "of another shape or kind": [n for n in ours if theirs.get(n, ours[n]) != ours[n]],
        }
        return "; ".join(f"{what} {some(n)}" for what, n in told.items() if n) or "another order"

    def narrow(self, record: ArrayRecord) -> ArrayRecord:
        """The server's arrays as they travel: of the network's own kinds."""
        kinds = {kind: next(iter(group.values())).dtype for kind, group in self.groups.items()}
        return ArrayRecord({k: to_array(to_tensor(record[k]).to(d)) for k, d in kinds.items()})

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole network, had it travelled."""
        return sum(t.numel() * t.element_size() for t in self.model.state_dict().values())

    def kept(self) -> str:
        """A hash of every number of the network that does not travel."""
        digest = hashlib.sha256()
        for name, t in self.model.state_dict().items():
            if name not in self.tensors and t.is_floating_point():
                digest.update(f"{name} {_kind(t)}".encode())
                digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
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


def wide(record: ArrayRecord) -> ArrayRecord:
    """Arrays that have arrived, as the server averages them: in float32 or wider."""
    found = {kind: to_tensor(array) for kind, array in record.items()}
    return ArrayRecord(
        {k: to_array(t.float()) if t.element_size() < 4 else record[k] for k, t in found.items()}
    )


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


def _check(kind: str, array: Array, count: int) -> None:
    """Refuse an array that is not so many numbers of that kind in a row."""
    try:
        found = to_tensor(array)
    except Exception as error:  # any bytes may come, and a reader may fail in any way on them
        raise BadArrays(f"the array {kind} cannot be read: {error}") from error
    if _kind(found) != [kind, [count]]:
        have = " ".join(map(str, _kind(found)))
        raise BadArrays(f"an array should be {kind} [{count}], and is {have}")


def _kind(t: Tensor) -> list:
    return [str(t.dtype).removeprefix("torch."), list(t.shape)]


def some(names: list[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

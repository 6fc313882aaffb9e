"""Joules from the machine's own counters: RAPL for a CPU, NVML for an NVIDIA GPU.

A counter is of the whole package or board, and counts what else runs there too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

POWERCAP = Path("/sys/class/powercap")
Counter = Callable[[], float]  # joules so far


def counter(device: torch.device, powercap: Path = POWERCAP) -> tuple[Counter | None, str]:
    """A counter of the energy that this device uses, and what it is; or None, and why."""
    if device.type == "cpu":
        return rapl(powercap)
    if device.type == "cuda":
        return nvml(device)
    return None, f"no energy: we know no counter for {device.type}"


def rapl(powercap: Path = POWERCAP) -> tuple[Counter | None, str]:
    """The sum of all CPU packages."""
    packages = sorted(p for p in powercap.glob("intel-rapl:*") if p.name.count(":") == 1)
    if not packages:
        return None, f"no energy: this machine has no RAPL counters ({powercap})"
    try:
        counts = [_Package(p) for p in packages]
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        return None, f"no energy: the RAPL counters cannot be read ({first})"
    told = f"energy: RAPL, {len(counts)} CPU package(s), with all that runs on them"
    return lambda: sum(count() for count in counts), told


class _Package:
    """One counter; it starts again from 0 now and then, and must be read in between."""

    def __init__(self, folder: Path):
        self.file = folder / "energy_uj"
        self.range = int((folder / "max_energy_range_uj").read_text())
        self.before, self.total = int(self.file.read_text()), 0

    def __call__(self) -> float:
        now = int(self.file.read_text())
        self.total += now - self.before if now >= self.before else now + self.range - self.before
        self.before = now
        return self.total / 1e6


def nvml(device: torch.device) -> tuple[Counter | None, str]:
    """The GPU's own counter; boards before Volta have none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, "no energy: libnvidia-ml.so.1 (NVML) is not here"
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    return nvml_counter(library, f"GPU-{uuid}")


def nvml_counter(library, uuid: str) -> tuple[Counter | None, str]:
    """The counter of the GPU of that UUID."""
    handle = ctypes.c_void_p()
    for failed in (
        library.nvmlInit_v2(),
        library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)),
    ):
        if failed:
            return None, f"no energy: NVML answers with error {failed} for {uuid}"
    millijoules = ctypes.c_ulonglong()

    def read() -> float:
        failed = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        if failed:
            raise OSError(f"NVML error {failed}")
        return millijoules.value / 1e3

    try:
        read()
    except OSError as error:
        return None, f"no energy: this GPU has no counter ({error})"
    return read, "energy: NVML, the whole GPU board"

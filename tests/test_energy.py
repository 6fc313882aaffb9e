"""Energy counters made up by hand, and machines that have none."""

import pytest
import torch
from profiled import images, two_convolutions

import gradfilter as gf
from gradfilter import energy, stopwatch

pytestmark = pytest.mark.usefixtures("quick_stopwatch")


def powercap(folder, now, most=1000):
    for name in ("intel-rapl:0", "intel-rapl:0:0"):  # a package and a part of it
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "energy_uj").write_text(f"{now}\n")
        (folder / name / "max_energy_range_uj").write_text(f"{most}\n")


def test_rapl_counts_on_when_its_counter_starts_again(tmp_path):
    powercap(tmp_path, 900)
    read, told = energy.counter(torch.device("cpu"), tmp_path)
    assert read() == 0 and "1 CPU package" in told
    powercap(tmp_path, 950)
    assert read() == pytest.approx(50e-6)
    powercap(tmp_path, 30)
    assert read() == pytest.approx(130e-6)


def test_a_machine_without_counters_says_so(tmp_path):
    read, told = energy.counter(torch.device("cpu"), tmp_path)
    assert read is None and told == f"no energy: this machine has no RAPL counters ({tmp_path})"
    (tmp_path / "intel-rapl:0").mkdir()
    read, told = energy.counter(torch.device("cpu"), tmp_path)
    assert read is None and "cannot be read" in told


class Nvml:
    """A library whose GPU uses 2 J between two readings."""

    def __init__(self, works=True):
        self.millijoules, self.error = 0, 0 if works else 3

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, into):
        self.millijoules += 2000
        into._obj.value = self.millijoules
        return self.error


def test_nvml_counts_joules_or_says_why_not():
    read, _ = energy.nvml_counter(Nvml(), "GPU-1")
    assert read() - read() == -2.0
    assert energy.nvml_counter(Nvml(), "GPU-2")[0] is None
    read, told = energy.nvml_counter(Nvml(works=False), "GPU-1")
    assert read is None and "has no counter (NVML error 3)" in told


def test_joules_are_per_step(monkeypatch):
    used = [0.0]
    monkeypatch.setattr(energy, "counter", lambda device: (lambda: used[0], "energy: a test"))
    monkeypatch.setattr(stopwatch, "WINDOW", 0.0)

    def step():
        used[0] += 2.5

    found, told = stopwatch.joules_of({"plan": step}, torch.device("cpu"))
    assert found == {"plan": [2.5] * stopwatch.TURNS} and told == "energy: a test"


def test_energy_is_left_out_where_there_is_none(monkeypatch):
    monkeypatch.setattr(energy, "counter", lambda device: (None, "no energy: a test"))
    found = gf.profile(two_convolutions(), images(), repeats=1)
    assert all(r.joules is None for r in found.rivals)
    assert found.table().splitlines()[-1] == "no energy: a test"
    assert "energy, J" not in found.table()

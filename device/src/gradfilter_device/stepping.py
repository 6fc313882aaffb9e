"""Steps of an exported graph in memory that is set aside once.

The parameters have two buffers, read from and written to in turns. The optimizer's state has one:
a graph reads it only to compute the new one (the manifest says so), which may overwrite it.
"""

from __future__ import annotations

import numpy as np

from gradfilter_device.exported import NEW, TRAIN, Exported, Values


class Stepper:
    """A training graph with its parameters and state."""

    def __init__(self, model: Exported, threads: int, values: Values):
        self.model = model
        self.session = model.session(TRAIN, threads)
        self.loss = np.zeros((), model.dtype)
        self.load(values)

    def load(self, values: Values) -> None:
        """Go on from these."""
        own = {n: np.ascontiguousarray(values[n]) for n in self.model.parameters}
        state = {n: np.ascontiguousarray(values[n]) for n in self.model.state}
        if not self.model.manifest["state_in_place"]:
            own, state = own | state, {}
        self.now, self.next = own, {n: np.empty_like(a) for n, a in own.items()}
        self.state = state

    @property
    def values(self) -> Values:
        return self.now | self.state

    def step(self, images: np.ndarray, targets: np.ndarray, rate: float) -> float:
        """One step; gives the loss before it."""
        binding = self.session.io_binding()
        given = {"rate": np.array(rate, self.model.dtype), "images": images, "targets": targets}
        given = {n: np.ascontiguousarray(a) for n, a in given.items()}
        for name, array in (self.values | given).items():
            binding.bind_input(*_place(name, array))
        results = {NEW + n: a for n, a in (self.next | self.state).items()} | {"loss": self.loss}
        for name, array in results.items():
            binding.bind_output(*_place(name, array))
        self.session.run_with_iobinding(binding)
        self.now, self.next = self.next, self.now
        return float(self.loss)


def _place(name: str, array: np.ndarray) -> tuple:
    return name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data

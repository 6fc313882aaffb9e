"""Steps of an exported graph in memory that is set aside once.

New parameters and state overwrite the old ones, which the graph reads only to compute them. Where
the manifest does not say so there are two buffers, read from and written to in turns.
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
        """Go on from these, which are overwritten."""
        names = (*self.model.parameters, *self.model.state)
        self.values = {n: np.require(values[n], requirements=["C", "W"]) for n in names}
        twice = not self.model.manifest["in_place"]
        self.next = {n: np.empty_like(a) if twice else a for n, a in self.values.items()}

    def step(self, images: np.ndarray, targets: np.ndarray, rate: float) -> float:
        """One step; gives the loss before it."""
        binding = self.session.io_binding()
        given = {"rate": np.array(rate, self.model.dtype), "images": images, "targets": targets}
        given = {n: np.ascontiguousarray(a) for n, a in given.items()}
        for name, array in (self.values | given).items():
            binding.bind_input(*_place(name, array))
        results = {NEW + n: a for n, a in self.next.items()} | {"loss": self.loss}
        for name, array in results.items():
            binding.bind_output(*_place(name, array))
        self.session.run_with_iobinding(binding)
        self.values, self.next = self.next, self.values
        return float(self.loss)


def _place(name: str, array: np.ndarray) -> tuple:
    return name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data

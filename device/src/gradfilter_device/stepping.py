"""Steps of an exported graph in memory that is set aside once.

New parameters and state overwrite the old ones, which the graph reads only to compute them. Where
the manifest does not say so there are two buffers, read from and written to in turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradfilter_device.exported import NEW, TRAIN, Exported, Values


class Stepper:
    """A training graph with its parameters and state."""

    def __init__(self, model: Exported, threads: int, values: Values):
        self.model = model
        self.session = model.session(TRAIN, threads)
        self.shapes = {t.name: t.shape for t in self.session.get_inputs()}  # with rows
        self.loss, self.rate = (np.zeros((), model.dtype) for _ in range(2))
        self.load(values)

    def load(self, values: Values) -> None:
        """Go on from these, which are overwritten."""
        names = (*self.model.parameters, *self.model.state)
        self.values = {n: np.require(values[n], requirements=["C", "W"]) for n in names}
        twice = not self.model.manifest["in_place"]
        self.next = {n: np.empty_like(a) if twice else a for n, a in self.values.items()}
        self.bindings = [self._bound(self.values, self.next)]
        if twice:
            self.bindings.append(self._bound(self.next, self.values))

    def _bound(self, values: Values, new: Values):
        """The memory of a step, told to the session once: to tell it takes milliseconds."""
        binding = self.session.io_binding()
        for name, array in values.items():
            binding.bind_input(*_place(name, array, self.shapes[name]))
            binding.bind_output(*_place(NEW + name, new[name], self.shapes[name]))
        binding.bind_input(*_place("rate", self.rate))
        binding.bind_output(*_place("loss", self.loss))
        return binding

    def step(self, images: np.ndarray, targets: np.ndarray, rate: float) -> float:
        """One step; gives the loss before it."""
        binding = self.bindings[0]
        self.rate[...] = rate
        given = {"images": images, "targets": targets}
        given = {n: np.ascontiguousarray(a) for n, a in given.items()}
        for name, array in given.items():
            binding.bind_input(*_place(name, array))
        self.session.run_with_iobinding(binding)
        self.values, self.next, self.bindings = self.next, self.values, self.bindings[::-1]
        return float(self.loss)


def _place(name: str, array: np.ndarray, shape: Sequence[int] | None = None) -> tuple:
    shape = array.shape if shape is None else shape
    return name, "cpu", 0, array.dtype.type, shape, array.ctypes.data

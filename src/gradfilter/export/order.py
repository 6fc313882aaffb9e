"""The order in which a graph is run, which a runtime is told to keep to.

Of all that can be run, that comes first which takes the least memory, at once or with the few nodes
that follow it alone. So the statistics of a map are taken while it is still in the processor's
cache, parameters are updated as soon as their gradient is there, and what these have read is free.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate

from gradfilter.export.graph import Batch, Graph, Node

VIEW = "Reshape"  # whose output lies where its input does
AHEAD = 4  # nodes that are looked at together: a map that is turned into numbers takes two or three


def ordered(graph: Graph, nodes: list[Node], start: str) -> list[Node]:
    """The nodes, in an order in which each has its inputs.

    What does not depend on the value `start` (folded weights) comes when it is needed.
    """
    missing, readers = _missing(nodes, start)
    others = {name: n for n in nodes if id(n) not in missing for name in n.outputs}
    memory = _Memory(graph, nodes)
    place = {id(node): i for i, node in enumerate(nodes)}
    ready = [n for n in nodes if missing.get(id(n)) == 0]
    found: list[Node] = []
    while ready:
        chains = ((_chain(n, missing, readers), n) for n in ready)
        _, _, node = min((memory.least(chain), place[id(n)], n) for chain, n in chains)
        ready.remove(node)
        for each in (*_needed(node, others), node):
            memory.run(each)
            found.append(each)
        for reader in (r for name in node.outputs for r in readers.get(name, [])):
            missing[id(reader)] -= 1
            if not missing[id(reader)]:
                ready.append(reader)
    for node in list(others.values()):  # an output that depends on nothing: a count of steps
        found += _needed(Node("", node.outputs, [], {}), others)
    return found


def _missing(nodes: list[Node], start: str) -> tuple[dict[int, int], dict[str, list[Node]]]:
    """Of the nodes that depend on `start`: how many inputs that do so too, and who reads them."""
    reached, missing, readers = {start}, {}, {}
    for node in nodes:
        of_start = reached.intersection(node.inputs)
        if of_start:
            reached.update(node.outputs)
            missing[id(node)] = len(of_start - {start})
            for name in of_start:
                readers.setdefault(name, []).append(node)
    return missing, readers


def _chain(node: Node, missing: dict[int, int], readers: dict[str, list[Node]]) -> list[Node]:
    """A node and what can be run right after it alone, each as the only reader of the last."""
    found = [node]
    while len(found) < AHEAD:
        after = [r for name in found[-1].outputs for r in readers.get(name, [])]
        if len(after) != 1 or missing[id(after[0])] != 1:
            break
        found += after
    return found


def _needed(node: Node, makers: dict[str, Node]) -> list[Node]:
    """What a node needs of those that have not been run; they are taken out of `makers`."""
    found: list[Node] = []
    for name in node.inputs:
        maker = makers.get(name)
        if maker is not None:
            for output in maker.outputs:
                makers.pop(output, None)
            found += [*_needed(maker, makers), maker]
    return found


class _Memory:
    """How often each piece of memory is still to be read."""

    def __init__(self, graph: Graph, nodes: list[Node]):
        lasting = {v.name for v in graph.inputs} | set(graph.constants)
        lasting |= {key for key, _ in graph.outputs}
        self.place: dict[str, str] = {}  # a value, and the one whose memory it has
        self.readings: Counter[str] = Counter()
        for node in nodes:
            for name in node.outputs:
                view = node.kind == VIEW and name not in lasting
                self.place[name] = self._of(node.inputs[0]) if view else name
            self.readings.update(self._read(node))
        made = {name for name, at in self.place.items() if name == at and name not in lasting}
        self.bytes = {name: _size(graph, name) for name in made if name in graph.values}

    def _of(self, name: str) -> str:
        return self.place.get(name, name)

    def _read(self, node: Node) -> set[str]:
        return {self._of(name) for name in node.inputs}

    def least(self, nodes: list[Node]) -> int:
        """The least bytes taken after the first of these nodes, or after more of them."""
        return min(accumulate(map(self.taken, nodes)))

    def taken(self, node: Node) -> int:
        """Bytes that a node takes, less those that are free after it."""
        freed = (name for name in self._read(node) if self.readings[name] == 1)
        return sum(self.bytes.get(name, 0) for name in node.outputs) - sum(
            self.bytes.get(name, 0) for name in freed
        )

    def run(self, node: Node) -> None:
        self.readings.subtract(self._read(node))


def _size(graph: Graph, name: str) -> int:
    """Bytes of a value, of one image where it has that of each."""
    value = graph.values[name]
    sizes = (s.times if isinstance(s, Batch) else s for s in value.shape)
    return math.prod(sizes) * value.dtype.itemsize

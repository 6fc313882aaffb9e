"""New parameters and state may overwrite the old ones: a graph that allows it in any order.

A runtime runs the nodes of a graph in any order in which each has its inputs. So every node that
reads a parameter must be needed for the parameter's new value. The product of a weight and the
gradient behind it is not, and may come late; the update is made to wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from gradfilter.export.graph import Graph, Node, Value

VIEWS = {"Reshape", "Transpose", "Identity"}  # a runtime may read through these


def wait_for_readers(graph: Graph, names: list[str], new: str) -> None:
    """Let the new value of each of these inputs wait for all that reads the old one."""
    for name in names:
        makers = _makers(graph)
        last = makers[_made(graph, new + name)]
        for reader in reversed(_readers(graph, name)):  # the last ones wait for others already
            if not _leads(reader, last, makers):
                _wait(graph, last, reader, makers)
                makers = _makers(graph)
    graph.nodes = in_order(graph)


def in_place(graph: Graph, names: list[str], new: str) -> bool:
    """Whether each of these inputs is read only on the way to its own new value."""
    makers = _makers(graph)
    return all(
        _leads(reader, makers[_made(graph, new + name)], makers)
        for name in names
        for reader in _readers(graph, name)
    )


def _wait(graph: Graph, last: Node, reader: Node, makers: dict[str, Node]) -> None:
    """Let a number that the new value is computed from be known only after the reader has run.

    Every update has such a number, which comes of the learning rate. The choice between it and the
    reader's first result always falls on the number.
    """
    update, place = next(
        (node, i)
        for node in _before(last, makers)
        for i, name in enumerate(node.inputs)
        if name not in graph.constants and graph.values[name].shape in ((), (1, 1))
    )
    number, result = graph.values[update.inputs[place]], graph.values[reader.outputs[0]]
    if result.dtype != number.dtype or _leads(update, reader, makers):
        return  # `in_place` will tell
    never = torch.tensor(False)
    first = graph.reshape(_first(graph, result), number.shape)
    waited = graph.op("Where", never, first, number, like=number)
    update.inputs[place] = waited.name


def _first(graph: Graph, x: Value) -> Value:
    """One number of a tensor."""
    rank = len(x.shape)
    ends = graph.ints(*[0] * rank), graph.ints(*[1] * rank)
    return graph.op("Slice", x, *ends, shape=(1,) * rank, dtype=x.dtype)


def in_order(graph: Graph) -> list[Node]:
    """The nodes in their order, but each behind those that it needs."""
    makers, found = _makers(graph), {}
    for node in graph.nodes:
        to_see = [node]
        while to_see:
            here = to_see[-1]
            needed = [makers[n] for n in here.inputs if n in makers]
            needed = [n for n in needed if id(n) not in found]
            if needed:
                to_see.extend(needed)
            else:
                found[id(to_see.pop())] = here
    return list(found.values())


def _made(graph: Graph, output: str) -> str:
    return next(value.name for name, value in graph.outputs if name == output)


def _makers(graph: Graph) -> dict[str, Node]:
    return {name: node for node in graph.nodes for name in node.outputs}


def _readers(graph: Graph, name: str) -> list[Node]:
    """The nodes that read a value, or a view of it."""
    found, seen = [], {name}
    for node in graph.nodes:
        if seen.isdisjoint(node.inputs):
            continue
        if node.kind in VIEWS and node.inputs[0] in seen:
            seen.update(node.outputs)
        else:
            found.append(node)
    return found


def _leads(node: Node, to: Node, makers: dict[str, Node]) -> bool:
    """Whether the result of a node is needed for that of another (or is it)."""
    return any(before is node for before in _before(to, makers))


def _before(last: Node, makers: dict[str, Node]) -> Iterator[Node]:
    """A node and all that it needs, the nearest first."""
    to_see, seen = deque([last]), {id(last)}
    while to_see:
        here = to_see.popleft()
        yield here
        for name in here.inputs:
            maker = makers.get(name)
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                to_see.append(maker)

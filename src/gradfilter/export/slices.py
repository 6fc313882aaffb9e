"""The parts of a vector, taken off it by one node instead of one for each.

ONNX Runtime would do that too, but late: its own node has a place behind all others, and so has
what waits for it.
"""

from __future__ import annotations

from gradfilter.export.graph import Graph, Node

Ends = tuple[int, int]


def split(graph: Graph) -> None:
    """Slices of one vector that do not overlap become a Split."""
    found: dict[str, dict[str, Ends]] = {}
    for node in graph.nodes:
        if (ends := _ends(graph, node)) is not None:
            found.setdefault(node.inputs[0], {})[node.outputs[0]] = ends
    for source, slices in found.items():
        parts = _parts(slices, graph.values[source].shape[0])
        if len(slices) > 1 and parts is not None:
            names = [name or f"{source}.{begin}" for name, (begin, _) in parts]
            sizes = graph.ints(*(end - begin for _, (begin, end) in parts))
            inputs = [source, graph.constant(sizes.numpy())]
            own = [n for n in graph.nodes if not slices.keys().isdisjoint(n.outputs)]
            graph.nodes.insert(graph.nodes.index(own[0]), Node("Split", inputs, names, {"axis": 0}))
            graph.nodes = [n for n in graph.nodes if not any(n is o for o in own)]


def _ends(graph: Graph, node: Node) -> Ends | None:
    """Where a slice of a vector begins and ends."""
    if node.kind != "Slice" or any(name not in graph.constants for name in node.inputs[1:]):
        return None
    shape = graph.values[node.inputs[0]].shape
    if len(shape) != 1 or not isinstance(shape[0], int):
        return None
    begin, end, *rest = (int(graph.constants[name].item()) for name in node.inputs[1:])
    plain = 0 <= begin < end <= shape[0] and rest in ([], [0], [0, 1])
    return (begin, end) if plain else None


def _parts(slices: dict[str, Ends], length: int) -> list[tuple[str | None, Ends]] | None:
    """The slices in order, with those between that nothing reads; None where some overlap."""
    found, at = [], 0
    for name, (begin, end) in sorted(slices.items(), key=lambda item: item[1]):
        if begin < at:
            return None
        found += [(None, (at, begin))] if begin > at else []
        found.append((name, (begin, end)))
        at = end
    return found + ([(None, (at, length))] if at < length else [])

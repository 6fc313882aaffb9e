"""A network cut in two where its trained part begins."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from gradfilter.convert import engage
from gradfilter.order import evaluating
from gradfilter.region.trace import trace

RANDOM = ("drop", "stochastic", "rand", "bernoulli", "rrelu", "noise")  # in names


class CannotCut(ValueError):
    """A network whose frozen part cannot be taken off its trained part."""

    def __init__(self, why: str):
        super().__init__(f"the network cannot be cut where its trained part begins: {why}")


class Cut:
    """A model in two, of the same modules.

    `front` is what depends on the picture alone: nothing in it is trained or random while the model
    is in training mode. It gives the tensors that `back` reads.
    """

    def __init__(self, model: nn.Module, example: Tensor, fused: bool = True):
        self.model = model
        training = _plain_graph(model, example)
        names = _boundary(model, training)
        with evaluating(model):
            graphs = {True: training, False: _plain_graph(model, example)}
            values = _values(model, training, example, names)
            more = _values(model, training, torch.cat([example, example[:1]]), names)
        maps, fixed = _kinds(values, more, len(example))
        self.front = _front(model, training, maps)
        self.backs = {mode: _back(model, graph, maps, fixed) for mode, graph in graphs.items()}
        features = tuple(values[name] for name in maps)
        self.shapes = [tuple(t.shape[1:]) for t in features]
        self._compare(example)
        engage(self.backs[True], features, fused)

    def back(self, *features: Tensor) -> Tensor:
        """The network's output, from what the front gave."""
        return self.backs[self.model.training](*features)

    @torch.no_grad()
    def _compare(self, example: Tensor) -> None:
        with evaluating(self.model):
            whole, parts = self.model(example), self.back(*self.front(example))
        if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-5):
            raise CannotCut("the two parts do not give what the whole gives")


def _plain_graph(model: nn.Module, example: Tensor) -> fx.Graph:
    """The model's own forward pass, not an engine's, without what does nothing at this size."""
    swapped = type(model)
    model.__class__ = getattr(swapped, "gf_original", swapped)
    try:
        graph = trace(model)
    finally:
        model.__class__ = swapped
    if isinstance(graph, str):
        raise CannotCut(graph)
    with evaluating(model):
        idle = _Idle(fx.GraphModule(model, graph))
        idle.run(example)
    for node in idle.found:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return graph


class _Idle(fx.Interpreter):
    """Finds the functions that hand back their first argument as it is, such as needless pads."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.found: list[fx.Node] = []

    @torch.no_grad()
    def run_node(self, n: fx.Node):
        first = n.args[0] if n.args and isinstance(n.args[0], fx.Node) else None
        before = self.env.get(first)
        version = before._version if isinstance(before, Tensor) else None
        result = super().run_node(n)
        same = version is not None and result is before and result._version == version
        if n.op == "call_function" and same:
            self.found.append(n)
        return result


def _boundary(model: nn.Module, graph: fx.Graph) -> list[str]:
    """The names of the nodes that the picture alone decides, and that others read."""
    modules = dict(model.named_modules())
    still: set[fx.Node] = set()
    for node in graph.nodes:
        moves = node.op == "output" or _moves(model, modules, node)
        if not moves and still.issuperset(node.all_input_nodes):
            still.add(node)
    crossing = [n for n in still if n.op != "get_attr" and any(u not in still for u in n.users)]
    crossing.sort(key=list(graph.nodes).index)
    first = next(n for n in graph.nodes if n.op == "placeholder")
    if first in crossing:
        trained = next(u for u in first.users if u not in still)
        raise CannotCut(
            f"{trained.target} reads the picture itself and is trained (--last or --plan freeze "
            "a front part)"
        )
    if all(n.op == "output" for c in crossing for n in c.users if n not in still):
        raise CannotCut("nothing in the network is trained")
    return [n.name for n in crossing]


def _moves(model: nn.Module, modules: dict[str, nn.Module], node: fx.Node) -> bool:
    """Whether a node's result changes though its inputs do not: it is trained, or random."""
    if node.op == "get_attr":
        owner, _, name = node.target.rpartition(".")
        value = getattr(model.get_submodule(owner), name)
        return isinstance(value, Tensor) and value.requires_grad
    if node.op == "call_module":
        m = modules[node.target]
        random = m.training and _sounds_random(type(m).__name__)
        norm = m.training and isinstance(m, nn.modules.batchnorm._NormBase)
        return random or norm or any(p.requires_grad for p in m.parameters())
    if node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else node.target.__name__
        return _sounds_random(name) and node.kwargs.get("training", True) is not False
    return False


def _sounds_random(name: str) -> bool:
    return any(word in name.lower() for word in RANDOM)


@torch.no_grad()
def _values(model: nn.Module, graph: fx.Graph, x: Tensor, names: list[str]) -> dict:
    """What these nodes give for x."""
    found = {}

    class Watch(fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if n.name in names:
                found[n.name] = result.clone() if isinstance(result, Tensor) else result
            return result

    Watch(fx.GraphModule(model, graph)).run(x)
    return found


def _kinds(values: dict, more: dict, batch: int) -> tuple[list[str], dict[str, object]]:
    """Which values are maps, one per picture, and which are numbers that every batch shares."""
    maps, fixed = [], {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == batch:
            maps.append(name)
        elif not isinstance(value, Tensor) and value == more[name]:
            fixed[name] = value
        else:
            raise CannotCut(f"its trained part reads {name}, which is not one tensor per picture")
    return maps, fixed


def _front(model: nn.Module, graph: fx.Graph, maps: list[str]) -> fx.GraphModule:
    ends = [n for n in graph.nodes if n.name in maps]
    front, env = fx.Graph(), {}
    for node in _between(graph, ends, stop=()):
        env[node] = front.node_copy(node, env.__getitem__)
    front.output(tuple(env[n] for n in ends))
    return fx.GraphModule(model, front)


def _back(
    model: nn.Module, graph: fx.Graph, maps: list[str], fixed: dict[str, object]
) -> fx.GraphModule:
    nodes = {n.name: n for n in graph.nodes}
    missing = [name for name in (*maps, *fixed) if name not in nodes]
    back = fx.Graph()
    env = {} if missing else {nodes[name]: back.placeholder(name) for name in maps}
    env |= {} if missing else {nodes[name]: value for name, value in fixed.items()}
    needed = _between(graph, [n for n in graph.nodes if n.op == "output"], stop=env)
    if missing or any(n.op == "placeholder" for n in needed):
        raise CannotCut("it takes other ways in training than in evaluation")
    for node in needed:
        env[node] = back.node_copy(node, env.__getitem__)
    return fx.GraphModule(model, back)


def _between(graph: fx.Graph, ends: list[fx.Node], stop) -> list[fx.Node]:
    """The nodes that the ends need, in order, but for those in `stop` and what they need."""
    needed, left = set(), list(ends)
    while left:
        node = left.pop()
        if node not in needed and node not in stop:
            needed.add(node)
            left += node.all_input_nodes
    return [n for n in graph.nodes if n in needed]

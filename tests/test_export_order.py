"""The order in which the nodes of a graph are run, and slices that would change it."""

import json
import platform
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from exported import optimizer_of
from on_device import module

import gradfilter as gf
from gradfilter.export.graph import Graph, Node
from gradfilter.export.order import ordered
from gradfilter.export.slices import split

x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="not every processor has blocks"
)


def graph_of(*nodes: tuple[str, str, str, tuple]) -> Graph:
    """Nodes as (kind, inputs, output, shape of the output), from an image and a vector."""
    graph = Graph()
    graph.input("images", (1, 64), torch.float32)
    graph.input("v", (10,), torch.float32)
    for kind, inputs, output, shape in nodes:
        graph.nodes.append(Node(kind, inputs.split(), [output], {}))
        graph.values[output] = graph.input(output, shape, torch.float32)
    del graph.inputs[2:]
    return graph


def outputs(graph: Graph) -> list[str]:
    return [node.outputs[0] for node in ordered(graph, graph.nodes, "images")]


def test_what_takes_the_least_memory_comes_first():
    """A map's mean before the next map, and that of a view before what would keep its memory."""
    graph = graph_of(
        ("Relu", "images", "a", (1, 64)),
        ("Relu", "a", "b", (1, 64)),
        ("Relu", "b", "c", (1, 64)),
        ("Relu", "c", "d", (1, 64)),
        ("Reshape", "a s", "view", (64,)),
        ("ReduceMean", "view", "mean of a", ()),
        ("ReduceMean", "b", "mean of b", ()),
    )
    assert outputs(graph) == ["a", "view", "mean of a", "b", "mean of b", "c", "d"]


def test_a_map_is_turned_into_numbers_at_once():
    """Although the first node of that takes more memory than the next layer."""
    graph = graph_of(
        ("Relu", "images", "a", (1, 64)),
        ("Relu", "a", "b", (1, 64)),
        ("Cast", "a", "wide", (2, 64)),
        ("Abs", "wide", "other", (2, 64)),
        ("ReduceMean", "other", "mean of a", ()),
        ("Relu", "b", "c", (1, 64)),
    )
    assert outputs(graph) == ["a", "wide", "other", "mean of a", "b", "c"]


def test_what_depends_on_no_image_comes_when_it_is_needed():
    graph = graph_of(
        ("Relu", "v", "folded", (10,)),
        ("Neg", "v", "count", (10,)),
        ("Relu", "images", "a", (1, 64)),
        ("Mul", "a folded", "b", (1, 64)),
    )
    graph.output("count", graph.values["count"])
    assert outputs(graph) == ["a", "folded", "b", "count"]


def cut(graph: Graph, begin: int, end: int):
    ends = graph.ints(begin), graph.ints(end), graph.ints(0)
    shape = (end - begin,)
    return graph.op("Slice", graph.values["v"], *ends, shape=shape, dtype=torch.float32)


def test_slices_of_a_vector_are_taken_at_once():
    graph = graph_of()
    late, early = cut(graph, 5, 8), cut(graph, 1, 3)
    split(graph)
    [node] = graph.nodes
    assert node.kind == "Split" and node.inputs[0] == "v"
    assert [late.name, early.name] == [node.outputs[3], node.outputs[1]]
    assert graph.constants[node.inputs[1]].tolist() == [1, 2, 2, 3, 2]


def test_slices_that_overlap_stay():
    graph = graph_of()
    cut(graph, 0, 4), cut(graph, 3, 6)
    split(graph)
    assert [node.kind for node in graph.nodes] == ["Slice", "Slice"]


@x86
def test_onnx_runtime_keeps_to_the_order(tmp_path, monkeypatch):
    """By its own profile, of a network with folded batch norms and all kinds of layers."""
    torch.manual_seed(0)
    model, x = networks.named("mobilenet_v2"), torch.randn(1, 3, 64, 64)
    gf.convert(model, gf.GalerkinFilter(grid=7), example=x)
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    gf.export(model, x, torch.tensor([3]), tmp_path, optimizer=optimizer, batch=1)
    import onnxruntime

    plain = onnxruntime.SessionOptions

    def profiled():
        options = plain()
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        return options

    monkeypatch.setattr(onnxruntime, "SessionOptions", profiled)
    exported = module("exported").Exported(tmp_path)
    stepper = module("stepping").Stepper(exported, 1, exported.start())
    stepper.step(x.numpy(), np.zeros(1, np.int64), 0.1)
    events = json.loads(Path(stepper.session.end_profiling()).read_text())
    own = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    names = [e["name"].removesuffix("_kernel_time") for e in sorted(own, key=lambda e: e["ts"])]
    places = list(map(int, names))  # nodes have their places as names
    assert len(places) > 1000 and places == sorted(places)

"""Patch means and slopes in every form that a graph has for them, against PyTorch's own."""

import platform

import exported
import onnx
import pytest
import torch
import torch.nn.functional as F

from gradfilter.export import convolutions, onthegrid, statistics
from gradfilter.export.graph import BLOCKED, Graph
from gradfilter.export.lower import Lowering
from gradfilter.export.write import model
from gradfilter.patches import divide_up, patch_mean

BLOCKS = pytest.param(
    True,
    marks=pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"), reason="no processor for blocks"
    ),
)
CASES = {
    "whole": ((14, 14), (2, 2)),
    "rows of few pixels": ((12, 12), (4, 4)),
    "beyond": ((13, 18), (4, 4)),
    "beyond at the bottom": ((13, 16), (4, 4)),
    "beyond on the right": ((12, 18), (4, 4)),
    "one pixel in the last": ((7, 7), (2, 2)),
    "large, whole": ((96, 84), (12, 12)),
    "large, beyond": ((96, 90), (14, 14)),
    "many": ((40, 40), (2, 2)),
    "many, beyond": ((41, 39), (2, 2)),
    "one patch": ((5, 9), (7, 9)),
    "each a pixel": ((6, 5), (1, 1)),
    "oblong": ((20, 33), (3, 8)),
}
CHANNELS = 48  # three blocks of 16


def graph_of(size, side, blocks: bool) -> Graph:
    """A 1x1 layer with ReLU6, and the statistics of its output."""
    graph = Graph(blocked=blocks)
    x = graph.input("images", (2, 3, *size), torch.float32)
    w = graph.input("w", (CHANNELS, 3, 1, 1), torch.float32)
    c = Lowering(graph, [])
    how = dict(stride=(1, 1), pads=[0] * 4, dilation=(1, 1), groups=1)
    y = convolutions.conv(graph, x, w, None, **how, shape=(2, CHANNELS, *size))
    y = onthegrid.activated(c, y, "relu6", 0.0)
    graph.output("means", statistics.mean(c, y, side))
    for act in ("relu", "relu6"):
        graph.output(act, statistics.slopes(c, y, act, side))
    graph.prune()
    return graph


def in_pytorch(x, w, side) -> dict:
    y = F.conv2d(x, w).clamp(0, 6)
    side = tuple(min(r, s) for r, s in zip(side, y.shape[2:], strict=True))
    count = tuple(map(divide_up, y.shape[2:], side))
    maps = {"means": y, "relu": (y > 0).double(), "relu6": ((y > 0) & (y < 6)).double()}
    return {name: patch_mean(each, count, side) for name, each in maps.items()}


@pytest.mark.parametrize("blocks", [False, BLOCKS])
@pytest.mark.parametrize("case", CASES)
def test_statistics_are_those_of_the_pixels_that_there_are(case, blocks, tmp_path):
    size, side = CASES[case]
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, *size), 4 * torch.randn(CHANNELS, 3, 1, 1)
    onnx.save(model(graph_of(size, side, blocks), "statistics"), tmp_path / "graph.onnx")
    found = exported.runtime(tmp_path / "graph.onnx")({"images": x.numpy(), "w": w.numpy()})
    for name, expected in in_pytorch(x.double(), w.double(), side).items():
        torch.testing.assert_close(
            torch.tensor(found[name]).double(), expected, rtol=1e-5, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("case", ["whole", "beyond", "large, beyond", "many, beyond"])
def test_a_map_in_blocks_stays_there(case):
    """Only what was taken of it is put into the plain order."""
    size, side = CASES[case]
    nodes = graph_of(size, side, blocks=True).nodes
    graph = graph_of(size, side, blocks=True)
    plain = [n for n in nodes if n.kind == "ReorderOutput" and n.domain == BLOCKED]
    assert len(plain) == 3
    assert all(graph.values[n.outputs[0]].shape[2:] != size for n in plain)


def test_large_maps_are_not_copied_for_their_means():
    """Unlike small ones, and bytes."""

    def copied(case: str) -> set:
        graph = graph_of(*CASES[case], blocks=False)
        return {graph.values[n.inputs[0]].dtype for n in graph.nodes if n.kind == "Pad"}

    assert copied("large, beyond") == {torch.uint8}
    assert copied("beyond") == {torch.float32, torch.uint8}
    assert copied("whole") == set()

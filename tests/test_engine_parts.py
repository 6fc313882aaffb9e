"""A part of a model that the engine runs is converted again, or reverted, by itself."""

import pytest
import torch
from networks import Network, Unit, assert_same, exact, run

import gradfilter as gf

METHOD = gf.GalerkinFilter(grid=3)
OTHER = gf.GradientFilter(patch=2)
BLOCKS = [
    ("chain", Unit(stride=2, norm="affine", act="silu"), "none"),
    ("residual", Unit(8, norm="affine", act="gelu"), "none"),
    ("project", Unit(norm="bare"), "silu"),
]


def network():
    return Network(BLOCKS, "vector", 0).double().eval()


def images(channels, size):
    noise = torch.Generator().manual_seed(0)
    return torch.randn(2, channels, size, size, generator=noise, dtype=torch.float64)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", [{}, {"example": images(8, 10)}], ids=["layers", "an engine"])
def test_a_part_converted_again_has_its_new_method(given):
    x = images(3, 20)
    found, expected = network(), network()
    gf.convert(found, METHOD, example=x)
    run(found, x)
    gf.convert(found.blocks[1], OTHER, **given)
    gf.convert(expected, {"*": METHOD, "blocks.1.*": OTHER, "fc": gf.Exact()}, example=x)
    assert_same(run(found, x), run(expected, x))


def test_parts_that_are_reverted_have_pytorchs_gradients():
    x, model = images(3, 20), network()
    gf.convert(model, METHOD, example=x)
    run(model, x)
    for part in (model.stem, model.blocks):
        gf.revert(part)
    assert_same(run(model.eval(), x), exact(network(), x))

"""The traced program is the forward pass that the model's code says, read to the letter."""

import pytest
import torch
import torch.nn.functional as F
from networks import EXACT, Call, assert_same, engines, exact, in_float32, norm, run
from timm.layers import BatchNormAct2d
from torch import nn
from torchvision.ops import StochasticDepth

import gradfilter as gf


# A forward pass in which something is easily misread; each takes [N, 4, 9, 7].
def conv(out=4, kernel=3, **options):
    return nn.Conv2d(4, out, kernel, padding=kernel // 2, **options)


def in_place_twice(m, x):
    y = m.a(x)
    return m.act(y) + y  # y, too, is what the activation made of it


def uneven_chunks(m, x):
    a, _, c = m.a(x).chunk(3, 1)  # of 3, 3 and 1 channels
    return torch.cat([F.silu(c), a], 1)


def one_head_unused(m, x):
    y = m.a(x)
    m.b(y)
    return m.c(y)


class ReadsOptions(nn.Module):
    """Optional arguments, and a mask that a tracer could take for given."""

    def __init__(self):
        super().__init__()
        self.a = conv()

    def forward(self, x, mask=None, twice: bool = False):
        y = self.a(x)
        y = y if mask is None else y * mask
        return self.a(y) if twice else F.silu(y)


class OddNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).abs()


HAND = {
    "norm after a sum": lambda: Call(lambda m, x: m.n(m.a(x) + x), a=conv(), n=norm(4, "affine")),
    "a map plus itself": lambda: Call(lambda m, x: (lambda y: y + y)(m.a(x)), a=conv()),
    "in-place sum": lambda: Call(
        lambda m, x: m.act(m.n(m.a(x)).add_(x)), a=conv(), n=norm(4, "affine"), act=nn.SiLU()
    ),
    "in-place activation": lambda: Call(in_place_twice, a=conv(), act=nn.SiLU(inplace=True)),
    "in-place input": lambda: Call(
        lambda m, x: m.a(F.silu(m.b(x), True)) + m.c(x), a=conv(), b=conv(), c=conv()
    ),
    "leaky 0": lambda: Call(lambda m, x: m.act(m.a(x)), a=conv(), act=nn.LeakyReLU(0.0)),
    "leaky 0.3": lambda: Call(lambda m, x: m.act(m.a(x)), a=conv(), act=nn.LeakyReLU(0.3)),
    "elu 0.5": lambda: Call(lambda m, x: m.act(m.a(x)), a=conv(), act=nn.ELU(0.5)),
    "hardtanh": lambda: Call(lambda m, x: m.act(3 * m.a(x)), a=conv(), act=nn.Hardtanh(0, 6)),
    "one norm of two layers": lambda: Call(
        lambda m, x: m.n(m.b(m.n(m.a(x)))), a=conv(), b=conv(), n=norm(4, "affine")
    ),
    "one layer, two norms": lambda: Call(
        lambda m, x: m.n(m.a(x)) + m.o(m.a(x)), a=conv(), n=norm(4, "affine"), o=norm(4, "bare")
    ),
    "two epsilons": lambda: Call(
        lambda m, x: m.n(m.a(x)) + m.o(m.b(x)),
        a=conv(),
        b=conv(),
        n=norm(4, "affine"),
        o=nn.BatchNorm2d(4, eps=0.1),
    ),
    "a norm of its own": lambda: Call(lambda m, x: m.n(m.a(x)), a=conv(), n=OddNorm(4)),
    "timm's norm and activation": lambda: Call(
        lambda m, x: m.n(m.a(x)), a=conv(), n=BatchNormAct2d(4, act_layer=nn.SiLU)
    ),
    "one pixel, read twice": lambda: Call(
        lambda m, x: (lambda s: s * s + s)(m.a(x).mean((2, 3), keepdim=True)), a=conv()
    ),
    "a view": lambda: Call(
        lambda m, x: m.fc(F.silu(m.a(x)).view(x.size(0), -1)), a=conv(), fc=nn.Linear(252, 3)
    ),
    "mean over channels": lambda: Call(
        lambda m, x: m.a(x).mean(1, keepdim=True) * m.b(x), a=conv(), b=conv()
    ),
    "by keyword": lambda: Call(
        lambda m, x: torch.cat(
            tensors=[F.silu(input=m.a(input=x)), torch.chunk(m.b(x), chunks=2, dim=1)[1]], dim=1
        ),
        a=conv(),
        b=conv(),
    ),
    "chunks turned round": lambda: Call(
        lambda m, x: torch.cat(m.a(x).chunk(2, 1)[::-1], 1), a=conv()
    ),
    "uneven chunks": lambda: Call(uneven_chunks, a=conv(7)),
    "cat along rows": lambda: Call(lambda m, x: torch.cat([m.a(x), m.b(x)], 2), a=conv(), b=conv()),
    "a sum with a factor": lambda: Call(
        lambda m, x: torch.add(m.a(x), m.b(x), alpha=2) + 1, a=conv(), b=conv()
    ),
    "a position map": lambda: Call(
        lambda m, x: F.silu(m.a(x) + m.p), a=conv(), p=nn.Parameter(torch.randn(1, 4, 9, 7))
    ),
    "a layer scale": lambda: Call(
        lambda m, x: x + m.a(x) * m.s, a=conv(), s=nn.Parameter(torch.randn(1, 4, 1, 1))
    ),
    "a product of maps": lambda: Call(lambda m, x: m.a(x) * m.b(x), a=conv(), b=conv()),
    "optional arguments": ReadsOptions,
    "one head unused": lambda: Call(one_head_unused, a=conv(), b=conv(), c=conv()),
    "depth of 0": lambda: Call(
        lambda m, x: (lambda y: y + F.silu(m.drop(y)))(m.a(m.drop(x))),
        a=conv(),
        drop=StochasticDepth(0.0, "row"),
    ),
    "depthwise, frozen": lambda: Call(
        lambda m, x: m.b(m.a(x)), a=conv(), b=conv(groups=4, bias=False).requires_grad_(False)
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_what_is_easily_misread(name):
    torch.manual_seed(0)
    model, x = HAND[name](), torch.randn(2, 4, 9, 7, dtype=torch.float64)
    assert_same(run(engines(model, EXACT, x)[1], x), exact(model, x))
    layer, engine = engines(model, gf.GalerkinFilter(patch=2), x)
    expected = run(layer, x)
    assert_same(run(engine, x), expected)
    found = run(engines(model, gf.GalerkinFilter(patch=2), x.float())[1], x.float())
    assert_same(found, in_float32(expected, found), 1e-4)


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-30, 1e-20])
def test_a_gamma_of_nothing(value):
    """A gamma of 0 has a gradient, though nothing passes its channel."""
    torch.manual_seed(0)
    model = Call(lambda m, x: F.silu(m.n(m.a(x))), a=conv(), n=norm(4, "affine"))
    model.n.weight.data[:2] = value
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    expected = run(engines(model, gf.GalerkinFilter(grid=3), x)[0], x)
    found = run(engines(model, gf.GalerkinFilter(grid=3), x.float())[1], x.float())
    assert expected["grad n.weight"][0].abs() > 1e-3
    assert_same(found, in_float32(expected, found), 1e-5)




def test_what_no_gradient_reaches_has_none():
    """Not zeros, which weight decay and momentum would act on."""
    model = Call(lambda m, x: [m.a(x), m.b(x)], a=conv(), b=conv())
    x = torch.randn(2, 4, 9, 7)
    _, engine = engines(model, gf.GalerkinFilter(grid=3), x)
    engine(x)[1].sum().backward()
    assert engine.a.weight.grad is None and engine.b.weight.grad is not None


def squeeze_excite():
    """Written as torchvision does, the gate first."""

    def forward(m, x):
        y = F.silu(m.a(x))
        return torch.sigmoid(m.b(y.mean((2, 3), keepdim=True))) * y + F.silu(m.c(y))

    return Call(forward, a=conv(stride=4), b=conv(kernel=1), c=conv())


@pytest.mark.parametrize("first, then", [(3, 21), (21, 3)])
def test_an_example_of_one_pixel_says_little(first, then):
    """In a map of one pixel a gate looks like a map: larger images have a program of their own."""
    torch.manual_seed(0)
    model = squeeze_excite()
    tiny, x = (torch.randn(2, 4, s, s, dtype=torch.float64) for s in (first, then))
    layer, engine = engines(model, gf.GalerkinFilter(patch=2), tiny)
    for images in (x, tiny, x):
        assert_same(run(engine, images), run(layer, images))
    exactly = engines(model, EXACT, tiny)[1]
    assert_same(run(exactly, x), exact(model, x))


def test_an_example_of_one_image_says_little():
    torch.manual_seed(0)
    model = Call(
        lambda m, x: F.silu(m.a(x) + m.p), a=conv(), p=nn.Parameter(torch.randn(1, 4, 9, 7))
    )
    x = torch.randn(3, 4, 9, 7, dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        _, engine = engines(model, EXACT, x[:1].to(dtype))
        found = run(engine, x.to(dtype))
        assert_same(found, in_float32(exact(model, x), found), tolerance)


def test_hooks_of_layers_fire_and_of_their_containers():
    """A module with hooks is called as a module, whenever the hooks were put there."""
    calls = []

    def hook(module, args, output):
        calls.append(type(output))
        return 2 * output

    block = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.SiLU())
    model = Call(lambda m, x: m.block(m.a(x)), a=conv(), block=block)
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    model.block.register_forward_hook(hook)
    layer, engine = engines(model, EXACT, x)
    calls.clear()
    assert_same(run(engine, x), exact(model, x))
    for m in (engine, model):
        m.a.register_forward_hook(hook)
    engine(x)  # makes the program for the new hooks, which calls them once more
    calls.clear()
    found = run(engine, x)
    assert calls == [torch.Tensor] * 2
    assert_same(found, exact(model, x))


def test_the_mode_of_the_forward_pass_is_that_of_its_backward_pass():
    """Batch statistics forward, evaluation mode by the time the gradients are wanted."""
    model = Call(lambda m, x: F.silu(m.n(m.a(x))), a=conv(), n=norm(4, "affine"))
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    layer, engine = engines(model, gf.GalerkinFilter(patch=2), x, "batch")
    for m in (layer, engine):
        m.train()
        loss = (m(x) ** 3).sum()
        m.eval()
        (loss + (m(x) ** 2).sum()).backward()
    for p, q in zip(layer.parameters(), engine.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("contiguous", [True, False])
def test_results_have_the_memory_order_of_the_model(contiguous):
    """So that a loss may take a view of them."""
    model = Call(lambda m, x: {"maps": [m.a(x)], "pair": (m.b(x), 1)}, a=conv(), b=conv())
    x = torch.randn(2, 4, 9, 7)
    if not contiguous:
        x = x.to(memory_format=torch.channels_last)
    expected = model(x)
    gf.convert(model, gf.GalerkinFilter(grid=3), example=x)
    found = model(x)
    assert type(found) is dict and type(found["maps"]) is list and type(found["pair"]) is tuple
    for a, b in ((found["maps"][0], expected["maps"][0]), (found["pair"][0], expected["pair"][0])):
        assert a.stride() == b.stride()

"""Steps played from tapes, against the same steps one by one and against the layer level."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from networks import assert_same, engines, in_float32, named, run
from torch import nn

import gradfilter as gf
from gradfilter.kernels import cpu_library
from gradfilter.region import kept, record, record_backward, tape
from gradfilter.region.run import Runner
from gradfilter.region.tape import WHOLE, Map, Tape

LIBRARY = cpu_library.library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, cpu_library.Unavailable), reason="no C library")
METHODS = [gf.GalerkinFilter(grid=3), gf.GalerkinFilter(patch=2), gf.GradientFilter(patch=2)]
METHODS += [gf.GalerkinFilter(patch=1)]
ACTS = {"none": nn.Identity, "relu6": nn.ReLU6, "silu": nn.SiLU, "tanh": nn.Tanh}


class Inverted(nn.Module):
    """An inverted residual: 1x1, depthwise, 1x1, and the input on top where that fits."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, act: str, norm: bool):
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Conv2d(channels, wide, 1, bias=not norm)
        self.depthwise = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        self.project = nn.Conv2d(wide, out, 1, bias=not norm)
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(c) if norm else nn.Identity() for c in (wide, wide, out)]
        )
        self.act, self.fits = ACTS[act](), stride == 1 and channels == out
        for m in self.norms.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2)
                nn.init.uniform_(m.weight, 0.5, 1.5)

    def forward(self, x):
        y = self.act(self.norms[0](self.expand(x)))
        y = self.act(self.norms[1](self.depthwise(y)))
        y = self.norms[2](self.project(y))
        return x + y if self.fits else y


STEMS = [(3, 1, 1, 1), (3, 2, 1, 1), (5, 2, 2, 1), (3, 2, 0, 1), (3, 1, 2, 2), (7, 2, 3, 1)]
STEMS += [(2, 1, 0, 1)]


def network(blocks: list[tuple[int, int, int, str, bool]], stem=STEMS[0]) -> nn.Module:
    """The stem by its kernel, stride, padding and dilation."""
    torch.manual_seed(0)
    layers, channels = [nn.Conv2d(3, 5, *stem)], 5
    for out, kernel, stride, act, norm in blocks:
        layers.append(Inverted(channels, out, kernel, stride, act, norm))
        channels = out
    return nn.Sequential(*layers)


BLOCKS = [(5, 3, 1, "silu", True), (7, 3, 2, "silu", True), (7, 5, 1, "silu", True)]
blocks = st.lists(
    st.tuples(
        st.sampled_from([1, 5, 5, 17]), st.sampled_from([3, 5]), st.sampled_from([1, 1, 2]),
        st.sampled_from(list(ACTS)), st.booleans(),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


def runners(model: nn.Module) -> list[Runner]:
    programs = model.gf_engine.programs.values()
    return [r for program in programs for r in program.runners if isinstance(r, Runner)]


def taped(model: nn.Module) -> tuple[int, int]:
    """How many steps forward and backward tapes do, of one size of images."""
    tapes = [t for runner in runners(model) for t in runner.tapes.values()]
    directions = ([t.forward for t in tapes], [t.backward for t in tapes])
    return tuple(
        sum(t.steps for found in direction for t in found.values() if t is not None)
        for direction in directions
    )


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that was not written holds NaN."""

    def empty(*shape, memory_format=torch.contiguous_format, **form):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return torch.full(shape, torch.nan, **form).contiguous(memory_format=memory_format)

    def strided(*layout, **form):
        return torch.empty_strided(*layout, **form).fill_(torch.nan)

    class Poisoned:
        def __getattr__(self, name):
            return own.get(name) or getattr(torch, name)

    own = {"empty": empty, "empty_strided": strided}

    for module in (tape, kept, record, record_backward):
        monkeypatch.setattr(module, "torch", Poisoned())


def one_by_one(model: nn.Module, x: torch.Tensor, monkeypatch, input_grad: bool = True) -> dict:
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "taped", lambda *_: None)
        return run(copy.deepcopy(model), x, input_grad)


@settings(max_examples=120, deadline=None)
@given(
    blocks, st.sampled_from(METHODS), st.integers(1, 5), st.integers(4, 15), st.integers(4, 15),
    st.sampled_from([1, 3000, 20000, 1 << 20]), st.sampled_from([0, 0, 1, 4]),
    st.sampled_from(STEMS), st.booleans(),
)  # fmt: skip
def test_drawn_chains(
    blocks, method, images, height, width, at_once, frozen, stem, input_grad
):
    """At the layer level in float64, wherever float32 can tell on which side of a corner it is."""
    model = network(blocks, stem)
    for p in list(model.parameters())[: 3 * frozen]:
        p.requires_grad_(False)
    x = torch.randn(images, 3, height + 3, width + 3, dtype=torch.float64)
    layer, _ = engines(model, method, x)
    expected = run(layer, x, input_grad)
    near = run(layer, x + 1e-5 * torch.randn_like(x), input_grad)
    try:
        assert_same(near, expected, 1e-3)
    except AssertionError:
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        poisoned.__wrapped__(patch)
        patch.setattr(tape, "AT_ONCE", at_once)
        _, engine = engines(model, method, x.float())
        for _ in range(2):  # writing the tapes, and playing them again
            found = run(engine, x.float(), input_grad)
            assert_same(found, in_float32(expected, found), 2e-4)
        forward, backward = taped(engine)
        assert forward in (3 * len(blocks) + 1, *([3 * len(blocks)] if frozen else []))
        assert backward == 0 or backward > 1 or len(blocks) == 1


def test_several_images_at_a_time_are_as_one_by_one(monkeypatch, poisoned):
    monkeypatch.setattr(tape, "AT_ONCE", 12000)
    for method in METHODS:
        for images in (1, 2, 5, 11):
            x = torch.randn(images, 3, 13, 10)
            _, engine = engines(network(BLOCKS), method, x)
            assert_same(run(engine, x), one_by_one(engine, x, monkeypatch), 1e-5)
    groups = [t for r in runners(engine) for t in r.tapes.values()][0].forward[0].tape.groups
    assert len({g.at_once for g in groups}) > 1 and groups[0].at_once < 11


def test_batches_and_images_may_change_size(poisoned, monkeypatch):
    _, engine = engines(network(BLOCKS), METHODS[0], torch.randn(2, 3, 12, 12))
    for images, size in [(2, 12), (5, 12), (1, 17), (2, 12)]:
        x = torch.randn(images, 3, size, size)
        assert_same(run(engine, x), one_by_one(engine, x, monkeypatch), 1e-5)


def test_two_steps_at_once_do_not_disturb_each_other(monkeypatch):
    _, engine = engines(network(BLOCKS), METHODS[0], torch.randn(2, 3, 12, 12))
    a, b = torch.randn(2, 2, 3, 12, 12)
    first, second = engine(a), engine(b)
    first.sum().backward(retain_graph=True)
    first.sum().backward()
    second.sum().backward()
    found = [p.grad.clone() for p in engine.parameters()]
    engine.zero_grad()
    for x in (a, a, b):
        engine(x).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in engine.parameters()])


def test_weights_in_another_order_are_read_step_by_step(monkeypatch):
    model = network(BLOCKS)
    turned = torch.randn(10, 5, 1, 1).transpose(0, 1).contiguous().transpose(0, 1)
    _, engine = engines(model, METHODS[0], x := torch.randn(2, 3, 12, 12))
    run(engine, x)
    engine[1].expand.weight.data = turned
    assert_same(run(engine, x), one_by_one(engine, x, monkeypatch), 1e-5)


def test_a_network_in_double_precision_has_no_tapes():
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    _, engine = engines(network(BLOCKS), METHODS[0], x)
    run(engine, x)
    assert taped(engine) == (0, 0)


@pytest.mark.parametrize("size", [64, 112])
@pytest.mark.parametrize("name, steps", [("mobilenet_v2", 52), ("tf_efficientnet_lite0", 49)])
def test_all_of_a_mobile_network_is_taped(name, steps, size):
    x = torch.randn(2, 3, size, size)
    _, engine = engines(named(name), gf.GalerkinFilter(grid=7), x)
    run(engine, x, input_grad=False)
    assert taped(engine) == (steps, steps)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("stem", STEMS, ids=str)
def test_a_stem_with_its_weight_in_either_order(stem, layout, poisoned, monkeypatch, threads):
    for method in METHODS:
        model = network(BLOCKS, stem).to(memory_format=layout)
        _, engine = engines(model, method, x := torch.randn(2, 3, 30, 21))
        assert_same(
            run(engine, x, input_grad=False),
            one_by_one(engine, x, monkeypatch, input_grad=False),
            1e-5,
        )
        forward, backward = taped(engine)
        assert forward == 10
        assert backward == 10 or method not in METHODS[:2]


lives = st.lists(
    st.tuples(st.integers(1, 90), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12
)


@given(lives)
def test_maps_that_live_at_the_same_time_lie_apart(drawn):
    maps = {Map((size, 1, 1)): (min(a, b), max(a, b)) for size, a, b in drawn}
    whole = tape._arranged(maps, WHOLE)
    for m, (first, last) in maps.items():
        assert m.spot.offset >= 0 and m.spot.offset + m.size <= whole
        for other, (since, until) in maps.items():
            if other is not m and first <= until and since <= last:
                apart = (m.spot.offset + m.size, other.spot.offset + other.size)
                assert apart[0] <= other.spot.offset or apart[1] <= m.spot.offset


def test_a_map_that_another_group_reads_has_its_place_until_that_has_done_all_images():
    """Its place must not go to what the reading group writes for its first images."""
    t = Tape()
    size = tape.AT_ONCE // 4
    large, small = Map((size, 1, 1), t.slot()), [Map((8, 1, 1)) for _ in range(4)]
    outs = [Map((8, 1, 1), t.slot()) for _ in range(2)]
    t.call("add", (large, large, small[0]), 8)
    t.call("add", (small[0], small[0], small[1]), 8)  # in the second group
    t.call("add", (small[1], small[1], outs[0]), 8)
    t.call("add", (small[0], small[1], outs[1]), 8)
    t.finish(in_turns=True)
    assert [len(g.calls) for g in t.groups] == [1, 3]
    assert small[0].spot.slot == WHOLE and t.whole >= 8


def test_only_what_is_trained_gets_a_gradient(monkeypatch):
    x = torch.randn(2, 3, 12, 12)
    for trained in ("bias", "norms.2.bias", "norms.0.weight", "depthwise.weight"):
        model = network([*BLOCKS, (7, 3, 1, "silu", False)])
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith(trained))
        _, engine = engines(model, METHODS[0], x)
        found = run(engine, x, input_grad=False)
        assert_same(found, one_by_one(engine, x, monkeypatch, input_grad=False), 1e-5)


def test_biases_that_c_cannot_read_since_a_tape_was_written():
    """The forward pass then goes step by step, and the backward tape misses what it kept."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.SiLU(), nn.Conv2d(32, 32, 1)
    )
    x = torch.randn(2, 3, 32, 32)
    gf.convert(model, gf.GalerkinFilter(grid=4), example=x)
    expected = run(model, x)
    assert min(taped(model)) > 1
    for layer in model[::2]:
        spaced = torch.zeros(2 * len(layer.bias))
        spaced[::2] = layer.bias.detach()
        layer.bias.data = spaced[::2]
    assert_same(run(model, x), expected, 1e-5)

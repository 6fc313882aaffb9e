"""The methods against their definitions, over every geometry."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import CONVS, EXACT, LINEARS, METHODS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from largest import Largest

import gradfilter as gf
from gradfilter import autograd, patches, tucker
from gradfilter.layers import ConvOp, LinearOp
from gradfilter.methods.int8 import dequantise, quantise

convs = pytest.mark.parametrize("case", CONVS.values(), ids=CONVS)


def gradients(op, method, x, w, b, g):
    """The three gradients by way of autograd."""
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    y, _ = autograd.apply(op, method, x, w, b)
    return y.detach(), *torch.autograd.grad(y, (x, w, b), g)


def reference(op, x, w, b, g):
    """PyTorch's own convolution or Linear."""
    x, w, b = (t.clone().requires_grad_() for t in (x, w, b))
    if isinstance(op, LinearOp):
        y = F.linear(x, w, b)
    else:
        top, bottom, left, right = op.padding
        y = F.conv2d(
            F.pad(x, (left, right, top, bottom)), w, b, op.stride, 0, op.dilation, op.groups
        )
    return y.detach(), *torch.autograd.grad(y, (x, w, b), g)


def assert_same(found, expected, tolerance=1e-10):
    for name, a, b in zip(("y", "gx", "gw", "gb"), found, expected, strict=True):
        assert a.shape == b.shape, name
        assert (a - b).abs().max() <= tolerance * (1 + b.abs().max()), name


@convs
@pytest.mark.parametrize("method", EXACT, ids=repr)
def test_exact_settings_equal_pytorch(case, method):
    if method.supports(case.op):
        assert isinstance(method, gf.WalshHadamard)
        return
    x, w, b, g = case.tensors()
    assert_same(gradients(case.op, method, x, w, b, g), reference(case.op, x, w, b, g))


@pytest.mark.parametrize("shape", LINEARS.values(), ids=LINEARS)
@pytest.mark.parametrize("method", EXACT, ids=repr)
def test_exact_settings_equal_pytorch_linear(shape, method):
    op = LinearOp()
    if method.supports(op):
        assert isinstance(method, gf.GradientFilter | gf.GalerkinFilter)
        return
    x, w, b = torch.randn(shape).double(), torch.randn(4, 6).double(), torch.randn(4).double()
    g = torch.randn(*shape[:-1], 4).double()
    assert_same(gradients(op, method, x, w, b, g), reference(op, x, w, b, g))


@convs
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_runs_on_every_geometry(case, method):
    if method.supports(case.op):
        return
    x, w, b, g = case.tensors()
    y, gx, gw, gb = gradients(case.op, method, x, w, b, g)
    exact = reference(case.op, x, w, b, g)
    assert (y - exact[0]).abs().max() < 1e-10
    assert gx.shape == x.shape and gw.shape == w.shape
    assert all(t.isfinite().all() for t in (gx, gw, gb))
    assert (gb - exact[3]).abs().max() < 1e-10


def dense_galerkin(op, method, x, w, g):
    """P W^T U P g and <U P g, shift(U P x)> at full resolution, by index arithmetic alone."""

    def smooth(t):
        side = method.side(t.shape[-2:])
        out = torch.empty_like(t)
        for i in range(0, t.shape[-2], side[0]):
            for j in range(0, t.shape[-1], side[1]):
                block = t[..., i : i + side[0], j : j + side[1]]
                out[..., i : i + side[0], j : j + side[1]] = block.mean((-1, -2), keepdim=True)
        return out

    _, gx, gw, _ = reference(op, smooth(x), w, torch.zeros(len(w)).double(), smooth(g))
    return smooth(gx), gw


def assert_galerkin(op, method, x, w, b, g):
    _, gx, gw, _ = gradients(op, method, x, w, b, g)
    expected_gx, expected_gw = dense_galerkin(op, method, x, w, g)
    assert (gx - expected_gx).abs().max() <= 1e-10 * (1 + expected_gx.abs().max())
    assert (gw - expected_gw).abs().max() <= 1e-10 * (1 + expected_gw.abs().max())


@convs
@pytest.mark.parametrize(
    "method", [m for m in METHODS if isinstance(m, gf.GalerkinFilter)], ids=repr
)
def test_galerkin_equals_its_dense_definition(case, method):
    assert_galerkin(case.op, method, *case.tensors())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_galerkin_equals_its_dense_definition_on_drawn_geometries(data):
    small = st.integers(1, 3)
    groups, per_in, per_out = data.draw(small), data.draw(small), data.draw(small)
    kernel = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))
    dilation = (data.draw(small), data.draw(small))
    pad = tuple(data.draw(st.integers(0, 4)) for _ in range(4))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(
        data.draw(st.integers(max(1, r - pad[2 * i] - pad[2 * i + 1]), 14))
        for i, r in enumerate(reach)
    )
    op = ConvOp(kernel, (data.draw(small), data.draw(small)), pad, dilation, groups)
    knob = data.draw(st.sampled_from(["grid", "patch"]))
    method = gf.GalerkinFilter(**{knob: data.draw(st.integers(1, 8))})
    case = Case(op, groups * per_in, groups * per_out, size)
    assert_galerkin(op, method, *case.tensors(seed=data.draw(st.integers(0, 99))))


@pytest.mark.parametrize("channels, out", [(3, 64), (64, 3)])
def test_galerkin_takes_the_smaller_map_of_all_taps(channels, out):
    method, op = gf.GalerkinFilter(patch=2), ConvOp((7, 7), padding=(3, 3, 3, 3))
    case = Case(op, channels, out, (16, 16))
    x, _, _, g = case.tensors()
    with Largest() as largest:
        kept, g = method.keep(op, x), method.filter(op, g)
        method.grad_weight(op, g, kept, x.shape)
    assert largest.numbers <= 2 * 3 * 7 * 7 * 8 * 8


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_galerkin_equals_gradient_filter_on_1x1_layers(size):
    case = Case(ConvOp((1, 1)), 5, 7, size)
    tensors = case.tensors()
    found = gradients(case.op, gf.GalerkinFilter(patch=2), *tensors)
    assert_same(found, gradients(case.op, gf.GradientFilter(patch=2), *tensors))


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_walsh_hadamard_with_one_basis_is_gradient_filter(size):
    case = Case(ConvOp((1, 1)), 5, 7, size)
    tensors = case.tensors()
    found = gradients(case.op, gf.WalshHadamard(patch=4, bases=1), *tensors)
    assert_same(found, gradients(case.op, gf.GradientFilter(patch=4), *tensors))


def loop_gradient_filter(op, patch, centred, x, w, g):
    """The paper's filter pixel by pixel: patch of a pixel, then sums."""
    n, _, h, width = x.shape
    y_size = g.shape[-2:]
    count = [math.ceil(s / patch) for s in y_size]

    def patch_of(i, axis, side, size):
        start = math.ceil((count[axis] * side - size) / 2) if centred else 0
        return (i + start) // side

    groups, per = op.groups, w.shape[1]
    sums = torch.zeros(n, g.shape[1], *count).double()
    real = torch.zeros(*count).double()
    for i in range(y_size[0]):
        for j in range(y_size[1]):
            p, q = patch_of(i, 0, patch, y_size[0]), patch_of(j, 1, patch, y_size[1])
            sums[:, :, p, q] += g[:, :, i, j]
            real[p, q] += 1
    mean = sums / real.clamp(min=1)
    gx, gw = torch.zeros_like(x), torch.zeros_like(w)
    for i in range(h):
        for j in range(width):
            p = patch_of(i, 0, patch * op.stride[0], h)
            q = patch_of(j, 1, patch * op.stride[1], width)
            if not (0 <= p < count[0] and 0 <= q < count[1]):
                continue
            for o in range(w.shape[0]):
                group = o // (w.shape[0] // groups)
                channels = slice(group * per, (group + 1) * per)
                gx[:, channels, i, j] += mean[:, o, p, q, None] * w[o].sum((-1, -2))
                gw[o] += (mean[:, o, p, q, None] * x[:, channels, i, j]).sum(0)[:, None, None]
    return gx, gw


@convs
@pytest.mark.parametrize("patch", [2, 4])
@pytest.mark.parametrize("alignment", ["origin", "centred"])
def test_gradient_filter_equals_the_loop(case, patch, alignment):
    centred = alignment == "centred"
    if centred and case.op.dilation[0] > 1 and case.op.dilation[0] >= patch:
        return  # the published variant for large dilations has its own test
    x, w, b, g = case.tensors()
    _, gx, gw, _ = gradients(case.op, gf.GradientFilter(patch, alignment), x, w, b, g)
    expected_gx, expected_gw = loop_gradient_filter(case.op, patch, centred, x, w, g)
    assert (gx - expected_gx).abs().max() < 1e-10
    assert (gw - expected_gw).abs().max() < 1e-10


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("size", [(12, 12), (11, 9)])
def test_centred_filter_with_large_dilation(groups, size):
    """gx is P g convolved, tap by tap, with the rotated kernel at dilation // patch."""
    op = ConvOp((3, 3), (1, 1), (4,) * 4, (4, 4), groups)
    x, w, b, g = Case(op, 4, 4, size).tensors()
    method = gf.GradientFilter(2, "centred")
    _, gx, gw, _ = gradients(op, method, x, w, b, g)
    count = tuple(math.ceil(s / 2) for s in size)
    start = tuple(math.ceil((2 * n - s) / 2) for n, s in zip(count, size, strict=True))
    mean = patches.patch_mean(g, count, (2, 2), start)
    grid = torch.zeros(2, 4, *count).double()
    for a in range(3):
        for c in range(3):
            for p in range(count[0]):
                for q in range(count[1]):
                    i, j = p - 2 * (a - 1), q - 2 * (c - 1)
                    if 0 <= i < count[0] and 0 <= j < count[1]:
                        tap = w[:, :, a, c]
                        if groups == 1:
                            grid[:, :, p, q] += mean[:, :, i, j] @ tap
                        else:
                            grid[:, :, p, q] += mean[:, :, i, j] * tap[:, 0]
    up = grid.repeat_interleave(2, -2).repeat_interleave(2, -1)
    up = up[..., start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
    assert (gx - up).abs().max() < 1e-10
    assert (gw - gw.mean((-1, -2), keepdim=True)).abs().max() < 1e-10


def test_hosvd_keeps_the_factors_of_the_unfoldings():
    x = torch.randn(6, 5, 7, 4, generator=torch.Generator().manual_seed(1)).double()
    small, *factors = gf.Hosvd(energy=0.7).keep(ConvOp((3, 3)), x)
    for mode, factor in enumerate(factors):
        unfolding = x.movedim(mode, 0).flatten(1)
        u, s, _ = torch.linalg.svd(unfolding, full_matrices=False)
        share = (s**2).cumsum(0) / (s**2).sum()
        rank = int((share < 0.7).sum()) + 1
        assert factor.shape == (x.shape[mode], rank)
        assert ((factor * u[:, :rank]).sum(0).abs() - 1).abs().max() < 1e-9
    expected = torch.einsum("nchw,na,cb,hd,we->abde", x, *factors)
    assert (small - expected).abs().max() < 1e-10


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_hosvd_weight_gradient_is_that_of_the_rebuilt_input(groups):
    op = ConvOp((3, 3), (2, 2), (1,) * 4, groups=groups)
    x, w, b, g = Case(op, 6, 6, (9, 8), batch=4).tensors()
    method = gf.Hosvd(energy=0.6)
    small, *factors = method.keep(op, x)
    rebuilt = small
    for mode, factor in enumerate(factors):
        rebuilt = tucker.rotate(rebuilt, factor.T, mode)
    assert rebuilt.shape == x.shape and (rebuilt - x).norm() > 0.1 * x.norm()
    found = gradients(op, method, x, w, b, g)[2]
    assert (found - reference(op, rebuilt, w, b, g)[2]).abs().max() < 1e-10


def test_svd_weight_gradient_is_that_of_the_rebuilt_input():
    case = CONVS["3x3-stride2"]
    x, w, b, g = Case(case.op, 4, 6, (8, 8), batch=6).tensors()
    samples, u = gf.Svd(energy=0.6).keep(case.op, x)
    assert u.shape[1] < 6
    rebuilt = torch.einsum("nr,rchw->nchw", u, samples)
    found = gradients(case.op, gf.Svd(energy=0.6), x, w, b, g)[2]
    assert (found - reference(case.op, rebuilt, w, b, g)[2]).abs().max() < 1e-10


def test_subspace_iteration_converges_to_the_leading_subspace():
    noise = torch.Generator().manual_seed(0)
    sides = [torch.randn(size, 2, generator=noise).double() for size in (6, 5, 8, 7)]
    factors = [torch.linalg.qr(side)[0] for side in sides]
    core = torch.randn(2, 2, 2, 2, generator=noise).double()
    x = core
    for mode, factor in enumerate(factors):
        x = tucker.rotate(x, factor.T, mode)
    method, op, state = gf.SubspaceIteration(rank=2), ConvOp((3, 3)), ()
    for _ in range(30):
        kept = method.keep(op, x, state)
        state = method.next_state(kept)
    for found, true in zip(state, factors, strict=True):
        assert (found @ found.T - true @ true.T).abs().max() < 1e-8


def test_subspace_iteration_takes_any_batch_size_and_touches_no_random_state():
    op = ConvOp((3, 3))
    for method in (gf.SubspaceIteration(rank=3), gf.SubspaceIteration(energy=0.7)):
        before = torch.get_rng_state()
        state = ()
        for batch, size in ((4, 8), (4, 8), (2, 8), (7, 8), (1, 6)):
            noise = torch.Generator().manual_seed(batch)
            x = torch.randn(batch, 5, size, size, generator=noise)
            kept = method.keep(op, x, state)
            state = method.next_state(kept)
            assert [len(f) for f in state] == [batch, 5, size, size]
        assert torch.equal(before, torch.get_rng_state())


def test_int8_rounding_is_unbiased():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).double()
    noise = torch.Generator().manual_seed(1)
    draws = torch.stack([dequantise(*quantise(x, True, noise)) for _ in range(4000)])
    step = (x.amax(1) - x.amin(1)) / 255
    # the mean of 4000 draws of at most half a step's deviation: 5 standard errors
    assert ((draws.mean(0) - x).abs() < 5 * 0.5 * step[:, None] / 4000**0.5).all()
    assert ((draws[0] - x).abs() <= step[:, None] * (1 + 1e-9)).all()
    nearest = dequantise(*quantise(x, False))
    assert ((nearest - x).abs() <= step[:, None] * (0.5 + 1e-9)).all()


def test_int8_is_reproducible_under_a_generator():
    case = CONVS["3x3"]
    tensors = case.tensors()

    def run(seed):
        method = gf.Int8(generator=torch.Generator().manual_seed(seed))
        return gradients(case.op, method, *tensors)[1]

    before = torch.get_rng_state()
    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))
    assert torch.equal(before, torch.get_rng_state())


def test_int8_keeps_int8():
    case = CONVS["3x3"]
    x, *_ = case.tensors(dtype=torch.float32)
    codes, low, step = gf.Int8().keep(case.op, x)
    assert codes.dtype == torch.int8 and codes.shape == x.shape and low.shape == (2,)
    wrapped = gf.Int8(gf.GalerkinFilter(patch=2)).keep(case.op, x)
    assert wrapped[0].shape == (2, 4, 4, 4)


def test_a_constant_sample_survives_int8():
    x = torch.stack([torch.full((4,), 2.5), torch.zeros(4)])
    assert torch.equal(dequantise(*quantise(x, True)), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gf.GradientFilter(patch=0),
        lambda: gf.GradientFilter(patch=2.5),
        lambda: gf.GradientFilter(alignment="left"),
        lambda: gf.GalerkinFilter(grid=0),
        lambda: gf.GalerkinFilter(patch=-1),
        lambda: gf.GalerkinFilter(grid=7, patch=2),
        lambda: gf.Svd(energy=0),
        lambda: gf.Hosvd(energy=1.01),
        lambda: gf.Hosvd(energy=float("nan")),
        lambda: gf.SubspaceIteration(rank=0),
        lambda: gf.SubspaceIteration(energy=0.5, rank=2),
        lambda: gf.WalshHadamard(patch=3),
        lambda: gf.WalshHadamard(patch=2, bases=5),
        lambda: gf.Int8(gf.Int8()),
        lambda: gf.Int8(8),
    ],
)
def test_bad_settings_are_refused_by_name(make):
    names = "GradientFilter|GalerkinFilter|Svd|Hosvd|SubspaceIteration|WalshHadamard|Int8"
    with pytest.raises(ValueError, match=f"^({names}): "):
        make()


def test_methods_table_has_every_public_method():
    assert set(gf.METHODS.values()) == {
        gf.Exact,
        gf.GradientFilter,
        gf.GalerkinFilter,
        gf.Svd,
        gf.Hosvd,
        gf.SubspaceIteration,
        gf.WalshHadamard,
        gf.Int8,
    }
    listed = {type(m) for m in METHODS}
    assert listed == set(gf.METHODS.values())
    assert gf.GradientFilter() == gf.GradientFilter(patch=2)
    assert gf.GalerkinFilter() == gf.GalerkinFilter(grid=7)
    assert gf.SubspaceIteration() == gf.SubspaceIteration(energy=0.8)

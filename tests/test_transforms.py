"""PyTorch's transforms give the gradients of plain eager conversion."""

import copy
import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import METHODS, small_cnn
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import gradfilter as gf

methods = pytest.mark.parametrize("method", METHODS, ids=repr)
stateful = pytest.mark.parametrize("method", [m for m in METHODS if m.stateful], ids=repr)


def batch(n=4, seed=0):
    """Images that are much alike, so that every method has something to leave out."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 12, 12, generator=noise) + 0.4 * torch.randn(n, 3, 12, 12, generator=noise)
    return x, torch.randint(0, 5, (n,), generator=noise)


def converted(method):
    """A converted network, warmed up by one step where a method has a state."""
    model = small_cnn()
    gf.convert(model, method)
    if method.stateful:
        gradients(model)
    return model


def gradients(model, run=None, data=None):
    """Parameter gradients of one step through `run`; the same rounding noise every time."""
    x, t = data or batch()
    model.zero_grad()
    torch.manual_seed(0)
    F.cross_entropy((run or model)(x), t).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_close(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        assert found[name].dtype == g.dtype and found[name].shape == g.shape, name
        error = (found[name] - g).abs().max()
        assert error <= tolerance * g.abs().max() + 1e-9, (name, error, g.abs().max())


def layer_states(model):
    return [m.gf.state for m in model.modules() if hasattr(m, "gf")]


@methods
def test_there_is_an_approximation_to_preserve(method):
    exact = small_cnn()
    gf.convert(exact, gf.Exact())
    expected, found = gradients(exact), gradients(converted(method))
    errors = [((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()]
    assert max(errors) > 1e-3 or method == gf.Exact()


# torch.compile


def compiled(model, backend):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.fixture
def data_dependent_ranks():
    """PyTorch's own switch for sizes that depend on the data, as a rank by energy does."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


has_compiler = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++")))
inductor = pytest.mark.skipif(not has_compiler, reason="inductor needs a C++ compiler")
BACKENDS = [
    *((method, "aot_eager") for method in METHODS),
    pytest.param(gf.GalerkinFilter(grid=3), "inductor", marks=[inductor, pytest.mark.slow]),
    pytest.param(gf.GradientFilter(patch=2), "inductor", marks=[inductor, pytest.mark.slow]),
]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("method", "backend"), BACKENDS, ids=str)
def test_compile(method, backend, data_dependent_ranks):
    model = converted(method)
    twin = copy.deepcopy(model)
    run = compiled(model, backend)
    for step in range(3):  # the state of a warm-started method moves on in the compiled model too
        data = batch(seed=step)
        assert_close(gradients(model, run, data), gradients(twin, data=data))


def test_compiling_a_first_batch_of_unknown_ranks_is_refused(data_dependent_ranks):
    model = small_cnn()
    gf.convert(model, gf.SubspaceIteration(energy=0.8))
    with pytest.raises(Exception, match="run one training step before compiling"):
        gradients(model, compiled(model, "aot_eager"))


def test_compiling_int8_around_ranks_by_energy_is_refused(data_dependent_ranks):
    model = small_cnn()
    gf.convert(model, gf.Int8(gf.Hosvd(energy=0.8)))
    with pytest.raises(Exception, match="Int8 around Hosvd cannot be compiled: compile Hosvd"):
        gradients(model, compiled(model, "aot_eager"))


# mixed precision


def autocast(run):
    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return run(x).float()

    return call


@methods
def test_autocast_is_the_method_on_bfloat16_tensors(method):
    """One layer under autocast against the same layer cast by hand."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 1)
    gf.convert(conv, method)
    low = copy.deepcopy(conv).bfloat16()
    x = torch.randn(2, 4, 8, 8)
    grads = []
    for layer, run, data in ((conv, autocast(conv), x), (low, low, x.bfloat16())):
        data.requires_grad_()
        torch.manual_seed(0)
        run(data).float().square().mean().backward()
        grads.append([data.grad, layer.weight.grad, layer.bias.grad])
    for found, expected in zip(*grads, strict=True):
        assert found.dtype == torch.float32 and expected.dtype == torch.bfloat16
        assert torch.equal(found, expected.float())


@methods
def test_autocast_gradients_are_near_those_of_float32(method):
    model = converted(method)
    expected = gradients(copy.deepcopy(model))
    found = gradients(model, autocast(model))
    for name, g in expected.items():
        assert found[name].dtype == torch.float32
        cosine = F.cosine_similarity(found[name].flatten(), g.flatten(), dim=0)
        assert cosine > 0.95, (name, cosine)


@methods
def test_a_backward_pass_inside_autocast_is_no_different(method):
    model = converted(method)
    twin = copy.deepcopy(model)
    expected = gradients(twin, autocast(twin))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model, lambda x: model(x).float())
    assert_close(found, expected, 0.03)
    layer = nn.Conv2d(3, 4, 1)
    gf.convert(layer, method)
    inside, outside = copy.deepcopy(layer), copy.deepcopy(layer)
    loss = autocast(outside)(batch()[0]).square().mean()
    torch.manual_seed(0)
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = inside(batch()[0]).float().square().mean()
        torch.manual_seed(0)
        loss.backward()
    assert torch.equal(inside.weight.grad, outside.weight.grad)


# layouts and loops


@methods
def test_channels_last(method):
    if "Int8" in repr(method):
        return  # its noise follows the layout: see the next test
    model = converted(method)
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x, t = batch()
    expected = gradients(model)
    found = gradients(twin, data=(x.contiguous(memory_format=torch.channels_last), t))
    assert_close(found, expected)
    assert twin[0].weight.grad.stride() == twin[0].weight.stride()


def test_int8_keeps_the_same_codes_in_channels_last():
    x, _ = batch()
    codes = [
        gf.Int8().keep(None, x.contiguous(memory_format=layout))
        for layout in (torch.contiguous_format, torch.channels_last)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*codes, strict=True))


@methods
def test_gradient_accumulation(method):
    model = converted(method)
    twin = copy.deepcopy(model)
    parts = [gradients(twin, data=batch(seed=s)) for s in (1, 2, 3)]
    model.zero_grad()
    for s in (1, 2, 3):
        x, t = batch(seed=s)
        torch.manual_seed(0)
        F.cross_entropy(model(x), t).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_close(found, {name: sum(p[name] for p in parts) for name in found})


@pytest.mark.parametrize("reentrant", [False, True])
@methods
def test_checkpointing(method, reentrant):
    model = small_cnn()
    gf.convert(model, method)
    twin = copy.deepcopy(model)

    def run(x):
        x = x.clone().requires_grad_()  # reentrant checkpointing wants one
        for part in (model[:3], model[3:6], model[6:]):
            x = checkpoint(part, x, use_reentrant=reentrant)
        return x

    def plain(x):
        return twin(x.clone().requires_grad_())

    for step in range(4):  # a warm-started method goes on from its own state
        data = batch(seed=step)
        assert_close(gradients(model, run, data), gradients(twin, plain, data))
    for mine, theirs in zip(layer_states(model), layer_states(twin), strict=True):
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@stateful
def test_checkpointing_and_evaluation_may_alternate(method):
    model = small_cnn()
    gf.convert(model, method)
    twin = copy.deepcopy(model)
    for step in range(3):
        data = batch(seed=step)
        run = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
        assert_close(gradients(model, run, data), gradients(twin, data=data))
        with torch.no_grad():
            model(batch(seed=9)[0])


# torch.func and tracing


def functional_loss(model, data):
    x, t = data
    return lambda parameters: F.cross_entropy(functional_call(model, parameters, (x,)), t)


@methods
def test_func_grad_over_functional_call(method):
    model = converted(method)
    states = layer_states(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    found = torch.func.grad(functional_loss(model, batch()))(parameters)
    assert layer_states(model) == states  # a transform leaves no tensor of its own behind
    assert_close(found, gradients(model))


def test_func_second_derivatives_are_refused():
    model = converted(gf.GalerkinFilter(grid=3))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    slope = torch.func.grad(functional_loss(model, batch()))
    with pytest.raises(RuntimeError, match="double backward through a layer converted to Galerkin"):
        torch.func.grad(lambda p: sum(g.square().sum() for g in slope(p).values()))(parameters)


def count_backward_convolutions(model, data):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    step = torch.func.grad_and_value(functional_loss(model, data))
    graph = make_fx(step)(parameters)
    nodes = [n for n in graph.graph.nodes if "convolution_backward" in str(n.target)]
    grads, loss = graph(parameters)
    assert_close(grads, gradients(model, data=data))
    assert loss.ndim == 0
    return len(nodes)


@pytest.mark.parametrize(
    "method", [m for m in METHODS if isinstance(m, gf.GalerkinFilter | gf.GradientFilter)], ids=repr
)
def test_a_traced_step_has_no_dense_convolution_gradient(method):
    assert count_backward_convolutions(converted(method), batch()) == 0


def test_a_traced_exact_step_has_dense_convolution_gradients():
    # both gradients of three layers, but for the input gradient of the first
    assert count_backward_convolutions(converted(gf.Exact()), batch()) == 5


# distributed


DISTRIBUTED = [
    gf.Exact(),
    gf.GradientFilter(patch=2),
    gf.GalerkinFilter(grid=3),
    gf.Svd(energy=0.8),
    gf.Hosvd(energy=0.8),
    gf.SubspaceIteration(energy=0.8),
    gf.SubspaceIteration(rank=2),
    gf.WalshHadamard(patch=2, bases=3),
    gf.Int8(gf.GalerkinFilter(grid=3)),
]


def distributed_model(method):
    model = small_cnn()
    gf.convert(model, method, last=1 if isinstance(method, gf.GalerkinFilter) else None)
    return model


def train_distributed(rank, folder):
    """One of two processes: two steps of every method under DDP; rank 0 writes its gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = []
    for method in DISTRIBUTED:
        model = distributed_model(method)
        run = nn.parallel.DistributedDataParallel(model)
        found.append([gradients(model, run, batch(seed=2 * step + rank)) for step in range(2)])
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def test_two_process_ddp(tmp_path, one_thread):
    """The gradients are the mean of what two processes compute, each with its own state."""
    torch.multiprocessing.spawn(train_distributed, (str(tmp_path),), nprocs=2)
    found = torch.load(tmp_path / "found.pt")
    for method, steps in zip(DISTRIBUTED, found, strict=True):
        models = [distributed_model(method) for _ in range(2)]
        for step, grads in enumerate(steps):
            one, two = (
                gradients(model, data=batch(seed=2 * step + rank))
                for rank, model in enumerate(models)
            )
            assert_close(grads, {name: (one[name] + two[name]) / 2 for name in one})

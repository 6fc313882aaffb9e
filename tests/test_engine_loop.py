"""Ordinary PyTorch around the engine: the training loop does not change."""

import copy
import gc
import io
import pickle
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import Network, Unit, engines
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import gradfilter as gf

METHOD = gf.GalerkinFilter(grid=3)
BLOCKS = [
    ("chain", Unit(stride=2, bias=False, norm="affine", act="silu"), "none"),
    ("residual", Unit(8, norm="affine", act="gelu"), "none"),
    ("gate", Unit(kernel=1, bias=False, norm="affine", act="silu"), "none"),
    ("project", Unit(stride=2, norm="bare"), "silu"),
    ("drop", Unit(2, kernel=5), "silu"),
]


class Classifier(Network):
    """Smooth, so that rounding chooses no side."""

    def __init__(self, seed=0):
        super().__init__(BLOCKS, "vector", seed)

    def forward(self, x):
        return super().forward(x)[0]


def network() -> nn.Module:
    """In evaluation mode: without stochastic depth."""
    return Classifier().eval()


def batch(n=4, size=20, seed=0, dtype=torch.float64):
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, size, size, generator=noise, dtype=dtype)
    return x, torch.randint(0, 5, (n,), generator=noise)


def loss_of(model, data=None):
    x, t = data or batch(dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(x), t)


def gradients(model, data=None):
    model.zero_grad()
    loss_of(model, data).backward()
    return grads(model)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys() and found
    floor = 1e-2 * max(float(g.abs().max()) for g in expected.values())
    for name, e in expected.items():
        error = float((found[name] - e).detach().abs().max())
        assert error <= tolerance * max(float(e.abs().max()), floor), (name, error)


@pytest.fixture
def pair():
    """The layer level and the engine, in float64."""
    layer, engine = engines(network(), METHOD, batch()[0])
    return layer.eval(), engine.eval()


@pytest.fixture
def engine(pair):
    return pair[1]


def test_training_with_momentum_a_schedule_and_clipping(pair):
    """Ten steps in training mode, stochastic depth drawn from one seed, end at one place."""
    losses = []
    for model in pair:
        model.train()
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(10):
            optimizer.zero_grad()
            loss = loss_of(model, batch(seed=step % 3))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for p, q in zip(*(m.parameters() for m in pair), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
    assert losses[1] < loss_of(network().double(), batch(seed=0)).item()


def test_accumulation_is_the_sum_of_micro_batches(engine):
    x, t = batch(4)
    halves = [(x[:2], t[:2]), (x[2:], t[2:])]
    one, two = (gradients(engine, half) for half in halves)
    engine.zero_grad()
    for half in halves:
        loss_of(engine, half).backward()
    assert_close(grads(engine), {name: one[name] + two[name] for name in one}, 1e-12)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forward_passes_before_their_backward_passes(engine, order):
    data = batch(seed=1), batch(n=2, size=15, seed=2)
    one, two = (gradients(engine, d) for d in data)
    engine.zero_grad()
    losses = [loss_of(engine, d) for d in data]
    for i in order:
        losses[i].backward()
    assert_close(grads(engine), {name: one[name] + two[name] for name in one}, 1e-12)


def test_a_graph_kept_for_a_second_backward_pass(engine):
    once = gradients(engine)
    engine.zero_grad()
    loss = loss_of(engine)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close(grads(engine), {name: 2 * g for name, g in once.items()}, 1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_without_gradients(engine):
    """The model's own forward pass, and nothing kept."""
    x, _ = batch()
    expected = network().double()(x)
    with torch.no_grad():
        assert not engine(x).requires_grad
        torch.testing.assert_close(engine(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(engine(x), expected)
    torch.testing.assert_close(engine(x), expected)
    engine.requires_grad_(False)
    y = engine(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("statistics", ["frozen", "batch"])
def test_switching_between_training_and_evaluation(statistics):
    layer, engine = engines(network(), METHOD, batch()[0], statistics)
    for training in (True, False, True, False):
        for model in (layer, engine):
            model.train(training)
            torch.manual_seed(3)
            model.found = gradients(model)
        assert_close(engine.found, layer.found)
    for a, b in zip(layer.buffers(), engine.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert engine.blocks[0].unit[1].num_batches_tracked == (2 if statistics == "batch" else 0)


def test_a_changing_batch_and_image_size(pair, monkeypatch):
    layer, engine = pair
    for n, size in ((1, 20), (5, 9), (2, 33), (1, 20), (3, 4)):
        assert_close(gradients(engine, batch(n, size)), gradients(layer, batch(n, size)))
    monkeypatch.setattr("gradfilter.region.run.SIZES", 2)  # sizes are forgotten, midway
    for n, size in ((1, 20), (2, 21), (1, 20)):
        assert_close(gradients(engine, batch(n, size)), gradients(layer, batch(n, size)))


def test_weights_changed_from_outside_take_effect_at_the_next_forward(pair):
    """A loaded checkpoint, an optimizer step, an assignment to the data, a frozen layer."""
    layer, engine = pair
    other = Classifier(seed=7).double()
    steps = [
        lambda m: m.load_state_dict(other.state_dict()),
        lambda m: torch.optim.SGD(m.parameters(), lr=1.0).step(),
        lambda m: [p.data.copy_(p.data * 1.5) for p in m.parameters()],
        lambda m: m.blocks[0].unit[1].running_mean.add_(1),
        lambda m: setattr(m.stem, "weight", nn.Parameter(m.stem.weight.detach() * 2)),
        lambda m: m.blocks[1].requires_grad_(False),
        lambda m: m.requires_grad_(True),
    ]
    for step in steps:
        before = gradients(engine)
        for model in pair:
            gradients(model)
            step(model)
        found = gradients(engine)
        assert_close(found, gradients(layer))
        changed = found.keys() != before.keys()
        assert changed or any((found[k] - before[k]).abs().max() > 1e-6 for k in found)


def test_modules_replaced_from_outside_take_effect_at_the_next_forward(pair):
    """A new layer is not converted, and a new batch norm not frozen, until the next conversion."""
    layer, engine = pair
    gradients(engine)
    torch.manual_seed(1)
    stem, fc = nn.Conv2d(3, 8, 5, padding=2).double(), nn.Linear(8, 5, bias=False).double()
    for model in pair:
        model.stem, model.fc = copy.deepcopy(stem), copy.deepcopy(fc)
        model.blocks[0].unit[1] = nn.BatchNorm2d(8, affine=False).double().eval()
    assert_close(gradients(engine), gradients(layer))
    assert engine.stem.weight.grad.shape == (8, 3, 5, 5)


def test_saving_and_loading_while_converted(engine):
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    file.seek(0)
    expected = gradients(engine)
    plain = network().double()
    assert plain.state_dict().keys() == engine.state_dict().keys()
    plain.load_state_dict(torch.load(file))
    gf.convert(plain, METHOD, example=batch()[0])
    assert_close(gradients(plain), expected, 1e-12)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_engaged_and_apart(engine, duplicate):
    expected = gradients(engine)
    twin = duplicate(engine)
    assert twin.gf_engine is not engine.gf_engine
    assert_close(gradients(twin), expected, 1e-12)
    assert set(twin.gf_engine.modules) == set(twin.modules())
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.1)
    assert_close(gradients(engine), expected, 1e-12)
    gf.revert(twin)
    assert hasattr(engine, "gf_engine") and type(twin) is Classifier


def test_revert_restores_the_class_of_the_root(engine):
    before = {name: id(p) for name, p in engine.named_parameters()}
    assert type(engine) is not Classifier and isinstance(engine, Classifier)
    gf.revert(engine)
    assert type(engine) is Classifier and "gf_engine" not in engine.__dict__
    assert {name: id(p) for name, p in engine.named_parameters()} == before
    assert_close(gradients(engine), gradients(network().double()), 1e-12)


def test_hooks_of_the_root_and_of_its_parameters_fire(engine):
    calls = []
    engine.register_forward_pre_hook(lambda *_: calls.append("before"))
    engine.register_forward_hook(lambda *_: calls.append("after"))
    engine.register_full_backward_hook(lambda *_: calls.append("backward"))
    engine.stem.weight.register_hook(lambda g: calls.append("gradient"))
    engine.stem.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    gradients(engine)
    assert calls[:2] == ["before", "after"]
    assert sorted(calls[2:]) == ["accumulated", "backward", "gradient"]


@pytest.mark.parametrize("inside", [False, True])
def test_bfloat16_autocast(inside):
    """Gradients are float32, finite and near those without; `inside` runs backward there too."""
    _, engine = engines(network(), METHOD, batch(dtype=torch.float32)[0])
    expected = gradients(engine.eval())
    engine.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(engine)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    found = grads(engine)
    assert found.keys() == expected.keys()
    for name, g in found.items():
        assert g.dtype == torch.float32 and g.isfinite().all(), name
    flat = [torch.cat([g.flatten() for g in each.values()]) for each in (found, expected)]
    assert F.cosine_similarity(*flat, dim=0) > 0.98
    assert not torch.equal(*flat)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(engine, reentrant):
    expected = gradients(engine)
    engine.zero_grad()
    x, t = batch()
    y = checkpoint(engine, x.requires_grad_(), use_reentrant=reentrant)
    F.cross_entropy(y, t).backward()
    assert_close(grads(engine), expected, 1e-12)


@pytest.fixture
def layers():
    """The gradients of the converted layers, one by one."""
    alone = network().double()
    gf.convert(alone, METHOD)
    return gradients(alone)


def test_compiled_it_is_the_layer_level(engine, layers):
    compiled = torch.compile(engine, backend="aot_eager", fullgraph=True)
    loss_of(compiled, batch()).backward()
    assert_close(grads(engine), layers)


def test_transformed_it_is_the_layer_level(engine, layers):
    x, t = batch()

    def loss(parameters):
        return F.cross_entropy(functional_call(engine, parameters, (x,)), t)

    assert_close(torch.func.grad(loss)(dict(engine.named_parameters())), layers)


def test_traced_it_is_the_layer_level(engine, layers):
    """With real tensors and with fake ones, of which the kernels could read nothing."""
    x, t = batch()
    parameters = dict(engine.named_parameters())

    def loss_gradient(*tensors):
        given = dict(zip(parameters, tensors, strict=True))
        loss = F.cross_entropy(functional_call(engine, given, (x,)), t)
        return torch.autograd.grad(loss, tensors)

    traced = make_fx(loss_gradient)(*parameters.values())
    found = dict(zip(parameters, traced(*parameters.values()), strict=True))
    assert_close(found, layers)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = engine(mode.from_tensor(x))
    assert y.shape == (4, 5) and isinstance(y, FakeTensor)


def test_functional_call_runs_the_engine_on_the_tensors_given(engine):
    doubled = {name: (2 * p).detach().requires_grad_() for name, p in engine.named_parameters()}
    x, t = batch()
    F.cross_entropy(functional_call(engine, doubled, (x,)), t).backward()
    with torch.no_grad():
        for p in engine.parameters():
            p.mul_(2)
    assert_close({name: p.grad for name, p in doubled.items()}, gradients(engine), 1e-12)


def test_double_backward_is_refused(engine):
    loss = loss_of(engine)
    (g,) = torch.autograd.grad(loss, engine.stem.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice|double backward"):
        g.sum().backward()


def train_distributed(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = network().double()
    gf.convert(model, METHOD, example=batch()[0])
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        model.zero_grad()
        loss_of(parallel, batch(seed=10 * step + rank)).backward()
    torch.save(grads(model), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_have_the_mean_gradient(engine, tmp_path):
    torch.multiprocessing.spawn(train_distributed, (str(tmp_path),), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    ranks = [gradients(engine, batch(seed=10 + rank)) for rank in (0, 1)]
    mean = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in ranks[0]}
    assert_close(one, mean, 1e-12)
    assert_close(two, mean, 1e-12)


def resident():
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_steps_leave_resident_memory_flat():
    """300 steps; benchmarks/leak.py takes 2,000. One full map a step would show."""
    _, engine = engines(network(), METHOD, batch(dtype=torch.float32)[0])
    optimizer = torch.optim.SGD(engine.parameters(), lr=1e-3, momentum=0.9)
    data = batch(n=2, size=64, dtype=torch.float32)  # [2, 8, 64, 64] is 256 KiB
    for step in range(350):
        optimizer.zero_grad()
        loss_of(engine, data).backward()
        optimizer.step()
        if step == 50:
            gc.collect()
            before = resident()
    gc.collect()
    assert resident() - before < 8 * 2**20

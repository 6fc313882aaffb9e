"""Exported steps in ONNX Runtime: real networks, refusals, the command."""

import copy

import exported
import networks
import numpy as np
import onnx
import pytest
import tiny
import torch
from exported import assert_close, in_pytorch, optimizer_of
from torch import nn

import gradfilter as gf
from gradfilter.export import Runner, check, optimizers, trace
from gradfilter.recipes import datasets, exporting, models
from gradfilter.recipes.settings import Settings
from gradfilter.recipes.trainer import Trainer


def converted(name: str, what, size: int = 64, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = networks.named(name).to(dtype)
    x = torch.randn(3, 3, size, size, dtype=dtype)
    gf.convert(model, what, example=x, **options)
    return model, x, torch.randint(10, (3,))


def test_a_real_network_in_float64(tmp_path):
    model, x, target = converted(
        "mobilenet_v2", gf.GalerkinFilter(grid=7), 40, torch.float64, last=8
    )
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    folder = exported.exported(model, x, target, tmp_path, optimizer=optimizer)
    folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer)
    expected.pop("loss")
    assert_close(folder.values, expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [gf.GalerkinFilter(grid=7), gf.GradientFilter(patch=2), gf.Exact()]
)
@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "tf_efficientnet_lite0"])
def test_real_networks_in_onnx_runtime(name, what, tmp_path):
    model, x, target = converted(name, what, last=6)
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    folder = exported.exported(model, x, target, tmp_path, exported.runtime, optimizer=optimizer)
    loss = folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer)
    assert_close(folder.values | {"loss": np.array(loss, np.float32)}, expected, 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcn-mobilenet_v2", "pspnet-resnet18", "unet-mobilenet_v2"])
def test_segmentation_networks_in_onnx_runtime(name, tmp_path):
    torch.manual_seed(0)
    model = models.build(name, 5, task="segmentation", weights="none", size=64).model
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    layers[-1].reset_parameters()  # it starts at 0, which hands back no gradient
    x, target = torch.randn(2, 3, 64, 64), torch.randint(5, (2, 64, 64))
    gf.convert(model, gf.GalerkinFilter(patch=2), example=x, last=8)
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    folder = exported.exported(model, x, target, tmp_path, exported.runtime, optimizer=optimizer)
    loss = folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer)
    assert_close(folder.values | {"loss": np.array(loss, np.float32)}, expected, 2e-4)


def test_the_loss_of_large_masks(tmp_path):
    """Fifty thousand pixels, all alike as at the start, added up without losing digits."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 5, 1)), torch.randn(2, 3, 160, 160)
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    gf.convert(model, gf.Exact(), example=x)
    target = torch.randint(5, (2, 160, 160))
    folder = exported.exported(model, x, target, tmp_path, exported.runtime)
    expected = nn.functional.cross_entropy(model(x).double(), target).item()
    assert folder.step(x, target) == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shufflenet_v2_x1_0", "mobilenet_v3_small"])
def test_all_layers_of_networks_with_many_norms(name, tmp_path):
    """Long lists of sizes stay in the graph: ONNX Runtime reads them before it loads anything."""
    model, x, target = converted(name, gf.GalerkinFilter(grid=7))
    optimizer = optimizer_of(model, torch.optim.SGD)
    folder = exported.exported(model, x, target, tmp_path, exported.runtime, optimizer=optimizer)
    loss = folder.step(x, target)
    assert loss == pytest.approx(in_pytorch(model, x, target, optimizer)["loss"].item(), rel=1e-4)


def test_fifty_steps_on_real_pictures(tmp_path):
    """Free-running in float32: the same loss, and the same accuracy on other digits."""
    (images, classes), (test, truth) = datasets.digits.digits(24)
    x = (images.float() - 127) / 64
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6(),
        nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10),
    )  # fmt: skip
    gf.convert(model, gf.GalerkinFilter(grid=4), example=x[:2])
    optimizer = optimizer_of(model, torch.optim.SGD, momentum=0.9)
    folder = exported.exported(
        model, x[:2], classes[:2], tmp_path, exported.runtime, optimizer=optimizer, clip=2.0
    )
    losses = []
    for i in range(50):
        part = slice(28 * i, 28 * (i + 1))
        found = folder.step(x[part], classes[part])
        expected = in_pytorch(model, x[part], classes[part], optimizer, 2.0)["loss"]
        losses.append((found, float(expected)))
    found, expected = np.array(losses[-10:]).mean(0)
    assert expected < 1  # it learns
    assert abs(found - expected) < 0.01 * expected
    with torch.no_grad():
        inputs = (test.float() - 127) / 64
        by_torch = (model.eval()(inputs).argmax(1) == truth).float().mean()
    by_runtime = (folder.scores(inputs).argmax(1) == truth.numpy()).mean()
    assert abs(by_runtime - float(by_torch)) <= 0.01


def test_a_frozen_front_has_its_batch_norms_folded(tmp_path):
    model, x, target = converted("mobilenet_v2", gf.GalerkinFilter(grid=7), last=4)
    path = gf.export(model, x, target, tmp_path)
    graph = onnx.load(path / "train.onnx", load_external_data=False).graph
    bodies = [a.g for n in graph.node for a in n.attribute if a.name == "body"]
    constants = {i.name for g in (graph, *bodies) for i in g.initializer}
    nodes = [n for g in (graph, *bodies) for n in g.node]
    front = [n for n in nodes if n.op_type == "Conv" and n.input[1] in constants]
    assert len(front) == 48  # of 52 convolutions
    assert not any(n.op_type == "BatchNormalization" for n in nodes)


def test_an_exact_gradient_that_slips_in_is_refused(monkeypatch, tmp_path):
    model, x, target = converted("mobilenet_v2", gf.GalerkinFilter(grid=7), last=4)
    plain = copy.deepcopy(model)
    gf.revert(plain)
    methods = check.filtered(model)
    monkeypatch.setattr(check, "filtered", lambda _: methods)
    gf.convert(plain, gf.Exact(), last=6)
    with pytest.raises(ValueError, match="came out exact"):
        gf.export(plain, x, target, tmp_path)


def test_no_convolution_backward_is_left_where_all_is_filtered():
    model, x, target = converted("mobilenet_v2", gf.GalerkinFilter(grid=7))
    model.eval()  # dropout is random, and refused
    found = trace.traced(
        lambda x: tuple(
            torch.autograd.grad(model(x).sum(), [p for p in model.parameters() if p.requires_grad])
        ),
        [x],
    )
    assert not any(call.target is check.BACKWARD for call in found.calls)


def test_what_cannot_be_exported_is_told(tmp_path):
    model, x, target = converted("mobilenet_v2", gf.GalerkinFilter(grid=7))
    with pytest.raises(ValueError, match="SGD or AdamW"):
        gf.export(model, x, target, tmp_path, optimizer=torch.optim.Adagrad(model.parameters()))
    with pytest.raises(ValueError, match="int64"):
        gf.export(model, x, target.float(), tmp_path)
    with pytest.raises(ValueError, match="convert the model first"):
        gf.export(networks.named("mobilenet_v2"), x, target, tmp_path)
    groups = [{"params": [p], "lr": 0.1} for p in model.parameters()]
    groups[0]["momentum"] = 0.1
    with pytest.raises(ValueError, match="same settings"):
        gf.export(model, x, target, tmp_path, optimizer=torch.optim.SGD(groups))
    for method, why in {
        gf.SubspaceIteration(rank=2): "remembers",
        gf.Hosvd(energy=0.8): "reads a number",
        gf.Svd(energy=0.8): "reads a number",
        gf.Int8(gf.Exact()): "random|no ONNX form",
    }.items():
        other, x, target = converted("mobilenet_v2", method, 32, last=2)
        with pytest.raises(ValueError, match=why) as told:
            gf.export(other, x, target, tmp_path)
        layers = [
            n for n, m in other.named_modules() if hasattr(m, "gf") and m.weight.requires_grad
        ]
        assert any(f"layer {name!r} has {method!r}" in str(told.value) for name in layers)
    batched, x, target = converted("mobilenet_v2", gf.Exact(), 32, norm="batch")
    with pytest.raises(ValueError, match="frozen"):
        gf.export(batched.train(), x, target, tmp_path)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "reflection_pad2d": nn.ReflectionPad2d(1),
    "replication_pad2d": nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"),
    "upsample_bicubic2d": nn.Upsample(scale_factor=2, mode="bicubic"),
    "adaptive_max_pool2d": nn.AdaptiveMaxPool2d(2),
    "no_stats": nn.InstanceNorm2d(4),
    "gradient of a transposed convolution": nn.ConvTranspose2d(4, 4, 2, 2),
    "not of two dimensions": nn.Conv1d(4, 4, 3),
    "written in place": nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_a_layer_without_a_form_is_told_by_name(why, tmp_path):
    """One that no method is for, beside a layer with a method that need not have a form."""
    torch.manual_seed(0)
    inner, x = copy.deepcopy(REFUSED[why]), torch.randn(2, 3, 12, 12)
    if isinstance(inner, nn.Conv1d):
        inner = nn.Sequential(nn.Flatten(2), inner, nn.Unflatten(2, (-1, 1)))
    front = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Sequential(inner), nn.Conv2d(4, 4, 1)
    )
    model = nn.Sequential(front, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    gf.convert(model, {"*": gf.Exact(), "0.3": gf.WalshHadamard()}, example=x)
    with pytest.raises(ValueError, match=rf"{why}.*, in module '0\.2\.0[.1]*'$"):
        gf.export(model, x, torch.tensor([0, 1]), tmp_path)


def some_layers() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Three layers, the first of them frozen."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1)]
    model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 5)), torch.randn(2, 3, 12, 12)
    gf.convert(model, {"*": gf.Exact(), "0": "frozen"}, example=x)
    return model, x, torch.tensor([0, 1])


@pytest.mark.parametrize("batch", [0, -1, True, 2.0, "2"])
def test_a_batch_is_a_whole_number(batch, tmp_path):
    model, x, target = some_layers()
    with pytest.raises(ValueError, match="whole number >= 1"):
        gf.export(model, x, target, tmp_path, batch=batch)


def test_targets_and_types_that_mean_nothing_are_told(tmp_path):
    model, x, target = some_layers()
    for images, classes, why in (
        (x, [0, 1], "target must be int64"),
        (x, None, "target must be int64"),
        (x, target[:1], "2 images in example, but 1 in target"),
        (x.half(), target, "example must be float32 or float64, not torch.float16"),
        (x.byte(), target, "not torch.uint8"),
    ):
        with pytest.raises(ValueError, match=why):
            gf.export(model, images, classes, tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=f"the model is {dtype}; make it float"):
            gf.export(model.to(dtype), x.to(dtype), target, tmp_path)
    assert not list(tmp_path.iterdir())


class Named(nn.Module):
    """A layer, and a factor of its output that has a name of its own."""

    def __init__(self, name: str):
        super().__init__()
        self.layer, self.name = nn.Conv2d(3, 4, 3), name
        self.register_parameter(name, nn.Parameter(torch.ones(())))

    def forward(self, x):
        return self.layer(x).mean((2, 3)) * getattr(self, self.name)


@pytest.mark.parametrize(
    "name", ["rate", "loss", "images", "targets", "step", "scores", "file", "about"]
)
def test_a_parameter_with_a_name_of_the_graphs_own_is_refused(name, tmp_path):
    x, target = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    for own in ("factor", name):
        model = Named(own)
        gf.convert(model, gf.Exact(), example=x)
        if own == "factor":
            gf.export(model, x, target, tmp_path / own)
            continue
        with pytest.raises(ValueError, match=f"a parameter is called '{name}'"):
            gf.export(model, x, target, tmp_path / own)


def test_a_parameter_with_the_name_of_those_that_are_joined(tmp_path):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    joint = nn.ParameterList([torch.randn(64, 70) * 0.1, torch.randn(70)])
    network = networks.Call(
        lambda m, x: m.inner(x) @ m.joint[0] + m.joint[1], inner=inner, joint=joint
    )
    x, target = torch.randn(2, 3, 12, 12), torch.tensor([0, 1])
    gf.convert(network, gf.Exact(), example=x)
    optimizer = optimizer_of(network, torch.optim.SGD, momentum=0.9)
    folder = exported.exported(network, x, target, tmp_path, exported.runtime, optimizer=optimizer)
    folder.step(x, target)
    expected = in_pytorch(network, x, target, optimizer)
    assert "joint.0" in expected
    expected.pop("loss")
    assert_close(folder.values, expected, 1e-4)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    model, x, target = some_layers()
    for other, why in (
        (model[5].parameters(), "does not train '2.weight'"),
        (some_layers()[0].parameters(), "not the model's"),
        ([*model.parameters(), nn.Parameter(torch.zeros(3))], "not the model's"),
    ):
        with pytest.raises(ValueError, match=why) as told:
            gf.export(model, x, target, tmp_path, optimizer=torch.optim.SGD(other, lr=0.1))
        assert "\n" not in str(told.value)
    assert not list(tmp_path.iterdir())


def test_frozen_parameters_in_an_optimizer_change_nothing(tmp_path):
    """Neither the rate of their group nor its other settings."""
    model, x, target = some_layers()
    first = {"params": model[0].parameters(), "lr": 10 * exported.RATE, "weight_decay": 0.1}
    rest = {"params": [*model[2].parameters(), *model[5].parameters()]}
    optimizer = torch.optim.SGD([first, rest], lr=exported.RATE)
    folder = exported.exported(model, x, target, tmp_path, exported.runtime, optimizer=optimizer)
    folder.step(x, target)
    expected = in_pytorch(model, x, target, optimizer)
    expected.pop("loss")
    assert_close(folder.values, expected, 1e-4)


@pytest.mark.parametrize("what, highest", [("frozen", 0.3), ("exact", 1.0)])
def test_the_rate_of_a_run_is_that_of_its_fastest_group(what, highest, monkeypatch, tmp_path):
    """Where the output layer is frozen no parameter has all of --lr."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"'*': exact\n'classifier.1': {what}\n")
    settings = Settings(
        model="mobilenet_v2", weights="none", size=32, plan=str(plan), device="cpu", lr=0.05,
        backbone_lr=0.3,
    )  # fmt: skip
    trainer, given = Trainer(settings, "classification", ("a", "b")), {}
    monkeypatch.setattr(gf, "export", lambda *_, **options: given.update(options))
    exporting.write(trainer, tmp_path / "exported")
    assert given["runner"].recipe["lr"] == pytest.approx(0.05 * highest)
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    _, own = optimizers.understood(given["optimizer"], trained)
    assert {o.share for o in own.values()} == ({1} if what == "frozen" else {1, 0.3})


def test_what_a_runner_cannot_feed_is_told(tmp_path):
    def layers(channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1))

    names, grey = ("a", "b", "c", "d"), torch.zeros(2, 1, 8, 8)
    colours, masks = torch.zeros(2, 3, 8, 8), torch.zeros((2, 8, 8), dtype=torch.int64)
    about = (127.0,) * 3, (64.0,) * 3
    strange = (1.0, 2.0), (1.0, 2.0, float("nan")), (1.0, 2.0, "3"), None, 127.0
    for x, target, runner, why in (
        (colours, masks, Runner(*about, names[:3]), "3 classes, the model 4"),
        (grey, masks, Runner(*about, names), "3 channels"),
        (colours, masks[:, :4], Runner(*about, names), "size of the images"),
        (colours, masks, Runner(*about, names, recipe={"momentum": 0.9}), "no 'momentum'"),
        *((colours, masks, Runner(mean, about[1], names), "3 finite numbers") for mean in strange),
        *((colours, masks, Runner(about[0], std, names), "3 numbers above 0") for std in strange),
        (colours, masks, Runner(about[0], (1.0, 0.0, 1.0), names), "3 numbers above 0"),
    ):
        model = layers(x.shape[1])
        gf.convert(model, gf.GalerkinFilter(patch=2), example=x)
        with pytest.raises(ValueError, match=why):
            gf.export(model, x, target, tmp_path, runner=runner)
    assert not list(tmp_path.iterdir())


def test_the_model_is_left_as_it_was(tmp_path):
    model, x, target = converted("mobilenet_v2", gf.GalerkinFilter(grid=7), last=4)
    model.train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    gf.export(model, x, target, tmp_path)
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    model(x).sum().backward()  # and the engine still runs


def test_the_command_writes_a_run(tmp_path):
    photos = tiny.photographs(tmp_path / "photos")
    options = ("--model", "mobilenet_v2", "--weights", "none", "--size", 32, "--epochs", 1)
    more = ("--no-compare", "--no-tensorboard", "--out", tmp_path / "run", "--last", 3)
    done = tiny.run("train", "--data", photos, *options, *more)
    assert done.returncode == 0, done.stderr
    done = tiny.run("export", tmp_path / "run", "--to", tmp_path / "step.onnx", "--batch", 2)
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (tmp_path / "step").iterdir()}
    assert {"train.onnx", "predict.onnx", "parameters.npz", "manifest.json"} <= names
    refused = tiny.run("export", tmp_path / "none", "--to", tmp_path / "x")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1

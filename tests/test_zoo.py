"""Real architectures: convert, train one step, revert."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfilter as gf

GALERKIN = gf.GalerkinFilter(grid=7)

# the smallest model of every family: builder, image side, settings
CLASSIFICATION = {
    "alexnet": (64, {}),
    "convnext_tiny": (64, {}),
    "densenet121": (64, {}),
    "efficientnet_b0": (64, {}),
    "googlenet": (64, {"init_weights": False}),
    "inception_v3": (96, {"init_weights": False, "aux_logits": False}),
    "maxvit_t": (224, {}),
    "mnasnet0_5": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "regnet_y_400mf": (64, {}),
    "resnet18": (64, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "squeezenet1_1": (64, {}),
    "swin_t": (64, {}),
    "vgg11": (32, {}),
    "vit_b_16": (64, {"image_size": 64}),
}
SEGMENTATION = {
    "deeplabv3_mobilenet_v3_large": (64, {"aux_loss": True}),
    "fcn_resnet50": (64, {}),
    "lraspp_mobilenet_v3_large": (64, {}),
}
SMP = {"DeepLabV3": 64, "FPN": 64, "PSPNet": 64, "UPerNet": 64, "Unet": 64}
# batch norms with their activation in all of them; Conv2dSame in those from TensorFlow
TIMM = {"tf_efficientnet_lite0": 64, "regnetx_002": 64, "tf_mobilenetv3_small_minimal_100": 64}

# beside GALERKIN, which every model gets, each gets the next of these
ROTATION = [
    gf.GradientFilter(patch=2),
    gf.Hosvd(energy=0.8),
    gf.Int8(gf.GalerkinFilter(grid=4)),
    gf.SubspaceIteration(rank=4),
    gf.Svd(energy=0.8),
    gf.WalshHadamard(patch=4, bases=3),
    gf.GradientFilter(patch=4, alignment="centred"),
    gf.SubspaceIteration(energy=0.7),
    gf.Int8(),
]


def rotating(names):
    return [(name, ROTATION[i % len(ROTATION)]) for i, name in enumerate(names)]


def outputs(y):
    """The maps or scores of a model, whatever they come in."""
    if isinstance(y, torch.Tensor):
        return [y]
    return [t for t in (y.values() if isinstance(y, dict) else y) if t is not None]


def wake(model, x):
    """As after pretraining: fitting batch-norm statistics, no weights that are 0."""
    for p in model.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 1.0
    with torch.no_grad():
        model.train()(x)


def backward(model, x):
    """A backward pass towards class 0; gives the names of the parameters it reached."""
    model.train()
    model.zero_grad()
    torch.manual_seed(0)
    loss = sum(-F.log_softmax(y, 1)[:, 0].mean() for y in outputs(model(x)))
    loss.backward()
    assert loss.isfinite()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(g.isfinite().all() for g in grads.values())
    return set(grads)


def check(model, x, method, **options):
    """Convert, train a step, revert; gives the plan."""
    classes = [type(m) for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    keys = list(model.state_dict())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    reached = backward(model, x)
    plan = gf.convert(model, method, **options)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert plan.converted and backward(model, x) == reached & trained
    torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-4).step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved <= trained
    for name in plan.converted:
        assert f"{name}.weight" in moved or f"{name}.weight" not in reached, name
    with torch.no_grad():
        converted = outputs(model.eval()(x))
        gf.revert(model)
        assert all(map(torch.equal, converted, outputs(model.eval()(x))))
    assert [type(m) for m in model.modules()] == classes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert list(model.state_dict()) == keys
    return plan


def check_both(model, side, method):
    """Everything with GalerkinFilter, then the last layers with another method."""
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    wake(model, x)
    plan = check(model, x, GALERKIN)
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    assert list(plan.converted) == convolutions  # each of them, subclasses too
    enough = sum(isinstance(m, nn.Conv2d) for m in model.modules()) > 4
    last = 2 if enough and not isinstance(method, gf.WalshHadamard) else 1
    plan = check(model, x, method, last=last, example=x, norm="batch")
    assert set(plan.converted.values()) == {method}
    assert len(plan.converted) == last


@pytest.mark.filterwarnings("ignore:.*torch.meshgrid")
@pytest.mark.parametrize(("name", "method"), rotating(CLASSIFICATION))
def test_torchvision_classification(name, method):
    models = pytest.importorskip("torchvision").models
    side, settings = CLASSIFICATION[name]
    torch.manual_seed(0)
    model = getattr(models, name)(weights=None, num_classes=4, **settings)
    check_both(model, side, method)


@pytest.mark.parametrize(("name", "method"), rotating(SEGMENTATION))
def test_torchvision_segmentation(name, method):
    models = pytest.importorskip("torchvision").models.segmentation
    side, settings = SEGMENTATION[name]
    torch.manual_seed(0)
    build = getattr(models, name)
    model = build(weights=None, weights_backbone=None, num_classes=4, **settings)
    check_both(model, side, method)


@pytest.mark.parametrize(("name", "method"), rotating(TIMM))
def test_timm(name, method):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4)
    kinds = {type(m).__name__ for m in model.modules()}
    assert "BatchNormAct2d" in kinds
    assert ("Conv2dSame" in kinds) == name.startswith("tf_")
    check_both(model, TIMM[name], method)


@pytest.mark.parametrize(("name", "method"), rotating(SMP))
def test_segmentation_models_pytorch(name, method):
    smp = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(0)
    model = getattr(smp, name)("resnet18", encoder_weights=None, classes=4)
    check_both(model, SMP[name], method)


@pytest.mark.parametrize(
    "method", [gf.WalshHadamard(patch=4, bases=3), gf.Hosvd(energy=0.8)], ids=repr
)
def test_the_linear_layers_of_a_vision_transformer(method):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=4)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    wake(model, x)
    plan = check(model, x, {"blocks.*": method})
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "blocks" in n]
    assert list(plan.converted) == linear and len(linear) == 3 * 4
    gf.convert(model, gf.Exact())
    full = gf.cost(model, x)
    gf.convert(model, {"blocks.*": method})
    less = gf.cost(model, x)
    kept = [sum(r.kept_bytes for r in c.layers if r.name in linear) for c in (full, less)]
    assert kept[1] < 0.7 * kept[0]

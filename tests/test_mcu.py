"""The microcontroller networks: their tables, and 8-bit files of the published format."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradfilter as gf
from gradfilter.recipes import mcu, models, weights

TINY = ((None, 3, 8, 1), (24, 5, 8, 1), (16, 3, 12, 2))  # its second block has a shortcut
# as many as the published files hold
PARAMETERS = {"mcunet-5fps": 630_224, "mbv2-w0.35": 357_448, "proxyless-w0.3": 423_232}


def layer(rng, channels, out, kernel=1, stride=1, groups=1, x_scale=0.02):
    """A convolution of the format: integers, a scale per channel, ranges of input and output."""
    low, high = -127, 128
    return {
        "in_channel": channels,
        "out_channel": out,
        "kernel_size": (kernel, kernel),
        "stride": stride,
        "groups": groups,
        "depthwise": groups > 1,
        "act": None,
        "params": {
            "weight": rng.integers(low, high, (out, channels // groups, kernel, kernel), np.int8),
            "bias": rng.integers(-9000, 9000, out, np.int32),
            "w_scales": rng.uniform(0.001, 0.02, out).astype(np.float32),
            "x_scale": x_scale,
            "x_zero": -128,
            "y_scale": 0.0235,
            "y_zero": -128,
        },
    }


def made_file(path, rows=TINY, num_classes=5, **extra):
    """A file like the published ones, of a network of these rows."""
    rng, channels, blocks = np.random.default_rng(0), 16, []
    for inside, kernel, out, stride in rows:
        wide = inside or channels
        shortcut = stride == 1 and channels == out
        blocks.append(
            {
                "pointwise1": layer(rng, channels, wide) if inside else None,
                "depthwise": layer(rng, wide, wide, kernel, stride, wide),
                "pointwise2": layer(rng, wide, out),
                "residual": {"in_channel": channels, "params": {}} if shortcut else None,
                "se": None,
            }
            | extra
        )
        channels = out
    content = {
        "first_conv": layer(rng, 3, 16, 3, 2, x_scale=1 / 127.5),
        "blocks": blocks,
        "feature_mix": None,
        "classifier": layer(rng, channels, num_classes),
    }
    torch.save(content, path)
    return content


def by_integers(content, x):
    """The network run on the file's integers: (w * (x / x_scale) + bias) * w_scale * x_scale."""

    def run(part, x, relu6=True):
        p, kernel = part["params"], part["kernel_size"][0]
        w, b = (torch.from_numpy(p[key]).double() for key in ("weight", "bias"))
        y = F.conv2d(x / p["x_scale"], w, b, part["stride"], kernel // 2, 1, part["groups"])
        y = y * torch.from_numpy(p["w_scales"]).double()[:, None, None] * p["x_scale"]
        return y.clamp(0, 6) if relu6 else y

    x = run(content["first_conv"], x.double())
    for block in content["blocks"]:
        y = run(block["pointwise1"], x) if block["pointwise1"] else x
        y = run(block["pointwise2"], run(block["depthwise"], y), relu6=False)
        x = x + y if block["residual"] else y
    return run(content["classifier"], x.mean((2, 3), keepdim=True), relu6=False).flatten(1)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(mcu.NETWORKS, "tiny", TINY)
    path = tmp_path / "tiny.pkl"
    return made_file(path), path


def test_a_file_gives_the_network_that_its_integers_describe(tiny):
    content, path = tiny
    network = models.build("tiny", 5, weights=path)
    assert network.weights == str(path) and network.size == 128
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    x = network.prepare(images)
    torch.testing.assert_close(x, images / 127.5 - 1)
    with torch.no_grad():
        y = network.model.double()(x.double())
    torch.testing.assert_close(y, by_integers(content, x), rtol=1e-5, atol=1e-5)
    assert y.std() > 1


def test_another_number_of_classes_gets_a_new_classifier(tiny):
    _, path = tiny
    full, new = models.build("tiny", 5, weights=path), models.build("tiny", 3, weights=path)
    assert new.weights.endswith("new classifier") and new.model.classifier.out_features == 3
    for key, value in new.model.state_dict().items():
        if not key.startswith("classifier"):
            assert torch.equal(value, full.model.state_dict()[key]), key


def test_a_checkpoint_of_such_a_network_loads_again(tiny, tmp_path):
    _, path = tiny
    model = models.build("tiny", 3, weights=path).model
    torch.save({"model": model.state_dict()}, tmp_path / "best.pt")
    again = models.build("tiny", 3, weights=tmp_path / "best.pt").model
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_a_file_of_another_network_is_refused(tiny, tmp_path):
    strides = [(*row[:3], 1) for row in TINY]  # every shape is the same
    made_file(tmp_path / "other.pkl", strides)
    with pytest.raises(ValueError, match="other.pkl is an 8-bit network, but not tiny"):
        models.build("tiny", 5, weights=tmp_path / "other.pkl")


def test_layers_that_the_networks_do_not_have_are_refused(tiny, tmp_path):
    made_file(tmp_path / "se.pkl", se={"params": {}})
    with pytest.raises(ValueError, match="squeeze-and-excitation"):
        models.build("tiny", 5, weights=tmp_path / "se.pkl")


def test_reading_numpy_arrays_is_allowed_only_for_a_while(tiny):
    _, path = tiny
    before = set(torch.serialization.get_safe_globals())  # PyTorch keeps them in no order
    assert weights.read(path)["first_conv"]["params"]["weight"].dtype == np.int8
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(Exception, match="weights_only"):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", PARAMETERS)
def test_tables(name):
    model = mcu.create(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    with torch.no_grad():
        deepest = model.blocks(model.act(model.first_conv(torch.randn(1, 3, 128, 128))))
    assert deepest.shape[2:] == (4, 4)
    wide = [b for b in model.blocks if b.shortcut]
    assert len(wide) == {"mcunet-5fps": 7, "mbv2-w0.35": 10, "proxyless-w0.3": 13}[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_convolution_runs_in_one_region(name):
    network = models.build(name, 4, weights="none")
    x = network.prepare(torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8))
    plan = gf.convert(network.model, gf.GalerkinFilter(grid=7), example=x)
    assert {plan[n].where for n in plan.converted} == {"region 1"}
    assert len(plan.converted) == sum(
        isinstance(m, torch.nn.Conv2d) for m in network.model.modules()
    )
    F.cross_entropy(network.model.train()(x), torch.tensor([0, 1])).backward()
    assert all(p.grad.isfinite().all() for p in network.model.parameters())


def test_no_library_has_them():
    with pytest.raises(ValueError, match=r"^no library .* mcunet-5fps.pkl .* --weights FILE"):
        models.build("mcunet-5fps", 5)

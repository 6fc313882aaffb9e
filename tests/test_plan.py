"""Plans and settings in files."""

import pytest
from torch import nn

import gradfilter as gf
from gradfilter import methods
from gradfilter.plan import read
from gradfilter.recipes import settings
from gradfilter.recipes.settings import Settings

pytest.importorskip("yaml")

METHODS = [
    gf.Exact(),
    gf.GradientFilter(patch=4, alignment="centred"),
    gf.GalerkinFilter(patch=2),
    gf.GalerkinFilter(grid=5),
    gf.Svd(energy=0.5),
    gf.Hosvd(energy=0.9),
    gf.SubspaceIteration(rank=3),
    gf.WalshHadamard(patch=8, bases=6),
    gf.Int8(),
    gf.Int8(gf.GalerkinFilter(grid=3)),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_method_is_written_by_its_name_and_knobs(method):
    written = methods.described(method)
    assert methods.named(written.pop("method"), **written) == method


def test_a_method_without_a_name_cannot_be_written():
    class Own(gf.Method):
        pass

    with pytest.raises(ValueError, match="Own has no name in METHODS"):
        methods.described(Own())


def network() -> nn.Module:
    norm = [nn.BatchNorm2d(4), nn.ReLU()]
    layers = [nn.Conv2d(3, 4, 3), *norm, nn.Conv2d(4, 4, 3), *norm[1:], nn.Conv2d(4, 4, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
@pytest.mark.parametrize("last", [None, 2])
def test_a_saved_plan_converts_alike(tmp_path, name, last):
    model, again = network(), network()
    made = gf.convert(model, gf.GalerkinFilter(grid=3), last=last)
    made.save(tmp_path / name)
    read = gf.Plan.load(tmp_path / name)
    assert read.entries == made.entries and read.front == made.front
    assert gf.convert(again, read).table() == made.table()
    trained = [[p.requires_grad for p in m.parameters()] for m in (model, again)]
    assert trained[0] == trained[1]


def test_patterns_written_by_hand(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("'*': exact\n'[03]': {method: galerkin, patch: 2, bits: 8}\n'5': frozen\n")
    made = gf.convert(network(), read(path))
    assert made.converted == dict.fromkeys("03", gf.Int8(gf.GalerkinFilter(patch=2)))
    assert made.frozen == ["5"]
    with pytest.raises(ValueError, match="gives patterns"):
        gf.Plan.load(path)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "a plan gives layer names"),
        ("'0': {method: galerkn}", "layer '0': no method is called 'galerkn'; did you mean galer"),
        ("'0': {method: galerkin, energy: 1}", "layer '0': galerkin has no energy"),
        ("'0': {patch: 1}", "layer '0': give `method: NAME`"),
        ("'0': 3", "layer '0': give `method: NAME`"),
        ("'0': {method: galerkin, patch: 0}", "patch must be a whole number"),
        ("layers: {'0': {method: svd, bits: 4}}", "layer '0': bits must be 8"),
        ("{", "not readable"),
    ],
)
def test_plans_with_mistakes(tmp_path, text, says):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match="plan.yaml.*" + says.replace("(", r"\(")):
        read(tmp_path / "plan.yaml")


def test_settings_survive_a_file(tmp_path):
    chosen = Settings(data="x", mean="1,2,3", std=127.5, lr=0.3, last=4, amp=True, bits=8)
    chosen.save(tmp_path / "config.yaml")
    assert settings.load(tmp_path / "config.yaml") == chosen
    assert chosen.mean == (1, 2, 3) and chosen.std == (127.5,) * 3


@pytest.mark.parametrize(
    "options, says",
    [
        ({"epochs": 0}, "epochs: 0 is not a whole number >= 1"),
        ({"epochs": 2.5}, "epochs: 2.5 is not a whole number"),
        ({"epochs": True}, "epochs: True is not a whole number"),
        ({"lr": float("nan")}, "lr: nan is not a number"),
        ({"lr": float("inf")}, "lr: inf is not a number >= 0"),
        ({"momentum": 1.5}, "momentum: 1.5 is not between 0 and 1"),
        ({"epochs": None}, "epochs: None is not"),
        ({"mean": [1, 2]}, "mean: .* neither one number nor three"),
        ({"bits": 4}, "bits must be 8"),
        ({"plan": "x", "grid": 3}, "plan gives each layer its method, grid too"),
    ],
)
def test_settings_with_mistakes(options, says):
    with pytest.raises(ValueError, match=says):
        Settings(**options)


def test_rates_are_for_a_batch_of_128():
    assert Settings(lr=0.1).peak_rate(128) == 0.1
    assert Settings(lr=0.1).peak_rate(32) == 0.025

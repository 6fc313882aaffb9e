"""gradfilter-device: what the self-test finds in a step that is not PyTorch's."""

import json
import shutil
from hashlib import sha256

import numpy as np
import onnx
import pytest
import torch
from on_device import module, signed
from onnx import helper
from torch import nn

import gradfilter as gf
from gradfilter.export import selfcheck

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4}),
    "adamw": (torch.optim.AdamW, {}),
}
# what a wrong step gives for a parameter: (of the old one, of the new one)
FAULTS = {"none": (1.0, 0.0), "reversed": (2.0, -1.0), "doubled": (-1.0, 2.0)}


@pytest.fixture(scope="module", params=["random", "zero"])
def head(request):
    """How the output layer starts."""
    return request.param


@pytest.fixture(scope="module", params=OPTIMIZERS)
def folder(request, head, tmp_path_factory):
    """A network with dense, depthwise and 1x1 layers and norms, exported."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6(),
        nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.ReLU(), nn.Conv2d(16, 320, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(320, 3),
    )  # fmt: skip
    if head == "zero":
        nn.init.zeros_(model[9].weight)
        nn.init.zeros_(model[9].bias)
    x = torch.randn(2, 3, 32, 32)
    gf.convert(model, gf.GalerkinFilter(grid=4), example=x)
    kind, options = OPTIMIZERS[request.param]
    optimizer = kind(model.parameters(), lr=0.1, **options)
    path = tmp_path_factory.mktemp("device") / "exported"
    return gf.export(model, x, torch.tensor([0, 1]), path, optimizer=optimizer, clip=2.0)


def compared(path) -> str:
    return module("selftest").compare(module("exported").Exported(path), 1)


@pytest.fixture
def moves_alone(monkeypatch):
    """Losses of three steps, which may tell or not, are let pass."""
    monkeypatch.setattr(module("selftest"), "check_losses", lambda *_: "")


def sabotaged(folder, to, fault: str, names):
    """A copy of the folder whose steps do something else to these parameters."""
    other = shutil.copytree(folder, to)
    about = json.loads((other / "manifest.json").read_text())
    about["in_place"] = False  # old ones are read after new ones are written
    for file in {"train.onnx", "train-blocked.onnx"} & about["files"].keys():
        model = onnx.load(other / file, load_external_data=False)
        for name in names:
            _spoil(model.graph, name, *FAULTS[fault])
        onnx.save(model, other / file)
        about["files"][file] = sha256((other / file).read_bytes()).hexdigest()
    (other / "manifest.json").write_text(signed(about))
    return other


def _spoil(graph, name: str, old: float, new: float) -> None:
    """Have a graph give a sum of the parameter before and after the step."""
    made = next(n for n in graph.node if f"new.{name}" in n.output)
    made.output[list(made.output).index(f"new.{name}")] = f"right.{name}"
    for n in graph.node:
        n.input[:] = [f"right.{name}" if i == f"new.{name}" else i for i in n.input]
    parts = []
    for source, factor in ((name, old), (f"right.{name}", new)):
        parts.append(f"{source}.times")
        constant = helper.make_tensor(f"{parts[-1]}.factor", onnx.TensorProto.FLOAT, (), [factor])
        graph.initializer.append(constant)
        graph.node.append(helper.make_node("Mul", [source, constant.name], parts[-1:]))
    graph.node.append(helper.make_node("Add", parts, [f"new.{name}"]))


def parameters(folder) -> dict[str, list[int]]:
    return json.loads((folder / "manifest.json").read_text())["parameters"]


def test_the_step_as_exported_passes(folder):
    assert compared(folder).startswith("ok: losses")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_update_of_all_parameters_is_refused(folder, fault, moves_alone, tmp_path):
    other = sabotaged(folder, tmp_path / "other", fault, parameters(folder))
    with pytest.raises(module("exported").Unusable, match="do not change") as told:
        compared(other)
    assert "\n" not in str(told.value)


def test_all_frozen_but_the_last_two_is_refused(folder, moves_alone, tmp_path):
    names = list(parameters(folder))
    other = sabotaged(folder, tmp_path / "other", "none", names[:-2])
    with pytest.raises(module("exported").Unusable, match="do not change 0.weight as PyTorch's"):
        compared(other)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_update_of_one_larger_parameter_is_refused(folder, fault, moves_alone, tmp_path):
    larger = [name for name, shape in parameters(folder).items() if np.prod(shape) > 100]
    assert len(larger) == 5
    for name in larger:
        other = sabotaged(folder, tmp_path / name, fault, [name])
        with pytest.raises(module("exported").Unusable, match="do not change"):
            compared(other)


def test_both_packages_measure_a_move_alike(monkeypatch):
    selftest, random = module("selftest"), np.random.RandomState(1)
    old, new = (random.standard_normal((7, 11, 3)).astype(np.float32) for _ in range(2))
    for chunk in (100, 2**20):
        monkeypatch.setattr(selfcheck, "CHUNK", chunk)
        monkeypatch.setattr(selftest, "CHUNK", chunk)
        found = selfcheck.moved(old, new, 5)
        assert found == selftest.moved(old, new, 5)
        assert found[0] == pytest.approx(np.linalg.norm(new.astype(np.float64) - old))
        assert np.abs(selfcheck.moved(new, old, 5)[1:] + np.array(found[1:])).max() < 1e-9
        assert found[1:] != selfcheck.moved(old, new, 6)[1:]

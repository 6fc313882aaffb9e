"""What travels in federated learning: which tensors, as what, and what is refused on arrival."""

import io
import json

import numpy
import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord  # noqa: E402

import gradfilter as gf  # noqa: E402
from gradfilter.federated.exchange import (  # noqa: E402
    BadArrays,
    Exchange,
    count_bytes,
    to_array,
    to_tensor,
    wide,
)

X = torch.zeros(2, 3, 8, 8)


def network(**options) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 16, 2)).train()
    gf.convert(model, gf.GalerkinFilter(grid=2), example=X, **options)
    return model.train()


def names(exchange: Exchange) -> list[str]:
    return [name for name, _, _ in json.loads(exchange.layout)]


def test_only_what_is_trained_travels():
    model = network(last=1)
    exchange = Exchange(model)
    assert names(exchange) == [f"{i}.{kind}" for i in (3, 4, 6) for kind in ("weight", "bias")]
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 4 * numbers < count_bytes(exchange.record()) < 4 * numbers + 200
    assert exchange.full_bytes == 4 * (477 + 2 * 4 + 2 * 5) + 2 * 8  # statistics, two counts
    everything = Exchange(network())
    assert set(names(everything)) == set(dict(model.named_parameters()))


def test_statistics_travel_where_training_changes_them_and_integers_never():
    moving = names(Exchange(network(norm="batch")))
    assert "1.running_mean" in moving and "4.running_var" in moving
    assert not any("num_batches_tracked" in name for name in moving)
    assert not any("running" in name for name in names(Exchange(network())))
    front = Exchange(network(norm="batch").requires_grad_(False).eval().requires_grad_(True))
    assert not any("running" in name for name in names(front))


def test_what_is_sent_is_what_arrives():
    model, other = network(), network()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.5)
    Exchange(model).load(Exchange(other).record())
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_network_of_several_dtypes():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4).bfloat16(), nn.Linear(4, 1).double())
    exchange = Exchange(model)
    record = exchange.record()
    assert set(record) == {"float32", "bfloat16", "float64"}
    assert len(record["bfloat16"].data) < 2 * 12 + 200  # two bytes a number
    exchange.check(record, exchange.layout)
    found = exchange.split(record)
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())


def test_bfloat16_is_averaged_in_float32():
    values = torch.tensor([1.0, 1.0078125, -3.0], dtype=torch.bfloat16)
    array = to_array(values)
    assert torch.equal(to_tensor(array), values)
    record = wide(ArrayRecord({"bfloat16": array}))
    assert record["bfloat16"].numpy().tolist() == [1.0, 1.0078125, -3.0]
    assert record["bfloat16"].dtype == "float32"
    model = nn.Linear(3, 1, bias=False).bfloat16()
    exchange = Exchange(model)
    between = ArrayRecord({"bfloat16": to_array(torch.tensor([1.003, 2.0, 3.0]))})
    exchange.load(exchange.narrow(between))
    assert model.weight.tolist() == [[1.0, 2.0, 3.0]]  # 1.003 is nearest to 1 there


def test_whether_frozen_layers_are_the_same():
    exchange = Exchange(network(last=1))
    before = exchange.kept()
    assert before == Exchange(network(last=1)).kept()
    with torch.no_grad():
        exchange.model[6].weight.add_(1)
    assert exchange.kept() == before  # that one travels
    with torch.no_grad():
        exchange.model[0].weight[0, 0, 0, 0] += 1e-3
    assert exchange.kept() != before


def test_nothing_to_exchange():
    with pytest.raises(ValueError, match="no layer is trained"):
        Exchange(network().requires_grad_(False))


def torn(array: Array, data: bytes) -> Array:
    return Array(array.dtype, array.shape, array.stype, data)


def header(count: int) -> bytes:
    """The beginning of an array that says that so many numbers follow."""
    buffer = io.BytesIO()
    about = {"descr": "<f4", "fortran_order": False, "shape": (count,)}
    numpy.lib.format.write_array_header_1_0(buffer, about)
    return buffer.getvalue()


def with_value(at: int, value: float):
    def change(flat):
        flat[at] = value
        return Array(flat)

    return change


ARRAYS = {
    "nan": (with_value(3, float("nan")), "0.weight has 1 values that are no numbers"),
    "infinite": (with_value(-1, float("inf")), "6.bias has 1 values"),
    "short": (lambda flat: Array(flat[:-1]), r"should be float32 \[477\], and is float32 \[476\]"),
    "shape": (lambda flat: Array(flat[None]), r"is float32 \[1, 477\]"),
    "double": (lambda flat: Array(flat.astype("float64")), "is float64"),
    "torn": (lambda flat: torn(Array(flat), Array(flat).data[:-9]), "cannot be read"),
    "zip": (lambda flat: torn(Array(flat), b"PK\x03\x04no numbers"), "cannot be read"),
    "endless": (lambda flat: torn(Array(flat), header(10**15)), "cannot be read"),
    "gibberish": (lambda flat: torn(Array(flat), b"no numbers"), "cannot be read"),
}


@pytest.mark.parametrize("change, says", ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_are_refused(change, says):
    exchange = Exchange(network())
    exchange.check(exchange.record(), exchange.layout)
    flat = exchange.record()["float32"].numpy().copy()
    with pytest.raises(BadArrays, match=says):
        exchange.check(ArrayRecord({"float32": change(flat)}), exchange.layout)


LAYOUTS = {
    "missing": (lambda layout: layout[:2] + layout[3:], "missing 1.weight"),
    "unknown": (lambda layout: [*layout, ["extra", "float32", [1]]], "unknown extra"),
    "swapped": (lambda layout: [layout[1], layout[0], *layout[2:]], "another order"),
    "reshaped": (lambda layout: [["0.weight", "float32", [3, 4, 3, 3]], *layout[1:]],
                 "of another shape or kind 0.weight"),
    "unnamed": (lambda layout: 7, "not named"),
}  # fmt: skip


@pytest.mark.parametrize("change, says", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_that_are_refused(change, says):
    exchange = Exchange(network())
    layout = json.dumps(change(json.loads(exchange.layout)))
    with pytest.raises(BadArrays, match=says):
        exchange.check(exchange.record(), layout)


def test_a_layout_without_an_end_is_refused():
    exchange = Exchange(network())
    with pytest.raises(BadArrays, match="not named"):
        exchange.check(exchange.record(), "[" * 10**6)


def test_more_arrays_than_asked_for_are_refused():
    exchange = Exchange(network())
    record = exchange.record()
    record["float64"] = record["float32"]
    with pytest.raises(BadArrays, match="instead of"):
        exchange.check(record, exchange.layout)

"""Flower's strategies by name, what of an answer can be used, and what a strategy remembers."""

from __future__ import annotations

import torch
from flwr.app import Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx
from torch import Tensor

from gradfilter.federated.client import ARRAYS, CONFIG, METRICS, NUMBERS, WEIGHT
from gradfilter.federated.exchange import Exchange
from gradfilter.federated.settings import Federation

MEMORY = ("m_t", "v_t")  # FedAdam's moments

STRATEGIES = {
    "fedavg": lambda f: (FedAvg, {}),
    "fedprox": lambda f: (FedProx, {"proximal_mu": f.mu}),
    "fedadam": lambda f: (FedAdam, {"eta": f.server_lr}),
}


def build(federation: Federation) -> FedAvg:
    """The strategy that was asked for; the server itself waits for enough clients and evaluates."""
    kind, extra = STRATEGIES[federation.strategy](federation)
    return kind(
        fraction_train=federation.fraction,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=1,
        weighted_by_key=WEIGHT,
        arrayrecord_key=ARRAYS,
        configrecord_key=CONFIG,
        **extra,
    )


def problem(reply: Message, exchange: Exchange) -> str | None:
    """Why an answer cannot be used, or None."""
    if reply.has_error():
        return f"failed: {reply.error.reason}"
    content = reply.content
    if set(content.array_records) != {ARRAYS} or set(content.metric_records) != {METRICS}:
        return "dropped: not the records that were asked for"
    numbers, about = content[METRICS], content.config_records.get(CONFIG, {})
    if set(numbers) != set(NUMBERS) or any(isinstance(v, list) for v in numbers.values()):
        return "dropped: not the numbers that were asked for"
    if not isinstance(numbers[WEIGHT], int) or numbers[WEIGHT] < 1:
        return f"dropped: trained on {numbers[WEIGHT]} pictures"
    try:
        exchange.check(content[ARRAYS], str(about.get("layout")))
    except ValueError as error:
        return f"dropped: {error}"
    return None


def memory(strategy: FedAvg) -> dict[str, dict[str, Tensor]]:
    """What a strategy carries from round to round, as plain tensors."""
    found = {name: getattr(strategy, name, None) for name in MEMORY}
    return {
        name: {key: torch.from_numpy(value) for key, value in arrays.items()}
        for name, arrays in found.items()
        if arrays
    }


def remember(strategy: FedAvg, found: dict[str, dict[str, Tensor]]) -> None:
    """Give a strategy back what `memory` read."""
    for name, tensors in found.items():
        setattr(strategy, name, {key: t.numpy() for key, t in tensors.items()})

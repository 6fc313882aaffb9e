"""Short federated runs within one process, what they wrote, and what a client alone makes of it."""

from __future__ import annotations

import csv

from gradfilter.federated import app, client, grid, server, settings
from gradfilter.recipes.screen import Screen
from gradfilter.recipes.trainer import Trainer


def asked(photos, out, **options) -> settings.Both:
    usual = {"model": "still", "batch": 6, "lr": 1.0, "rounds": 3, "simulate": 3, "split": "iid"}
    return settings.of({"data": str(photos), "out": str(out)} | usual | options)


def run(both, clients=app.client, nodes=None, here=None):
    """A run; the grid it ran on and its server."""
    here = here or grid.InProcess(
        clients, settings.to_config(both), nodes or grid.parts(both[1].simulate)
    )
    server.serve(both, Screen(quiet=True), here, poll=0.0)
    return here


def rows(out, name="clients.csv") -> list[dict]:
    with open(out / name, newline="") as file:
        return list(csv.DictReader(file))


def trained(both, part: int, rounds: int = 1) -> tuple[dict, int]:
    """What a client makes of the first global network, by the trainer alone."""
    chosen, _ = both
    data = client.opened(chosen.data, None, False)
    node = grid.parts(both[1].simulate)[part]
    pictures, _ = client.own(chosen, node, data.classes)
    trainer = Trainer(chosen, data.task, data.classes, level=data.augment)
    steps = -(-len(pictures) // chosen.batch)
    for _ in trainer.steps(pictures, range(rounds * steps), both[1].rounds * steps):
        pass
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}, len(pictures)

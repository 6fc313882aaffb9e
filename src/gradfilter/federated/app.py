"""The Flower app: the same for simulation, for deployment and for the grid in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from gradfilter.federated import client as clients
from gradfilter.federated import settings
from gradfilter.federated.server import serve
from gradfilter.recipes.screen import Screen

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    return clients.answer(message, context)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """A run as its config says, in its folder."""
    with tempfile.TemporaryDirectory(prefix="gradfilter-") as folder:
        both = settings.from_config(context.run_config, Path(folder) / "plan.yaml")
        serve(both, Screen(quiet=True), grid)  # whoever started the run reads the folder

"""A model that answers, and one server for the tests that change none of its banks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mac_rag.model import MACModel
from tests.server.helpers import Running, make, serving

PRESS = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
QUESTION = "How many workers does Rainga Press have?"
BRIDGE = "Basalt Bridge was opened by Ines Kaur in the spring."
NEWS = (("press", PRESS), ("bridge", BRIDGE))


@pytest.fixture(scope="session")
def mac_tiny() -> MACModel:
    return MACModel.from_pretrained("mac-tiny", device="cpu")


@pytest.fixture(scope="session")
def running(mac_tiny: MACModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server without keys. Its bank `news` holds two documents that no test changes."""
    press = {"id": "press", "text": PRESS, "metadata": {"year": 2005, "date": "2005-05-09"}}
    bridge = {"id": "bridge", "text": BRIDGE, "metadata": {"year": 2004, "date": "2004-05-09"}}
    with serving(tmp_path_factory.mktemp("served"), mac_tiny) as running, running.client() as client:
        make(client, "news", press, bridge)
        yield running

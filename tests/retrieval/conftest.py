"""A Chroma server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.retrieval.helpers import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests; each uses collections of its own."""
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running

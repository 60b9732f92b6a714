"""A place for a bank in shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bank.helpers import fast_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with fast_folder() as place:
        yield place / "bank"

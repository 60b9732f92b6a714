"""A fast folder for banks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bank.helpers import fast_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that is fast to sync."""
    with fast_folder() as place:
        yield place

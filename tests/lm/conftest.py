"""For tests of LMs: what a cell of the conformance matrix found goes into the run's report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from mac_rag.errors import MACError
from tests.helpers import Folder

InTable: TypeAlias = Callable[..., None]


@pytest.fixture
def in_table(record_property: Callable[[str, object], None]) -> InTable:
    """Names the cell of the table that a test fills; see `tests.lm.matrix_table`."""

    def record(name: str, kind: str, dtype: str, refusal: MACError | None = None) -> None:
        for key, value in (("lm", name), ("kind", kind), ("dtype", dtype)):
            record_property(key, value)
        if refusal is not None:
            record_property("refusal", f"refused: {str(refusal).split(name, 1)[-1].partition(';')[0].strip()}")

    return record


@pytest.fixture(scope="session")
def prefix_lm_folder(model_folder: Folder) -> Path:
    """A small prefix LM with random weights, whose tokenizer puts <s> in front of a text."""
    return model_folder("prefix_lm")

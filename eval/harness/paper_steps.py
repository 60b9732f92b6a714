"""Records of the steps of `eval.paper`: the outcome of each, in a file beside its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mac_rag.atomic_files import write_text
from mac_rag.config import Config
from mac_rag.errors import ConfigError, DataError
from mac_rag.untrusted_files import read_json

RECORDS = "steps.json"
_LARGEST = 16 << 20  # bytes


class StepRecord(Config):
    """The outcome of one step.

    Attributes:
        name: unique name of the step; its result is `<name>.json`.
        experiment: name of its module, `eval.<experiment>`.
        command: its command line.
        status: `done`, `failed` or `not run`.
        reason: why it failed or was not run; empty if done.
        seconds: its time; None if it was not run.
    """

    name: str
    experiment: str
    command: str
    status: Literal["done", "failed", "not run"]
    reason: str = ""
    seconds: float | None = None


def write_records(folder: Path, records: Sequence[StepRecord]) -> None:
    """Writes the records of a folder of results; the file is whole at any time."""
    write_text(folder / RECORDS, json.dumps([record.model_dump() for record in records], indent=1) + "\n")


def read_records(folder: Path) -> list[StepRecord]:
    """Reads the records of a folder of results; none if `eval.paper` has not run there.

    Raises:
        DataError: if their file is damaged.
    """
    path = folder / RECORDS
    if not path.exists():
        return []
    try:
        return [StepRecord.parse(record, path) for record in read_json(path, _LARGEST, follow=True)]
    except (ValueError, TypeError, ConfigError) as error:
        raise DataError(f"{path} is damaged; delete it: {error}") from None

"""Documents from tables whose columns have types: Parquet files, and data sets of the Hugging Face Hub."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mac_rag.data.table import raise_error
from mac_rag.data.types import Document
from mac_rag.errors import DataError
from mac_rag.untrusted_files import ROW, MalformedError, open_file

HUB = "hub:"
_BATCH = 256  # rows that are in memory at a time


def read_parquet(
    path: Path, start: int = 0, *, refuse: Callable[[DataError], object] = raise_error
) -> Iterator[tuple[int, Document]]:
    """The rows of a Parquet file as documents with their numbers from 0, a few hundred in memory at a time.

    Args:
        path: the file; its columns `id` and `text` hold texts, and all others become metadata.
        start: number of the first row to read, from 0.
        refuse: takes the error of a row that is left out; by default, it is raised.

    Raises:
        DataError: when pyarrow is missing; for a file that cannot be read, and a row without an id or a text, or with
            one that is too long; names the file and the row.
    """
    return _documents(parquet_rows(path, start), start, refuse)


def read_hub(
    name: str | Path, start: int = 0, *, refuse: Callable[[DataError], object] = raise_error
) -> Iterator[tuple[int, Document]]:
    """The rows of a data set of the Hub as documents with their numbers, from the cache of the `datasets` library.

    Args:
        name: `hub:OWNER/NAME`, `hub:OWNER/NAME/CONFIGURATION`, either with `:SPLIT` behind it; `train` without.
        start: number of the first row to read, from 0.
        refuse: takes the error of a row that is left out; by default, it is raised.

    Raises:
        DataError: when `datasets` is missing; for a data set that is not found; for a row as `read_parquet`.
    """
    return _documents(hub_rows(name, start), start, refuse)


def parquet_rows(path: Path, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file in Python's types, each with its file and row for messages.

    Raises:
        DataError: when pyarrow is missing, and for a file or a value that cannot be read.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise DataError(f"{path} is Parquet, which needs pyarrow: pip install 'mac-rag[hub-data]'") from None
    try:
        with open_file(path, follow=True) as file:
            parquet = ParquetFile(file)
            first, before = 0, 0  # the row group with the first row to read, and the rows in front of it
            while first < parquet.num_row_groups and before + _rows_of(parquet, first) <= start:
                before += _rows_of(parquet, first)
                first += 1
            batches = parquet.iter_batches(_BATCH, row_groups=range(first, parquet.num_row_groups))
            yield from _placed_rows(str(path), batches, before, start)
    except MalformedError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ArrowException, ValueError) as error:  # ValueError for a column's name that is no UTF-8
        raise DataError(f"{path} is no well-formed Parquet: {error}") from None


def hub_rows(name: str | Path, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a data set of the Hub in Python's types, each with its name and row for messages.

    Args:
        name, start: see `read_hub`.

    Raises:
        DataError: when `datasets` is missing, and for a data set or a value that cannot be read.
    """
    table = _hub_table(str(name))
    rest = table.select(range(min(start, len(table)), len(table))).with_format("arrow")
    yield from _placed_rows(str(name), rest.iter(_BATCH), start, start)


def hub_splits(name: str | Path) -> list[str]:
    """The names of the splits of a data set of the Hub, `hub:OWNER/NAME` or `hub:OWNER/NAME/CONFIGURATION`.

    Raises:
        DataError: when `datasets` is missing, and for a data set that is not found.
    """
    return list(_loaded(str(name), None, str(name)))


def _rows_of(parquet: Any, group: int) -> int:
    return int(parquet.metadata.row_group(group).num_rows)


@lru_cache(1)
def _hub_table(name: str) -> Any:
    repository, _, split = name.removeprefix(HUB).partition(":")
    return _loaded(f"{HUB}{repository}", split or "train", name)


def _loaded(name: str, split: str | None, shown: str) -> Any:
    """The table of a split, or for None those of all splits by their names; `shown` is the name for messages."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{shown} needs the datasets library: pip install 'mac-rag[hub-data]'") from None
    owner, _, rest = name.removeprefix(HUB).partition("/")
    data_set, _, configuration = rest.partition("/")
    if not owner or not data_set:
        raise DataError(f"{shown!r} names no data set; write hub:OWNER/NAME, or hub:OWNER/NAME/CONFIGURATION:SPLIT")
    try:
        return datasets.load_dataset(f"{owner}/{data_set}", configuration or None, split=split)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{shown} could not be read from the Hugging Face Hub ({type(error).__name__}: {error}); "
            "without a network, give a file"
        ) from error


def _placed_rows(where: str, batches: Iterable[Any], number: int, start: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows from `start` on, of batches of Arrow; `number` is that of the first row of them."""
    for batch in batches:
        for row in _rows(where, batch, number):
            if number >= start:
                yield f"{where}, row {number + 1}", row
            number += 1


def _rows(where: str, batch: Any, number: int) -> Iterator[dict[str, Any]]:
    """The rows of a batch of Arrow, with Python's values."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # no UTF-8, or a date beyond Python's
        for index in range(len(batch)):
            try:
                yield from batch.slice(index, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                raise DataError(f"{where}, row {number + index + 1}: a value cannot be read: {error}") from None


def _documents(
    rows: Iterable[tuple[str, dict[str, Any]]], start: int, refuse: Callable[[DataError], object]
) -> Iterator[tuple[int, Document]]:
    for number, (where, row) in enumerate(rows, start):
        try:
            document = _document(where, row)
        except DataError as error:
            refuse(error)
        else:
            yield number, document


def _document(where: str, row: dict[str, Any]) -> Document:
    for key in ("id", "text"):
        if key not in row:
            raise DataError(f"{where}: no column {key!r}; it has {', '.join(map(repr, row)) or 'no columns'}")
        if not isinstance(row[key], str):
            raise DataError(f"{where}: {key!r} must be a text, got {row[key]!r:.80}")
        if len(row[key]) > ROW:
            raise DataError(f"{where}: {key!r} has more than {ROW:,} characters; split it into several documents")
    return Document(row.pop("id"), row.pop("text"), as_json(row))


def as_json(value: Any) -> Any:
    """A value of a typed table in JSON's types; dates and times as ISO 8601."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return value

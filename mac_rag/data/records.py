"""Rows of a user's own files: JSON Lines, CSV, Parquet, JSON in SQuAD's layout, and data sets of the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mac_rag.data.readers import json_rows
from mac_rag.data.squad_layout import paragraph_rows
from mac_rag.data.table import read_table
from mac_rag.data.typed_rows import HUB, as_json, hub_rows, parquet_rows
from mac_rag.errors import DataError
from mac_rag.untrusted_files import MalformedError, parse_json

SUFFIXES = (".jsonl", ".csv", ".parquet", ".json", ".json.gz")
# Other names that the fields have in common data sets: SQuAD's, FlashRAG's.
_ALIASES = {"document": ("context",), "answers": ("answer", "golden_answers"), "text": ("contents",)}


class Record(NamedTuple):
    """One row.

    Attributes:
        where: its file and row, for messages.
        name: the name of its file with its number, the id of a question that has none.
        values: what it holds, by the names of our fields; without what is empty.
        columns: the names of all columns or keys of the row.
    """

    where: str
    name: str
    values: Mapping[str, Any]
    columns: tuple[str, ...]

    def fault(self, field: str, problem: str) -> DataError:
        """Makes the error to raise for a field of this row."""
        return DataError(f"{self.where}, field {field!r}: {problem}")

    def missing(self, field: str, remedy: str) -> DataError:
        """Makes the error to raise for a field that the row does not have."""
        present = ", ".join(map(repr, self.columns)) or "nothing"
        return self.fault(field, f"it is missing or empty; {remedy} (the row has {present:.200})")


def suffix_of(path: Path) -> str | None:
    """The one of `SUFFIXES` that a file has; None for another."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def read_records(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    """Yields the rows of a file, or of a split of the Hub.

    Args:
        path: a file with one of `SUFFIXES`, or `hub:OWNER/NAME:SPLIT`.
        columns: field -> the column or key that holds it, where they differ.

    Raises:
        DataError: for a file that cannot be read or is malformed, and for a column that a row does not have; names the
            file and the row.
    """
    file = path.name.removesuffix(suffix_of(path) or "")
    for number, (where, row) in enumerate(_rows(path), 1):
        values = dict(row)
        for field, names in _ALIASES.items():
            if values.get(field) in (None, ""):
                values[field] = next((row[name] for name in names if row.get(name) not in (None, "")), None)
        for field, column in columns.items():
            # A paragraph without questions has none of their fields.
            if column not in row and not (set(row) <= {"document", "title"}):
                has = ", ".join(map(repr, row)) or "nothing"
                raise DataError(f"{where}: no column {column!r}, which columns names for {field!r}; it has {has:.200}")
            values[field] = row.get(column)
        if path.suffix == ".csv":
            values |= {
                field: _parsed(values[field])
                for field in ("answers", "metadata", "further_document_ids")
                if values.get(field)
            }
        filled = {field: value for field, value in values.items() if value not in (None, "")}
        yield Record(where, f"{file}-{number}", filled, tuple(row))


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if str(path).startswith(HUB):
        return ((where, as_json(row)) for where, row in hub_rows(path))
    match suffix_of(path):
        case ".jsonl":
            return json_rows(path)
        case ".csv":
            return _csv_rows(path)
        case ".parquet":
            return ((where, as_json(row)) for where, row in parquet_rows(path))
        case ".json" | ".json.gz":
            return paragraph_rows(path)
        case _:
            raise DataError(f"{path} is of no kind that is read; give a file that ends in {', '.join(SUFFIXES)}")


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for row in read_table(path, ()):
        where = f"{path}, row {row.number} (line {row.line})"
        yield where, {column: cell if cell.strip() else "" for column, cell in row.cells.items()}


def _parsed(cell: str) -> Any:
    """A cell with several answers or with metadata is written as JSON; any other is a text."""
    written = cell.strip()
    if (written[:1], written[-1:]) in {("[", "]"), ("{", "}")}:
        try:
            return parse_json(written)
        except MalformedError:
            return cell
    return cell

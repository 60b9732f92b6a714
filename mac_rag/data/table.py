"""CSV files: errors name file, row and column; a file is written completely or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mac_rag.atomic_files import sync_folder, write_file
from mac_rag.errors import DataError

_LONGEST_CELL = 2**31 - 1  # by default the csv module refuses cells of more than 131,072 characters


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a CSV file.

    Attributes:
        file: the file.
        number: number of the row; 1 for the first row below the header.
        line: line of the file on which the row begins; cells may contain line breaks.
        cells: the text of each column, exactly as in the file.
    """

    file: Path
    number: int
    line: int
    cells: Mapping[str, str]

    def filled(self, column: str) -> str:
        """The cell of a column that must not be empty.

        Raises:
            DataError: when the cell is blank.
        """
        cell = self.cells[column]
        if not cell.strip():
            raise self.fault(column, "the cell is empty")
        return cell

    def fault(self, column: str, problem: str) -> DataError:
        """Makes the error to raise for a cell of this row."""
        return DataError(f"{self.file}, row {self.number} (line {self.line}), column {column!r}: {problem}")


def read_table(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of a CSV file in UTF-8 whose first row is the header. Blank lines are skipped.

    Args:
        file: the file.
        columns: the columns that the file must have; it may have others.

    Raises:
        DataError: for a missing file or column, a row with too few or too many cells, broken quotes, or bytes that are
            not UTF-8; names the file, and the row number and column if there is one.
    """
    csv.field_size_limit(_LONGEST_CELL)
    try:
        # Bytes that are not UTF-8 become surrogates, so that the error can name their cell.
        opened = file.open(encoding="utf-8-sig", errors="surrogateescape", newline="")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    with opened as stream:
        reader = csv.reader(stream, strict=True)
        number, line = 0, 1
        try:
            header = next(reader, [])
            missing = [column for column in columns if column not in header]
            if missing:
                present = ", ".join(header) or "nothing"
                raise DataError(f"{file}: missing column {', '.join(map(repr, missing))}; the header has {present}")
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    number += 1
                    yield _row(file, number, line, header, cells)
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(f"{file}, row {number + 1} (line {line}): not well-formed CSV: {error}") from None


def _row(file: Path, number: int, line: int, header: Sequence[str], cells: Sequence[str]) -> Row:
    row = Row(file, number, line, dict(zip(header, cells)))
    if len(cells) < len(header):
        raise row.fault(header[len(cells)], f"the row ends before it, with {len(cells)} of {len(header)} cells")
    if len(cells) > len(header):
        raise row.fault(header[-1], f"the row goes on after it, with {len(cells)} cells for {len(header)} columns")
    for column, cell in row.cells.items():
        try:
            cell.encode()
        except UnicodeEncodeError:
            raise row.fault(column, "the cell is not UTF-8; save the file in that encoding") from None
    return row


def write_table(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Writes a CSV file in UTF-8. A file of that name is replaced only when all rows are written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, _csv_lines(columns, rows))
    sync_folder(file.parent)


def _csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[bytes]:
    """The header and the rows as lines of a CSV file."""
    for cells in chain([dict(zip(columns, columns))], rows):
        line = io.StringIO(newline="")
        csv.DictWriter(line, columns).writerow(cells)
        yield line.getvalue().encode()


def split_file(path: str | Path, split: str) -> Path:
    """The file of a split: `<split>.csv` if `path` is a folder, else `path`."""
    path = Path(path)
    return path / f"{split}.csv" if path.is_dir() else path

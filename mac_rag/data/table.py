"""Reads and writes CSV files: errors name file, row and column; a file is written completely or not at all.

Cells may be separated by commas, semicolons, tabs or bars; the header tells by which.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mac_rag.atomic_files import sync_folder, write_file
from mac_rag.errors import DataError
from mac_rag.untrusted_files import ROW, ROW_LINES, MalformedError, lines_of, open_file, parse_json

_DELIMITERS = ",;\t|"
_LIST = re.compile(r"""(?:array\()?[\[{]\s*["']|\(\s*["'].*\)$""", re.DOTALL)  # how a list of texts begins
_LONGEST_LITERAL = 1 << 20  # characters of a list as Python writes it, which takes a hundred times its size to parse


def raise_error(error: DataError) -> NoReturn:
    """Raises an error: the default for a bad row."""
    raise error from None


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
        where, number: file and row, for messages; its number from 1 on, without the header.
        values: column or key -> value; for a CSV file, the text of the cell, exactly as in the file.
        is_text: True for a row of a CSV file, whose values are texts, whatever they mean.
    """

    where: str
    number: int
    values: Mapping[str, Any]
    is_text: bool = False

    def filled(self, column: str) -> str:
        """The cell of a column that must not be empty.

        Raises:
            DataError: if the cell is blank.
        """
        cell = str(self.values[column])
        if not cell.strip():
            raise self.fault(column, "the cell is empty; fill it, or remove the row")
        return cell

    def fault(self, column: str, problem: str) -> DataError:
        """Makes the error to raise for a cell of this row."""
        return DataError(f"{self.where}, column {column!r}: {problem}")


def read_table(
    file: Path, columns: Sequence[str], *, refuse: Callable[[DataError], object] = raise_error
) -> Iterator[Row]:
    """Yields the rows of a CSV file in UTF-8 whose first row is the header. Rows without a filled cell are skipped.

    Args:
        file: the file.
        columns: the columns that the file must have; it may have others.
        refuse: called with the error of a row that is left out; by default, it is raised.

    Raises:
        DataError: for a missing file or column, a row with too few or too many cells, broken quotes, or bytes that are
            not UTF-8; names the file, and the row number and column if there is one.
    """
    csv.field_size_limit(ROW)  # by default the csv module refuses cells of more than 131,072 characters
    try:
        stream = open_file(file, follow=True)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; give a file that exists and is readable") from None
    except MalformedError as error:
        raise DataError(f"{file} cannot be read: {error}; give a file") from None
    with stream:
        lines = _Lines(stream)
        number, line = 1, 1  # of the next row, and of the line in which it begins
        try:
            first = next(lines, "")
            if first.startswith("sep=") and len(first.strip()) == 5:  # how Excel notes the separator
                reader = csv.reader(lines, strict=True, delimiter=first[4])
            else:
                reader = csv.reader(chain([first], lines), strict=True, **_dialect(first, columns))
            header = next(reader, [])
            _check_header(file, header, columns)
            line = lines.count + 1
            for cells in reader:
                is_filled = any(cells)  # programs write empty rows at the end, with and without separators
                if is_filled:
                    lines.row_ends()
                    try:
                        row = _row(f"{file}, row {number} (line {line})", number, header, cells)
                    except DataError as error:
                        refuse(error)
                    else:
                        yield row
                number, line = number + is_filled, lines.count + 1
        except (csv.Error, MalformedError) as error:
            raise DataError(
                f"{file}, row {number} (line {line}): not well-formed CSV: {error}; correct the row"
            ) from None


def _dialect(first: str, columns: Sequence[str]) -> dict[str, Any]:
    """What separates the cells: the sign that makes most of the columns, and most cells, of the first line."""

    def cells(delimiter: str) -> list[str]:
        # A quoted cell may go on in the next line, so the line by itself is read leniently.
        return next(csv.reader([first], delimiter=delimiter), [])

    found = max(_DELIMITERS, key=lambda sign: (len(set(map(str.strip, cells(sign))) & set(columns)), len(cells(sign))))
    others = cells(found)[1:]
    return {"delimiter": found, "skipinitialspace": bool(others) and all(cell.startswith(" ") for cell in others)}


def _check_header(file: Path, header: Sequence[str], columns: Sequence[str]) -> None:
    for column in header:
        _check_text(column, lambda problem: DataError(f"{file}: a name in the header: {problem}"))
    missing = [column for column in columns if column not in header]
    if missing:
        present = ", ".join(header) or "nothing"
        raise DataError(f"{file}: missing column {', '.join(map(repr, missing))}; the header has {present:.400}")
    if len(set(header)) < len(header):
        twice = next(column for index, column in enumerate(header) if column in header[:index])
        raise DataError(f"{file}: the column {twice!r:.80} comes twice; name each column once")


class _Lines:
    """The lines of a CSV file as texts, with a common bound for all lines of one row.

    Attributes:
        count: number of lines read so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.count = self._size = 0
        self._lines = lines_of(file, ROW)
        self._first = True
        self.row_ends()

    def row_ends(self) -> None:
        """Ends a row; the next line begins another."""
        self._row_count, self._row_size = self.count, self._size

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._size += len(line)
        self.count += 1
        if self._size - self._row_size > ROW or self.count - self._row_count > ROW_LINES:
            raise MalformedError(
                f"a row of more than {ROW:,} bytes or {ROW_LINES:,} lines, blank ones before it included; is a quote "
                "open?"
            )
        # Bytes that are not UTF-8 become surrogates, so that the error can name their cell.
        text = line.decode("utf-8", errors="surrogateescape")
        if self._first:
            self._first = False
            return text.removeprefix("\ufeff")
        return text


def _row(where: str, number: int, header: Sequence[str], cells: Sequence[str]) -> Row:
    row = Row(where, number, dict(zip(header, cells)), True)
    if len(cells) < len(header):
        raise row.fault(header[len(cells)], f"the row ends before it, with {len(cells)} of {len(header)} cells")
    if len(cells) > len(header):
        raise row.fault(header[-1], f"the row goes on after it, with {len(cells)} cells for {len(header)} columns")
    for column, cell in row.values.items():
        _check_text(cell, partial(row.fault, column))
    return row


def _check_text(cell: str, fault: Callable[[str], DataError]) -> None:
    try:
        cell.encode()
    except UnicodeEncodeError:
        raise fault("the cell is not UTF-8; save the file in that encoding") from None


def parsed_cell(cell: str) -> Any:
    """The value of a cell: a list or an object if it holds one in JSON or as Python, pandas and numpy write it.

    Any other cell is its text.

    Raises:
        MalformedError: for what begins like a list of texts and is none that can be read.

    Examples:
        >>> parsed_cell("['Ada Voss', 'Voss']"), parsed_cell("[sic]")
        (['Ada Voss', 'Voss'], '[sic]')
    """
    text = cell.strip()
    is_list = _LIST.match(text) is not None
    if not is_list and (text[:1], text[-1:]) not in {("[", "]"), ("{", "}")}:
        return cell
    try:
        return parse_json(text)
    except MalformedError as error:
        fault = str(error)
    try:
        if len(text) <= _LONGEST_LITERAL:
            value = _literal(ast.parse(_with_commas(text), mode="eval").body)
            return value if isinstance(value, list | dict) else cell
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        pass
    if is_list:
        raise MalformedError(f"{text!r:.80} is no list that can be read ({fault}); write it as JSON")
    return cell


def _with_commas(text: str) -> str:
    """A list of texts with commas, which numpy leaves out. Python would join the texts."""
    pieces: list[str] = []
    was_text = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type == tokenize.STRING
        pieces += [","] * (is_text and was_text) + [token.string]
        was_text = is_text or (was_text and token.type == tokenize.NL)
    return " ".join(pieces).strip()


def _literal(node: ast.expr) -> Any:
    """The value of a literal: lists for all kinds of lists, numpy's `array([...])` included, and None for nan."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            made = {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
            if len(made) == len(keys):
                return made
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Call(func=ast.Name(id="array"), args=[ast.List() as items]):
            return _literal(items)
        case ast.Name(id="nan"):
            return None
    raise ValueError("no literal")


def write_table(file: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Writes a CSV file in UTF-8. An existing file is replaced only after all rows have been written.

    Raises:
        DataError: for a cell with NUL, which could not be read again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, _csv_lines(columns, rows))
    sync_folder(file.parent)


def _csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[bytes]:
    """The header and the rows as lines of a CSV file."""
    for cells in chain([dict(zip(columns, columns))], rows):
        fault = next((column for column, cell in cells.items() if "\0" in cell), None)
        if fault is not None:
            raise DataError(f"a cell of column {fault!r} has NUL, which no text has: {cells[fault]!r:.80}; remove it")
        line = io.StringIO(newline="")
        csv.DictWriter(line, columns).writerow(cells)
        yield line.getvalue().encode()


def split_file(path: str | Path, split: str) -> Path:
    """The file of a split: `<split>.csv` in `path` if it is a folder, otherwise `path`."""
    path = Path(path)
    return path / f"{split}.csv" if path.is_dir() else path

"""Documents from a user's own files, standard input and the Hugging Face Hub: texts, rows, HTML, PDF, Word.

Python's json and csv read JSON Lines and CSV; pyarrow and datasets read Parquet and data sets of the Hub. Rows are read
as a stream. An error names the file and the row.
"""

from __future__ import annotations

import logging
import os
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from io import BufferedReader
from itertools import chain, repeat
from pathlib import Path
from shlex import quote
from typing import Any

from mac_rag.data.characters import fault_of, is_blank
from mac_rag.data.conversion.converter import convert, is_converted
from mac_rag.data.dates import with_written_dates
from mac_rag.data.table import Row, parsed_cell, raise_error, read_table
from mac_rag.data.types import Document
from mac_rag.errors import DataError
from mac_rag.untrusted_files import (
    DOCUMENT,
    METADATA_DEPTH,
    ROW,
    ROW_CONTAINERS,
    ROW_LINES,
    MalformedError,
    NulError,
    lines_of,
    open_file,
    parse_json,
)

_log = logging.getLogger(__name__)
TABLES = (".csv", ".tsv")
ROWS = (".jsonl", ".ndjson", *TABLES, ".parquet")  # endings, in any case, of files with a document in each row
STDIN = Path("-")
HUB = "hub:"
_PIECE = 1 << 20
_BATCH = 256  # rows of a Parquet or Hub table that are in memory at a time
# Bounds of a Parquet file: what it may become at least, and for each of its bytes. Deflate packs 1,032 bytes into one.
_MOST_DECODED, _GROWTH = 64 << 20, 1024  # bytes
_MOST_VALUES, _VALUES_OF_BYTE = 1 << 20, 64
_LONG_BATCH = 32 << 20  # bytes of a batch whose rows are decoded one by one


def read_documents(paths: Iterable[Path]) -> list[Document]:
    """Reads files in the order of `paths`.

    A `.jsonl` or `.ndjson` file holds one document per line, `{"id": ..., "text": ...}`; `.csv`, `.tsv` and
    `.parquet` files have the columns `id` and `text`. Further keys and columns become metadata, and so do the names
    in an object `metadata`. Any other file is one document with its path as id. Files of other programs are converted
    to text, and their title becomes metadata (see `mac_rag.data.conversion`); what their texts lack is logged as a
    warning. The path `-` is standard input: JSON Lines if it starts with `{`, otherwise one document with the id `-`.
    The path `hub:OWNER/NAME` is a data set of the Hugging Face Hub, followed by `/CONFIGURATION` and `:SPLIT` if
    needed; the default split is `train`. A row may have 8 MiB, and a file that is one document 64 MiB.

    Raises:
        DataError: for a file that is missing, too long, not a regular file, or not UTF-8 text, for a list in JSON, and
            for a file that cannot be converted; for a row that is malformed or too long, or comes after 200,000 blank
            lines; if pyarrow or datasets is needed and missing. Names the file and the row.
    """
    return [document for path in paths for _, document in _numbered(path, raise_error, _log_notice)]


def _log_notice(path: Path, notice: str) -> None:
    _log.warning("%s: %s", path, notice)


Notify = Callable[[Path, str], object]


def read_good_documents(
    paths: Iterable[Path], refuse: Callable[[DataError], object], *, notify: Notify = _log_notice
) -> Iterator[tuple[str, Document]]:
    """As `read_documents`, but leaves out bad files and rows. Yields file and row, for messages, and the document.

    Args:
        paths: the files.
        refuse: called with the error of each file and row that is left out. If a file of rows cannot be read beyond a
            row, for example because of an open quote, that row and the rest are left out, and the error says so.
        notify: called with a file and what its text lacks; by default, it is logged.
    """
    for path in paths:
        try:
            for number, document in _numbered(path, refuse, notify):
                yield f"{path}, row {number}" if number else str(path), document
        except DataError as error:
            refuse(DataError(f"{error}; nothing after it in this file is read") if _has_rows(path) else error)


def find_files(paths: Iterable[Path], *, refuse: Callable[[DataError], object] = raise_error) -> list[Path]:
    """The files that paths name: for a folder, all files in it and below, in the order of their names.

    In a folder, files and folders whose names begin with a dot are left out.

    Args:
        paths: files and folders.
        refuse: called with the error of a path that is left out; by default, it is raised.

    Raises:
        DataError: for a folder without files, and for a path that the system does not let us read.
    """
    files: list[Path] = []
    for path in paths:
        try:
            files += _files(path)
        except DataError as error:
            refuse(error)
    return files


def _files(path: Path) -> list[Path]:
    with _readable(path):
        if not path.is_dir():
            return [path]
        inside = [
            file
            for file in sorted(path.rglob("*"))
            if not file.is_dir() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
    if not inside:
        raise DataError(f"{path} is a folder without files; give files, or a folder of them")
    return inside


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns errors of the file system into errors that name the path."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; give a file that exists and is readable"
        ) from None


def _numbered(path: Path, refuse: Callable[[DataError], object], notify: Notify) -> Iterator[tuple[int, Document]]:
    """The documents of a file, each with the number of its row, from 1 on; 0 for a file that is one document."""
    if _has_rows(path):
        yield from _documents(read_rows(path, ("id", "text"), refuse=refuse), refuse)
        return
    if is_converted(path):
        text, title, notices = convert(path)
        for notice in notices:
            notify(path, notice)
        yield 0, Document(str(path), text, {} if title is None else {"title": title})
        return
    with _readable(path), closing(_Lines(path)) as lines:
        if path.suffix.casefold() == ".json" and lines.start_with(b"["):
            raise DataError(
                f"{path} is a list in JSON, and only JSON Lines are read as several documents; write one object per "
                f"line to a .jsonl file: jq -c '.[]' {quote(str(path))} > {quote(str(path.with_suffix('.jsonl')))}"
            )
        if path == STDIN and lines.start_with(b"{"):
            yield from _documents(_json_rows(path, lines, refuse), refuse)
        else:
            yield 0, Document(str(path), lines.text())


def _has_rows(path: Path) -> bool:
    return path.suffix.casefold() in ROWS or str(path).startswith(HUB)


def _documents(rows: Iterable[Row], refuse: Callable[[DataError], object]) -> Iterator[tuple[int, Document]]:
    for row in rows:
        try:
            fault = _fault(row.values)
            if fault is not None:
                raise MalformedError(fault)
            values = dict(row.values)
            if row.is_text:
                values |= {name: parsed_cell(values[name]) for name in ("metadata", "supersedes") if name in values}
            document = Document(values.pop("id"), values.pop("text"), merged(values))
        except MalformedError as error:
            refuse(DataError(f"{row.where}: {error}"))
        else:
            yield row.number, document


def merged(values: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the keys of a row make: those in an object `metadata` stand beside the others.

    Raises:
        MalformedError: for a key that stands in both places with two values.
    """
    inside = values.get("metadata")
    if not isinstance(inside, Mapping):
        return dict(values)
    beside = {name: value for name, value in values.items() if name != "metadata"}
    twice = next((name for name in inside if name in beside and beside[name] != inside[name]), None)
    if twice is not None:
        raise MalformedError(f"{twice!r:.80} is beside 'metadata' and in it; keep one of the two")
    return {**beside, **inside}


def _fault(values: Mapping[str, Any]) -> str | None:
    """Says why a row is not a document; None if it is one."""
    for key in ("id", "text"):
        if key not in values:
            return f"no {key!r}; it has {', '.join(map(repr, values)) or 'no keys'}"
        value = values[key]
        if not isinstance(value, str):
            return f"{key!r} must be a text, got {value!r:.80}"
        if is_blank(value):
            fault = fault_of(value)
            return f"{key!r}: {fault}" if fault else f"{key!r} is empty; give every document an id and a text"
        if len(value) > ROW:
            return f"{key!r} has more than {ROW:,} characters; split it into several documents"
    return None


def read_rows(
    path: Path, columns: Sequence[str] = (), *, refuse: Callable[[DataError], object] = raise_error
) -> Iterator[Row]:
    """The rows of a file with one of `ROWS`, or of a data set of the Hub, with values of JSON's types.

    Args:
        path: see `read_documents`.
        columns: the columns that a `.csv` or `.tsv` file must have.
        refuse: called with the error of a row that is left out; by default, it is raised.

    Raises:
        DataError: see `read_documents`; also for a row that is not an object.
    """
    if str(path).startswith(HUB):
        yield from _hub_rows(str(path))
    elif path.suffix.casefold() in TABLES:
        yield from read_table(path, columns, refuse=refuse)
    elif path.suffix.casefold() == ".parquet":
        yield from _parquet_rows(path)
    else:
        with _readable(path), closing(_Lines(path)) as lines:
            yield from _json_rows(path, lines, refuse)


class _Lines:
    """The lines of a text file, or of standard input, read one by one.

    Raises:
        DataError: for a file that cannot be read or is not text, and for a line that is too long; names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blank = b""  # the blank beginning, as far as `start_with` has read it
        try:
            file: Any = sys.stdin.buffer if path == STDIN else open_file(path, follow=True)
        except MalformedError as error:
            raise DataError(f"{path} cannot be read: {error}; give a file, or - for standard input") from None
        self._file = BufferedReader(file)

    def close(self) -> None:
        """Closes the file, unless it is standard input."""
        file = self._file.detach()
        if self._path != STDIN:
            file.close()

    def start_with(self, start: bytes) -> bool:
        """True if the first byte that is not blank is this one."""
        while len(self._blank) <= ROW and (piece := self._file.peek()):
            if piece.strip():
                return piece.removeprefix(BOM_UTF8).lstrip().startswith(start)
            self._blank += self._file.read(len(piece))
        return False

    def __iter__(self) -> Iterator[bytes]:
        yield from repeat(b"\n", self._blank.count(b"\n"))
        with self._errors():
            yield from lines_of(self._file, ROW)

    def text(self) -> str:
        """The whole file, as the text of one document."""
        pieces, size = [self._blank], len(self._blank)
        with self._errors():
            while piece := self._file.read(_PIECE):
                if b"\0" in piece:
                    raise NulError(f"byte {size + piece.index(0):,} is NUL, which no text has")
                pieces.append(piece)
                size += len(piece)
                if size > DOCUMENT:
                    raise DataError(
                        f"{self._path} has more than {DOCUMENT:,} bytes, the most of one document; split it into files"
                    )
        return _decoded(f"{self._path}", b"".join(pieces))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except NulError as error:
            raise DataError(f"{self._path} is not a text in UTF-8: {error}; convert it to text first") from None
        except MalformedError as error:
            raise DataError(
                f"{self._path}, {error}; split it into several documents, or put the text into a file of its own"
            ) from None


def _decoded(where: str, data: bytes) -> str:
    try:
        return data.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not a text in UTF-8: see byte {error.start:,}; convert it to text first") from None


def _json_rows(path: Path, lines: Iterable[bytes], refuse: Callable[[DataError], object]) -> Iterator[Row]:
    blank = 0
    for number, data in enumerate(lines, 1):
        where = f"{path}, row {number}"
        try:
            line = _decoded(where, data.removesuffix(b"\n"))
            values = _object(where, line) if line.strip() else None
        except DataError as error:
            refuse(error)
            continue
        if values is not None:
            blank = 0
            yield Row(where, number, values)
            continue
        blank += 1
        if blank > ROW_LINES:
            raise DataError(f"{where}: it comes after {ROW_LINES:,} blank lines; remove them")


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        values: Any = parse_json(line, depth=METADATA_DEPTH + 1, containers=ROW_CONTAINERS)
    except MalformedError as error:
        raise DataError(f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: not a JSON object but {type(values).__name__}")
    return values


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise DataError(f"{path} is Parquet, which needs pyarrow: pip install 'mac-rag[hub-data]'") from None
    try:
        with _readable(path), open_file(path, follow=True) as file:
            size = os.fstat(file.fileno()).st_size
            parquet = ParquetFile(file)
            _check_growth(parquet.metadata, size)
            # As dictionaries, texts that repeat take no more memory than in the file.
            leaves = map(parquet.schema.column, range(parquet.metadata.num_columns))
            texts = [leaf.path for leaf in leaves if _is_text(leaf)]
            parquet = ParquetFile(file, metadata=parquet.metadata, read_dictionary=texts, pre_buffer=False)
            # One row group at a time: pyarrow cannot join the dictionaries of two of them within lists.
            groups = (parquet.iter_batches(_BATCH, row_groups=[group]) for group in range(parquet.num_row_groups))
            bounded = _bounded(chain.from_iterable(groups), _MOST_DECODED + _GROWTH * size)
            yield from _typed_rows(str(path), bounded)
    except MalformedError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except (ArrowException, ValueError) as error:  # ValueError if a column's name is not UTF-8
        raise DataError(f"{path} is not well-formed Parquet: {error}; write it again") from None


def _is_text(leaf: Any) -> bool:
    """True for a column of a Parquet file, perhaps within another, that holds texts or bytes."""
    return leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type in ("STRING", "JSON", "ENUM", "NONE")


def _check_growth(metadata: Any, size: int) -> None:
    """Refuses a Parquet file of `size` bytes that says that it becomes far larger, before anything is decoded."""
    if metadata.num_rows > _MOST_VALUES + _VALUES_OF_BYTE * size:
        raise MalformedError(f"it has {size:,} bytes and says that it has {metadata.num_rows:,} rows; write it again")
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            decoded = column.total_uncompressed_size
            if decoded > _MOST_DECODED + _GROWTH * size or column.num_values > _MOST_VALUES + _VALUES_OF_BYTE * size:
                raise MalformedError(
                    f"it has {size:,} bytes, and its column {column.path_in_schema!r:.80} becomes {decoded:,} bytes "
                    f"with {column.num_values:,} values; write it again"
                )


def _bounded(batches: Iterable[Any], left: int) -> Iterator[Any]:
    """Batches of a Parquet file with bounded texts, row by row if those of a batch are long together.

    Args:
        batches: the batches.
        left: most bytes of the texts and values of all rows.

    Raises:
        MalformedError: for a row that exceeds it; such a row is not decoded.
    """
    number = 0
    for batch in batches:
        rows = [batch] if _size(batch) <= _LONG_BATCH else [batch.slice(row, 1) for row in range(len(batch))]
        for some in rows:
            left -= _size(some)
            if left < 0:
                raise MalformedError(
                    f"up to row {number + 1} its values become too many bytes for its size; write it again"
                )
            number += len(some)
            yield some


def _size(values: Any) -> int:
    """Bytes of the values of an Arrow batch or array once its dictionaries are decoded."""
    from pyarrow import RecordBatch, compute, types

    if isinstance(values, RecordBatch):
        return sum(map(_size, values.columns))
    if types.is_dictionary(values.type):
        lengths = compute.binary_length(values.dictionary).take(values.indices)
        return int(compute.sum(lengths).as_py() or 0) + 8 * len(values)
    if types.is_map(values.type):
        first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return sum(_size(part.slice(first, last - first)) for part in (values.keys, values.items)) + 8 * len(values)
    if types.is_nested(values.type):
        parts = values.flatten()
        return sum(map(_size, parts if isinstance(parts, list) else [parts])) + 8 * len(values)
    return int(values.nbytes)


def _hub_rows(name: str) -> Iterator[Row]:
    repository, _, split = name.removeprefix(HUB).partition(":")
    table = _loaded(f"{HUB}{repository}", split or "train", name)
    yield from _typed_rows(name, table.with_format("arrow").iter(_BATCH))


def hub_splits(name: str | Path) -> list[str]:
    """The names of the splits of a data set of the Hub, `hub:OWNER/NAME` or `hub:OWNER/NAME/CONFIGURATION`.

    Raises:
        DataError: if `datasets` is missing, and for a data set that is not found.
    """
    return list(_loaded(str(name), None, str(name)))


def _loaded(name: str, split: str | None, shown: str) -> Any:
    """Loads the table of a split, or, for None, split -> table for all splits. `shown`: the name for messages."""
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


def _typed_rows(where: str, batches: Iterable[Any]) -> Iterator[Row]:
    """The rows of Arrow batches."""
    number = 0
    for batch in batches:
        for values in _values(where, batch, number):
            number += 1
            yield Row(f"{where}, row {number}", number, with_written_dates(values))


def _values(where: str, batch: Any, number: int) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow batch, as Python values."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # not UTF-8, or a date beyond Python's range
        for index in range(len(batch)):
            try:
                yield from batch.slice(index, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                raise DataError(f"{where}, row {number + index + 1}: a value cannot be read: {error}") from None

"""Reads documents from a user's own files and standard input: text and Markdown, JSON Lines, and CSV."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mac_rag.data.table import read_table
from mac_rag.data.types import Document
from mac_rag.errors import DataError
from mac_rag.untrusted_files import (
    METADATA_DEPTH,
    ROW,
    ROW_CONTAINERS,
    MalformedError,
    NulError,
    lines_of,
    open_file,
    parse_json,
)

STDIN = Path("-")
_PIECE = 1 << 20


def read_documents(paths: Iterable[Path]) -> list[Document]:
    """Reads files in the order of `paths`.

    A `.jsonl` file holds one document per line, `{"id": ..., "text": ...}`; a `.csv` file has the columns `id` and
    `text`. Further keys and columns become metadata. Any other file is one document with its path as id. The path `-`
    is standard input: JSON Lines if it starts with `{`, otherwise one document with the id `-`. A row, or a file that
    is one document, may have 8 MiB.

    Raises:
        DataError: for a file that is missing, no regular file, or not UTF-8 text; for a row that is malformed or too
            long; names the file and the row.
    """
    return [document for path in paths for document in _documents(path)]


def _documents(path: Path) -> Iterator[Document]:
    if path.suffix == ".csv":
        for row in read_table(path, ("id", "text")):
            others = {column: cell for column, cell in row.cells.items() if column not in ("id", "text")}
            yield Document(row.filled("id"), row.filled("text"), others)
        return
    with closing(_Lines(path)) as lines:
        if path.suffix == ".jsonl" or (path == STDIN and lines.start_with(b"{")):
            yield from _rows(path, lines)
        else:
            yield Document(str(path), lines.text())


class _Lines:
    """The lines of a text file, or of standard input, read one by one.

    Raises:
        DataError: for a file that cannot be read or is no text, and for a line that is too long; it names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun: list[bytes] = []  # lines that were looked at already
        try:
            self._file = sys.stdin.buffer if path == STDIN else open_file(path, follow=True)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except MalformedError as error:
            raise DataError(f"{path} cannot be read: {error}; give a file, or - for standard input") from None

    def close(self) -> None:
        """Closes the file; standard input is not ours to close."""
        if self._path != STDIN:
            self._file.close()

    def start_with(self, start: bytes) -> bool:
        """True if the first line that is not blank starts so."""
        for line in self._read():
            self._begun.append(line)
            if line.strip():
                return line.lstrip().startswith(start)
        return False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._begun
        yield from self._read()

    def _read(self) -> Iterator[bytes]:
        with self._errors():
            yield from lines_of(self._file, ROW)

    def text(self) -> str:
        """All of it, as one document."""
        pieces, size = self._begun, sum(map(len, self._begun))
        with self._errors():
            while piece := self._file.read(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if b"\0" in piece:
                    raise NulError("a text has no NUL")
                if size > ROW:
                    raise DataError(
                        f"{self._path} has more than {ROW:,} bytes, the most of one document; split it into files"
                    )
        return _decoded(self._path, b"".join(pieces))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}") from None
        except NulError:
            raise DataError(f"{self._path} is not a text in UTF-8; convert it to text first") from None
        except MalformedError as error:
            raise DataError(f"{self._path}, {error}; split it into several documents") from None


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text in UTF-8; convert it to text first") from None


def _rows(path: Path, lines: Iterable[bytes]) -> Iterator[Document]:
    for number, data in enumerate(lines, 1):
        line = _decoded(path, data.removesuffix(b"\n"))
        if not line.strip():
            continue
        where = f"{path}, row {number}"
        try:
            row: Any = parse_json(line, depth=METADATA_DEPTH, containers=ROW_CONTAINERS)
        except MalformedError as error:
            raise DataError(f"{where}: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: not a JSON object but {type(row).__name__}")
        for key in ("id", "text"):
            if key not in row:
                raise DataError(f"{where}: no {key!r}; it has {', '.join(map(repr, row)) or 'no keys'}")
            if not isinstance(row[key], str):
                raise DataError(f"{where}: {key!r} must be a text, got {row[key]!r:.80}")
        yield Document(row.pop("id"), row.pop("text"), row)

"""Reads documents from a user's own files and standard input: texts, JSON Lines, CSV, Parquet, HTML, PDF and DOCX.

Files of rows are read as a stream, and from any document on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from io import BufferedReader
from itertools import repeat
from pathlib import Path
from shlex import quote
from typing import Any

from mac_rag.data.conversion.converter import convert, is_converted
from mac_rag.data.table import Place, raise_error, read_table
from mac_rag.data.typed_rows import HUB, read_hub, read_parquet
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

STDIN = Path("-")
_PIECE = 1 << 20


def read_documents(paths: Iterable[Path]) -> list[Document]:
    """Reads files in the order of `paths`.

    A `.jsonl` file holds one document per line, `{"id": ..., "text": ...}`; `.csv` and `.parquet` files have the
    columns `id` and `text`. Further keys and columns become metadata. Any other file is one document with its path as
    id; of an HTML, PDF or DOCX file it is the text, and the title becomes metadata (see `mac_rag.data.conversion`). The
    path `-` is standard input: JSON Lines if it starts with `{`, otherwise one document with the id `-`. The path
    `hub:OWNER/NAME` is a data set of the Hugging Face Hub (see `mac_rag.data.typed_rows.read_hub`). A row may have
    8 MiB, and a file that is one document 64 MiB.

    Raises:
        DataError: for a file that is missing, too long, no regular file, or not UTF-8 text, for a list in JSON, and for
            a file that cannot be converted; for a row that is malformed or too long, or behind 200,000 blank lines;
            names the file and the row.
    """
    return [document for path in paths for _, document in placed_documents(path)]


def read_good_documents(paths: Iterable[Path], refuse: Callable[[DataError], object]) -> Iterator[tuple[str, Document]]:
    """As `read_documents`, but leaves out what is bad. Yields each document behind its file and row, for messages.

    Args:
        paths: the files.
        refuse: takes the error of each file and row that is left out. If a file of rows cannot be read on from a row,
            as where a quote is open, the rest of it is left out with that row, and the error says so.
    """
    for path in paths:
        has_rows = path.suffix in (".jsonl", ".csv", ".parquet") or str(path).startswith(HUB)
        try:
            for place, document in placed_documents(path, refuse=refuse):
                yield f"{path}, row {place.rows + 1}" if has_rows else str(path), document
        except DataError as error:
            refuse(DataError(f"{error}; nothing behind it in this file is read") if has_rows else error)


def find_files(paths: Iterable[Path], *, refuse: Callable[[DataError], object] = raise_error) -> list[Path]:
    """The files that paths name: for a folder all files in it and below, in the order of their names.

    What begins with a dot is left out.

    Args:
        paths: files and folders.
        refuse: takes the error of a path that is left out; by default, it is raised.

    Raises:
        DataError: for a folder without files, and for what the system refuses to look at.
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
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def placed_documents(
    path: Path, start: Place = Place(), *, refuse: Callable[[DataError], object] = raise_error
) -> Iterator[tuple[Place, Document]]:
    """Yields the documents of a file, and the place of each, from which on the file can be read.

    Args:
        path: see `read_documents`.
        start: where to begin; standard input can be read from its beginning only, and once.
        refuse: takes the error of a row that is left out; by default, it is raised.

    Raises:
        DataError: see `read_documents`.
    """
    if path.suffix == ".csv":
        for row in read_table(path, ("id", "text"), start, refuse=refuse):
            others = {column: cell for column, cell in row.cells.items() if column not in ("id", "text")}
            try:
                document = Document(row.filled("id"), row.filled("text"), others)
            except DataError as error:
                refuse(error)
            else:
                yield row.place, document
        return
    if path.suffix == ".parquet" or str(path).startswith(HUB):
        read = read_hub if str(path).startswith(HUB) else read_parquet
        for number, document in read(path, start.rows, refuse=refuse):
            yield Place(number), document
        return
    if is_converted(path):
        text, title = convert(path)
        yield Place(), Document(str(path), text, {} if title is None else {"title": title})
        return
    with _readable(path), closing(_Lines(path)) as lines:
        if path.suffix == ".json" and lines.start_with(b"["):
            raise DataError(
                f"{path} is a list in JSON, and only JSON Lines are read as several documents; write one object a line "
                f"to a .jsonl file: jq -c '.[]' {quote(str(path))} > {quote(str(path.with_suffix('.jsonl')))}"
            )
        if path.suffix == ".jsonl" or (path == STDIN and lines.start_with(b"{")):
            lines.go_on(start)
            yield from _rows(path, lines, start, refuse)
        else:
            yield Place(), Document(str(path), lines.text())


class _Lines:
    """The lines of a text file, or of standard input, read one by one.

    Raises:
        DataError: for a file that cannot be read or is no text, and for a line that is too long; it names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blank = b""  # the blank beginning, where it was looked at already
        try:
            file: Any = sys.stdin.buffer if path == STDIN else open_file(path, follow=True)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        except MalformedError as error:
            raise DataError(f"{path} cannot be read: {error}; give a file, or - for standard input") from None
        self._file = BufferedReader(file)

    def close(self) -> None:
        """Closes the file; standard input is not ours to close."""
        file = self._file.detach()
        if self._path != STDIN:
            file.close()

    def go_on(self, place: Place) -> None:
        """Goes on at another place of the file."""
        if place.size:
            self._file.seek(place.size)

    def start_with(self, start: bytes) -> bool:
        """True if what comes first that is not blank starts with this byte."""
        with self._errors():
            while len(self._blank) <= ROW and (piece := self._file.peek()):
                if piece.strip():
                    return piece.lstrip().startswith(start)
                self._blank += self._file.read(len(piece))
        return False

    def __iter__(self) -> Iterator[bytes]:
        yield from repeat(b"\n", self._blank.count(b"\n"))
        with self._errors():
            yield from lines_of(self._file, ROW)

    def text(self) -> str:
        """All of it, as one document."""
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
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}") from None
        except NulError as error:
            raise DataError(f"{self._path} is not a text in UTF-8: {error}; convert it to text first") from None
        except MalformedError as error:
            raise DataError(
                f"{self._path}, {error}; split it into several documents, or give the text a file of its own"
            ) from None


def _decoded(where: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not a text in UTF-8: see byte {error.start:,}; convert it to text first") from None


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of a JSON Lines file, each with its file and row for messages.

    Raises:
        DataError: see `read_documents`; also for a row that is no object.
    """
    with _readable(path), closing(_Lines(path)) as lines:
        for _, where, row in _objects(path, lines, Place(), raise_error):
            yield where, row


def _rows(
    path: Path, lines: Iterable[bytes], start: Place, refuse: Callable[[DataError], object]
) -> Iterator[tuple[Place, Document]]:
    for place, where, row in _objects(path, lines, start, refuse):
        fault = _fault(row)
        if fault is None:
            yield place, Document(row.pop("id"), row.pop("text"), row)
        else:
            refuse(DataError(f"{where}: {fault}"))


def _fault(row: dict[str, Any]) -> str | None:
    """Why a row is no document."""
    for key in ("id", "text"):
        if key not in row:
            return f"no {key!r}; it has {', '.join(map(repr, row)) or 'no keys'}"
        if not isinstance(row[key], str):
            return f"{key!r} must be a text, got {row[key]!r:.80}"
    return None


def _objects(
    path: Path, lines: Iterable[bytes], start: Place, refuse: Callable[[DataError], object]
) -> Iterator[tuple[Place, str, dict[str, Any]]]:
    blank, size = 0, start.size
    for number, data in enumerate(lines, start.lines + 1):
        where = f"{path}, row {number}"
        place = Place(number - 1, number - 1, size)
        size += len(data)
        try:
            line = _decoded(where, data.removesuffix(b"\n"))
            row = _object(where, line) if line.strip() else None
        except DataError as error:
            refuse(error)
            continue
        if row is not None:
            blank = 0
            yield place, where, row
            continue
        blank += 1
        if blank > ROW_LINES:
            raise DataError(f"{where}: it comes after {ROW_LINES:,} blank lines; remove them")


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        row: Any = parse_json(line, depth=METADATA_DEPTH, containers=ROW_CONTAINERS)
    except MalformedError as error:
        raise DataError(f"{where}: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object but {type(row).__name__}")
    return row

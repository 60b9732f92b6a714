"""Reads documents from a user's own files and standard input: text and Markdown, JSON Lines, and CSV."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mac_rag.data.provenance import MOST_DIGITS
from mac_rag.data.table import read_table
from mac_rag.data.types import Document
from mac_rag.errors import DataError

STDIN = Path("-")


def read_documents(paths: Iterable[Path]) -> list[Document]:
    """Reads files in the order of `paths`.

    A `.jsonl` file holds one document per line, `{"id": ..., "text": ...}`; a `.csv` file has the columns `id` and
    `text`. Further keys and columns become metadata. Any other file is one document with its path as id. The path `-`
    is standard input: JSON Lines if it starts with `{`, otherwise one document with the id `-`.

    Raises:
        DataError: for a file that is missing or is not UTF-8 text, or a malformed row; names the file and the row.
    """
    return [document for path in paths for document in _documents(path)]


def _documents(path: Path) -> Iterator[Document]:
    if path.suffix == ".csv":
        for row in read_table(path, ("id", "text")):
            others = {column: cell for column, cell in row.cells.items() if column not in ("id", "text")}
            yield Document(row.filled("id"), row.filled("text"), others)
        return
    text = _text(path)
    if path.suffix == ".jsonl" or (path == STDIN and text.lstrip().startswith("{")):
        yield from _rows(path, text)
    else:
        yield Document(str(path), text)


def _text(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
        text = data.decode()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DataError(f"{path} is not a text in UTF-8; convert it to text first")
    return text


def _rows(path: Path, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, row {number}"
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno})") from None
        except ValueError:  # all else that json refuses is an integer beyond Python's own limit
            raise DataError(f"{where}: a number of more than {MOST_DIGITS} digits; write it as a text") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: not a JSON object but {type(row).__name__}")
        for key in ("id", "text"):
            if key not in row:
                raise DataError(f"{where}: no {key!r}; it has {', '.join(map(repr, row)) or 'no keys'}")
            if not isinstance(row[key], str):
                raise DataError(f"{where}: {key!r} must be a text, got {row[key]!r}")
        yield Document(row.pop("id"), row.pop("text"), row)

"""The texts of a segment's documents: one sealed line of JSON for each, in the order of the records.

    {"id": "june", "text": "The bridge was closed.", "sha256": "..."}

A document whose text was lost has no line. The file is mapped when the bank is opened, and checked when the first text
is asked for. A text is believed only if it is the one that its document's content hash was made of.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from functools import cached_property
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from mac_rag.atomic_files import sealed
from mac_rag.data.provenance import Member
from mac_rag.errors import BankError
from mac_rag.memory.storage.record_lines import LONGEST_LINE, sealed_lines
from mac_rag.untrusted_files import MalformedError, lines_of, open_file, parse_json, read_text_bytes

_PIECE = 1 << 20
_FIELDS = frozenset(("id", "text", "sha256"))


class TextsFile:
    """The file of a segment's texts, which stays readable after its name is gone, as the memory tokens do.

    Args:
        path: the file.
        digest: its sha256.
        in_memory: True to read it now, because it will be overwritten before it is removed.

    Raises:
        MalformedError: when it is no regular file; with `in_memory`, when it has a NUL, as while it is overwritten.
        FileNotFoundError: when it is missing.
    """

    def __init__(self, path: Path, digest: str, *, in_memory: bool = False) -> None:
        self._digest = digest
        self._lines: dict[str, slice] | None = None  # document id -> its line
        self._bytes: mmap.mmap | bytes
        if in_memory:
            self._bytes = read_text_bytes(path, sys.maxsize)
            return
        with open_file(path) as file:
            is_empty = not file.read(1)  # which cannot be mapped
            self._bytes = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @cached_property
    def count(self) -> int:
        """The number of lines, which are counted and not read."""
        return sum(self._bytes[first : first + _PIECE].count(b"\n") for first in range(0, len(self._bytes), _PIECE))

    def text(self, member: Member) -> str | None:
        """The text of a document; None if it was lost.

        Raises:
            MalformedError: when the file is not what was written, or the text is not the document's.
        """
        if self._lines is None:
            self._lines = self._read()
        line = self._lines.get(member.document_id)
        if line is None:
            return None
        text: str = _fields(self._bytes[line])["text"]
        if not member.matches(text):
            raise MalformedError(f"the text of document {member.document_id[:200]!r} is not what was adapted to")
        return text

    def _read(self) -> dict[str, slice]:
        """Where the line of each document is."""
        digest = hashlib.sha256()
        lines: dict[str, slice] = {}
        end = 0
        for number, line in enumerate(lines_of(BufferedReader(_Mapped(self._bytes)), LONGEST_LINE), 1):
            digest.update(line)
            try:
                name = _fields(line)["id"]
            except MalformedError as error:
                raise MalformedError(f"line {number}: {error}") from None
            if name in lines:
                raise MalformedError(f"line {number}: document {name[:200]!r} comes twice")
            lines[name] = slice(end, end := end + len(line))
        if digest.hexdigest() != self._digest:
            raise MalformedError("its checksum differs from the manifest's")
        return lines


class _Mapped(RawIOBase):
    """A mapped file, read from its beginning like any other."""

    def __init__(self, content: mmap.mmap | bytes) -> None:
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._content[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def text_line(document_id: str, text: str) -> bytes:
    """The line of a document.

    Raises:
        BankError: for a text too long to be read again.
    """
    data = sealed({"id": document_id, "text": text})
    if len(data) > LONGEST_LINE:
        raise BankError(
            f"the text of document {document_id!r} needs {len(data):,} bytes, and {LONGEST_LINE:,} are the most that a "
            "bank keeps of one; split it, or use a bank that keeps no texts"
        )
    return data + b"\n"


def undamaged_texts(file: BinaryIO) -> dict[str, str]:
    """The texts by document id that a damaged file still has."""
    kept = (fields for fields in sealed_lines(file) if fields.keys() == _FIELDS - {"sha256"})
    return {each["id"]: each["text"] for each in kept if isinstance(each["id"], str) and isinstance(each["text"], str)}


def _fields(line: bytes) -> dict[str, Any]:
    fields = parse_json(line)
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise MalformedError("it is no text of a document")
    if not isinstance(fields["id"], str) or not isinstance(fields["text"], str):
        raise MalformedError("id and text of a document are not texts")
    return fields

"""The lines of a records file: one sealed line of JSON for each entry of a segment.

    {"sequence": 7, "rows": 2, "members": [...], "start": 12, "tokens": "<sha256 of the rows>", "sha256": "..."}

A line is believed only where it can be true: its types, its ranges, and its place among the other lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from mac_rag.atomic_files import sealed, unsealed
from mac_rag.data.provenance import Member
from mac_rag.memory.entry_table import Record
from mac_rag.memory.parts import PART_BITS
from mac_rag.memory.storage.manifest import SEQUENCES
from mac_rag.untrusted_files import MalformedError, is_hole, json_end, parse_json, skip_hole

# Bytes of a line. Only entries that average very many documents come near it.
LONGEST_LINE = 64 << 20
_PIECE = 1 << 20
_MEMBER_FIELDS = frozenset(Member.__slots__)
_FIELDS = frozenset(("sequence", "rows", "members", "start", "tokens", "sha256"))
_DIGEST = re.compile("[0-9a-f]{64}")


class RecordLine(NamedTuple):
    """What one line says.

    Attributes:
        record: the entry.
        start: number of its first row in the segment.
        checksum: sha256 of its rows.
    """

    record: Record
    start: int
    checksum: str

    @property
    def stop(self) -> int:
        """Number of the first row behind it."""
        return self.start + self.record.rows


def encode(line: RecordLine) -> bytes:
    """The line as bytes, without a line feed.

    Raises:
        MalformedError: for a line that would be too long to be read again.
    """
    record, start, checksum = line
    members = [{name: getattr(member, name) for name in Member.__slots__} for member in record.members]
    fields = {"sequence": record.sequence, "rows": record.rows, "members": members, "start": start, "tokens": checksum}
    data = sealed(fields)
    if len(data) > LONGEST_LINE:
        raise MalformedError(f"{len(members):,} documents in one entry need {len(data):,} bytes")
    return data


def decode(line: bytes) -> RecordLine:
    """Reads a line of a file whose checksum vouches for the line's own.

    Raises:
        MalformedError: for a line that says what cannot be true.
    """
    fields = parse_json(line)
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise MalformedError("it is no record")
    return _record_line(fields)


def decode_alone(line: bytes) -> RecordLine:
    """Reads a line for which nothing but its own checksum vouches.

    Raises:
        MalformedError: for a line that is not what was written, or says what cannot be true.
    """
    fields = unsealed(line)
    if fields.keys() != _FIELDS - {"sha256"}:
        raise MalformedError("it is no record")
    return _record_line(fields)


def consecutive(lines: Iterable[bytes], entries: int, rows: int) -> Iterator[RecordLine]:
    """Reads the lines of a whole file: the entries in the order of their sequence numbers, the rows without a gap.

    Args:
        lines: the lines.
        entries: how many there must be.
        rows: the rows that they must have together.

    Raises:
        MalformedError: for a line that is malformed or out of place; it names the line.
    """
    number, row, before = 0, 0, -1
    for number, data in enumerate(lines, 1):
        try:
            line = decode(data)
        except MalformedError as error:
            raise MalformedError(f"line {number}: {error}") from None
        if number > entries:
            raise MalformedError(f"line {number}: the manifest has only {entries:,} entries for it")
        if line.start != row or line.stop > rows:
            raise MalformedError(f"line {number}: rows {line.start:,} to {line.stop:,} of {rows:,}, from {row:,} on")
        if line.record.sequence <= before:
            raise MalformedError(f"line {number}: sequence number {line.record.sequence:,} after {before:,}")
        row, before = line.stop, line.record.sequence
        yield line
    if number < entries or row < rows:
        raise MalformedError(f"it has {number:,} entries with {row:,} rows, not {entries:,} with {rows:,}")


def undamaged(file: BinaryIO) -> Iterator[RecordLine]:
    """The lines of a damaged file that are what was written."""
    for fields in sealed_lines(file):
        if fields.keys() == _FIELDS - {"sha256"}:
            with suppress(MalformedError):
                yield _record_line(fields)


def sealed_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """What the lines of a damaged file say that are sealed still, also where only a line break is damaged."""
    for damaged in _any_lines(file):
        text, start = damaged.decode("latin-1"), 0
        while start < len(damaged):
            try:
                end = json_end(text, start)
                fields = unsealed(damaged[start:end])
            except MalformedError:
                break
            yield fields
            start = end + 1


def _any_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file that may be anything, without those that are too long and without what lies in holes."""
    begun = b""
    while piece := file.read(_PIECE):
        if is_hole(piece):
            begun = b""
            skip_hole(file)
            continue
        *lines, begun = (begun + piece).split(b"\n")
        yield from lines
        if len(begun) > LONGEST_LINE:
            begun = b""
    yield begun


def _record_line(fields: dict[str, Any]) -> RecordLine:
    sequence, rows, start = fields["sequence"], fields["rows"], fields["start"]
    _check("sequence number", sequence, 0, SEQUENCES)
    _check("number of rows", rows, 1, 1 << PART_BITS)
    _check("first row", start, 0, SEQUENCES)
    checksum, members = fields["tokens"], fields["members"]
    if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
        raise MalformedError(f"its checksum of memory tokens is {checksum!r:.80}")
    if not isinstance(members, list) or not members:
        raise MalformedError("it stands for no document")
    return RecordLine(Record(sequence, rows, tuple(_member(member) for member in members)), start, checksum)


def _check(name: str, value: object, least: int, end: int) -> None:
    if type(value) is not int or not least <= value < end:  # True is an int, too
        raise MalformedError(f"its {name} is {value!r:.80}")


def _member(fields: object) -> Member:
    if not isinstance(fields, dict) or fields.keys() != _MEMBER_FIELDS:
        raise MalformedError("a document of it is described by other fields")
    member = Member(**fields)
    kinds = type(member.document_id), type(member.content_hash), type(member.metadata), type(member.added)
    if kinds != (str, str, dict, str):
        raise MalformedError(f"the document {member.document_id!r:.80} is described by values of other types")
    return member

"""A segment: entries of a bank in two files that never change.

    <name>.safetensors    the tensor `phi` [n, T, D] (float32) or `codes` [n, T] (int32); all ids in its header
    <name>.jsonl          one sealed line for each entry: its documents, its rows, the checksum of its memory tokens

Each entry can be verified by itself, and each file can name what the other has lost (`mac_rag.memory.storage.repair`).
Document ids are data in these files and never become part of a path.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mac_rag.atomic_files import sealed, write_file
from mac_rag.data.provenance import Member
from mac_rag.errors import DamageError
from mac_rag.memory.parts import Part
from mac_rag.memory.records import Record
from mac_rag.memory.storage.manifest import SegmentInfo

_REMEDY = "; repair the bank to keep what is not lost"


class Segment(Part):
    """A part of a bank that is on disk, with memory-mapped rows.

    Args:
        folder: folder of the bank.
        info: what the manifest says about the segment.
        tokens: memory tokens `[n, T, D]` or codes `[n, T]`, memory-mapped.
        records: the records of all entries, in order.
        checksums: sha256 of the rows of each entry, in order.

    Attributes:
        folder: folder of the bank.
        checksums: sha256 of the rows of each entry, by sequence number.
    """

    def __init__(
        self, folder: Path, info: SegmentInfo, tokens: Tensor, records: Sequence[Record], checksums: Sequence[str]
    ) -> None:
        super().__init__(tokens, records)
        self.folder = folder
        self.checksums = {record.sequence: checksum for record, checksum in zip(records, checksums, strict=True)}
        self._info = info
        for sequence in info.tombstones:
            self.tombstone(sequence)

    @property
    def name(self) -> str:
        """Name of its two files, without the suffix."""
        return self._info.name

    @property
    def info(self) -> SegmentInfo:
        """What the next manifest has to say about the segment."""
        return self._info.model_copy(update={"tombstones": tuple(self.tombstones)})

    def at(self, info: SegmentInfo) -> Segment | None:
        """This segment as another manifest describes it; None if these are other files, or if entries came back."""
        more = set(info.tombstones).difference(self.tombstones)
        expected = self._info.model_copy(update={"tombstones": info.tombstones})
        if info != expected or not more <= self.entries.keys() or not set(self.tombstones) <= set(info.tombstones):
            return None
        segment = self.copy()
        for sequence in more:
            segment.tombstone(sequence)
        return segment


def write_segment(folder: Path, parts: Sequence[Part]) -> Segment:
    """Writes the live entries of some parts as a new segment. The caller must `sync_folder` before it commits.

    Raises:
        DamageError: when rows to be copied from another segment are not what was written there.
    """
    name = f"segment-{secrets.token_hex(8)}"
    entries = [(part, entry) for part in parts for entry in part.entries.values()]
    shape = (sum(part.count for part in parts), *parts[0].tokens.shape[1:])
    checksums: list[str] = []
    header = _header([entry.record for _, entry in entries], shape)

    def tokens_file() -> Iterator[bytes | memoryview]:
        yield header
        for part, (record, start) in entries:
            data = part.tokens[start : start + record.rows].contiguous().numpy().data.cast("B")
            checksums.append(hashlib.sha256(data).hexdigest())
            if isinstance(part, Segment) and part.checksums[record.sequence] != checksums[-1]:
                raise DamageError(f"{part.folder / part.info.tokens_file} is damaged: {describe(record.document_ids)}")
            yield data

    def records_file() -> Iterator[bytes]:
        start = 0
        for (_, (record, _)), checksum in zip(entries, checksums, strict=True):
            yield sealed({**_fields_of(record), "start": start, "tokens": checksum}) + b"\n"
            start += record.rows

    tokens = write_file(folder / f"{name}.safetensors", tokens_file())
    records = write_file(folder / f"{name}.jsonl", records_file())
    info = SegmentInfo(name=name, entries=len(entries), shape=shape, offset=len(header), tokens=tokens, records=records)
    return Segment(folder, info, _mapped(folder, info), [entry.record for _, entry in entries], checksums)


def read_segment(folder: Path, info: SegmentInfo) -> Segment:
    """Opens a segment.

    Raises:
        FileNotFoundError: when one of its files is missing, as happens after a writer has replaced the segment.
        DamageError: when one of its files is not what was written.
    """
    data = (folder / info.records_file).read_bytes()
    if hashlib.sha256(data).hexdigest() != info.records:
        raise DamageError(f"{folder / info.records_file} is damaged: its checksum differs from the manifest's{_REMEDY}")
    tokens = _mapped(folder, info, check=True)
    records, checksums = [], []
    for line in data.splitlines():
        fields = json.loads(line)
        records.append(record_of(fields))
        checksums.append(fields["tokens"])
    return Segment(folder, info, tokens, records, checksums)


def continues(before: Sequence[Segment], next_sequence: int, after: Sequence[Segment]) -> bool:
    """True if a bank that had the segments `before` can have become the one with the segments `after` by commits.

    Then an entry that had a sequence number below `next_sequence` and is still there has not changed.
    """
    known = {segment.name: segment.entries.keys() for segment in before}
    checksums = {number: segment.checksums[number] for segment in before for number in segment.entries}
    return all(
        segment.checksums[number] == checksums.get(number)
        for segment in after
        if not segment.entries.keys() <= known.get(segment.name, set())
        for number in segment.entries
        if number < next_sequence
    )


def _fields_of(record: Record) -> dict[str, Any]:
    """The fields of a record in a line of a records file."""
    members = [{name: getattr(member, name) for name in Member.__slots__} for member in record.members]
    return {"sequence": record.sequence, "rows": record.rows, "members": members}


def record_of(fields: dict[str, Any]) -> Record:
    """The record in a line of a records file."""
    return Record(fields["sequence"], fields["rows"], tuple(Member(**member) for member in fields["members"]))


def entry_ids(header: bytes) -> dict[int, tuple[str, ...]]:
    """The document ids of each entry by sequence number, read from the header of a tokens file.

    Raises:
        ValueError, KeyError, TypeError: when it is not such a header.
    """
    entries = json.loads(json.loads(header[8:])["__metadata__"]["entries"])
    return {int(sequence): tuple(ids) for sequence, ids in entries}


def describe(document_ids: Sequence[str]) -> str:
    """Names an entry in an error message."""
    return "the memory tokens of " + ", ".join(map(repr, document_ids))


def dtype_of(shape: Sequence[int]) -> torch.dtype:
    """The dtype of a tensor of this shape: memory tokens `[n, T, D]` are float32, codes `[n, T]` are int32."""
    return torch.float32 if len(shape) == 3 else torch.int32


def _header(records: Sequence[Record], shape: Sequence[int]) -> bytes:
    """The header of a safetensors file, padded so that the tensor behind it is aligned."""
    name, kind = ("phi", "F32") if len(shape) == 3 else ("codes", "I32")
    entries = [(record.sequence, record.document_ids) for record in records]
    header = json.dumps(
        {
            "__metadata__": {"format": "pt", "entries": json.dumps(entries)},
            name: {"dtype": kind, "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _mapped(folder: Path, info: SegmentInfo, *, check: bool = False) -> Tensor:
    """The memory-mapped rows of a segment; `check` compares the file with its checksum first."""
    path = folder / info.tokens_file
    with path.open("rb") as file:
        # The checksum reads the file instead of mapping it, or all of it would count as memory of this process.
        if check and hashlib.file_digest(file, "sha256").hexdigest() != info.tokens:
            raise DamageError(f"{path} is damaged: its checksum differs from the manifest's{_REMEDY}")
        # A private mapping: torch has no read-only tensors, and the file must never change.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    rows = torch.frombuffer(mapped, dtype=dtype_of(info.shape), count=math.prod(info.shape), offset=info.offset)
    return rows.view(info.shape)

"""A segment: entries of a bank in files that never change.

    <name>.safetensors    the tensor `phi` [n, T, D] (float32) or `codes` [n, T] (int32); all ids in its header
    <name>.jsonl          one sealed line for each entry: its documents, its rows, the checksum of its memory tokens
    <name>.texts.jsonl    in a bank that keeps texts, their lines; see `mac_rag.memory.storage.texts_file`

Each entry can be verified by itself, and each file can name what the other has lost (`mac_rag.memory.storage.repair`).
Document ids are data in these files and never become part of a path.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from mac_rag.atomic_files import write_file
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.parts import Part, Texts
from mac_rag.memory.records import Record
from mac_rag.memory.storage import record_lines
from mac_rag.memory.storage.manifest import SegmentInfo
from mac_rag.memory.storage.record_lines import RecordLine
from mac_rag.memory.storage.texts_file import TextsFile, text_line
from mac_rag.untrusted_files import MalformedError, lines_of, open_file, parse_json

_REMEDY = "; repair the bank to keep what is not lost"
_PIECE = 1 << 20


class Segment(Part):
    """A part of a bank that is on disk, with memory-mapped rows.

    In a bank that overwrites what it deletes, rows and texts are in memory: a mapped file would become zeros as well.

    Args:
        folder: folder of the bank.
        info: what the manifest says about the segment.
        tokens: memory tokens `[n, T, D]` or codes `[n, T]`.
        records: the records of all entries, in order.
        checksums: sha256 of the rows of each entry, in order.
        texts: the file of the texts; None in a bank without texts.

    Attributes:
        folder: folder of the bank.
        checksums: sha256 of the rows of each entry, by sequence number.
    """

    def __init__(
        self,
        folder: Path,
        info: SegmentInfo,
        tokens: Tensor,
        records: Sequence[Record],
        checksums: Sequence[str],
        texts: TextsFile | None,
    ) -> None:
        super().__init__(tokens, records)
        self.folder = folder
        self.checksums = {record.sequence: checksum for record, checksum in zip(records, checksums, strict=True)}
        self._info = info
        self._texts_file = texts
        self._documents = sum(len(record.members) for record in records)
        for sequence in info.tombstones:
            self.tombstone(sequence)

    @property
    def name(self) -> str:
        """Name of its files, without the suffix."""
        return self._info.name

    @property
    def info(self) -> SegmentInfo:
        """What the next manifest has to say about the segment."""
        return self._info.model_copy(update={"tombstones": tuple(self.tombstones)})

    def texts(self, record: Record) -> Texts:
        """The texts of an entry, read from the disk.

        Raises:
            DamageError: when their file is damaged.
        """
        if self._texts_file is None:
            return super().texts(record)
        try:
            return tuple(map(self._texts_file.text, record.members))
        except MalformedError as error:
            raise DamageError(f"{self.folder / self._info.texts_file} is damaged: {error}{_REMEDY}") from None

    def lacks_text(self, record: Record) -> bool:
        """As `Part.lacks_text`; no text is read as long as the segment has all.

        Raises:
            DamageError: as `texts`.
        """
        if self._texts_file is not None and self._texts_file.count == self._documents:
            return False
        return super().lacks_text(record)

    def check_texts(self) -> None:
        """Reads all texts.

        Raises:
            DamageError: when their file is damaged.
        """
        for record, _ in self.entries.values():
            self.texts(record)

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


def write_segment(
    folder: Path, parts: Sequence[Part], *, keep_texts: bool = False, secure_delete: bool = False
) -> Segment:
    """Writes the live entries of some parts as a new segment. The caller must `sync_folder` before it commits.

    Args:
        folder: folder of the bank.
        parts: the parts.
        keep_texts: True to write their texts as well.
        secure_delete: True if the files will be overwritten before they are removed.

    Raises:
        BankError: for metadata or a text too long to be read again.
        DamageError: when rows or texts to be copied from another segment are not what was written there.
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
            try:
                yield record_lines.encode(RecordLine(record, start, checksum)) + b"\n"
            except MalformedError as error:
                raise BankError(f"{describe(record.document_ids[:3])} cannot be stored: {error}") from None
            start += record.rows

    def texts_file() -> Iterator[bytes]:
        for part, (record, _) in entries:
            for member, text in zip(record.members, part.texts(record), strict=True):
                if text is not None:
                    yield text_line(member.document_id, text)

    write = partial(write_file, secure_delete=secure_delete)
    digests = {
        "tokens": write(folder / f"{name}.safetensors", tokens_file()),
        "records": write(folder / f"{name}.jsonl", records_file()),  # which needs the checksums
    }
    if keep_texts:
        digests["texts"] = write(folder / f"{name}.texts.jsonl", texts_file())
    info = SegmentInfo(name=name, entries=len(entries), shape=shape, offset=len(header), **digests)
    records = [entry.record for _, entry in entries]
    try:
        tokens = _rows(folder, info, in_memory=secure_delete)
        texts = _texts_file(folder, info, secure_delete)
    except MalformedError as error:
        raise DamageError(f"{folder / name} is not what was written there just now: {error}") from None
    return Segment(folder, info, tokens, records, checksums, texts)


def read_segment(folder: Path, info: SegmentInfo, *, secure_delete: bool) -> Segment:
    """Opens a segment.

    Args:
        folder: folder of the bank.
        info: what the manifest says about the segment.
        secure_delete: True if its files will be overwritten before they are removed.

    Raises:
        FileNotFoundError: when one of its files is missing, as happens after a writer has replaced the segment.
        DamageError: when one of its files is not what was written, or with `secure_delete` after such a replacement.
    """
    path = folder / info.records_file
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            lines = record_lines.consecutive(_hashed(file, digest), info.entries, info.shape[0])
            records, checksums = [], []
            for record, _, checksum in lines:
                records.append(record)
                checksums.append(checksum)
        if digest.hexdigest() != info.records:
            raise MalformedError("its checksum differs from the manifest's")
        if not {record.sequence for record in records}.issuperset(info.tombstones):
            raise MalformedError("the manifest says that entries were deleted that it never had")
        path = folder / info.tokens_file
        tokens = _rows(folder, info, in_memory=secure_delete, check=True)
        path = folder / info.texts_file
        texts = _texts_file(folder, info, secure_delete)
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}{_REMEDY}") from None
    return Segment(folder, info, tokens, records, checksums, texts)


def _texts_file(folder: Path, info: SegmentInfo, in_memory: bool) -> TextsFile | None:
    return None if info.texts is None else TextsFile(folder / info.texts_file, info.texts, in_memory=in_memory)


def _hashed(file: BinaryIO, digest: hashlib._Hash) -> Iterator[bytes]:
    """The lines of a records file, of which a digest is taken."""
    for line in lines_of(file, record_lines.LONGEST_LINE):
        digest.update(line)
        yield line


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


def entry_ids(header: bytes) -> dict[int, tuple[str, ...]]:
    """The document ids of each entry by sequence number, read from the header of a tokens file.

    Raises:
        MalformedError: when it is not such a header.
    """
    content = parse_json(header[8:])
    try:
        entries = parse_json(content["__metadata__"]["entries"])
        named = {sequence: tuple(ids) for sequence, ids in entries}
    except (KeyError, TypeError, ValueError):
        raise MalformedError("its header names no entries") from None
    if not all(type(sequence) is int and all(isinstance(name, str) for name in ids) for sequence, ids in named.items()):
        raise MalformedError("its header names entries by other types")
    return named


def fault_of(rows: memoryview | bytes, dtype: torch.dtype) -> str | None:
    """What is wrong with the numbers of some rows; None if nothing is.

    Args:
        rows: bytes of whole numbers.
        dtype: float32 for memory tokens, which are finite; int32 for codes, which are not negative.
    """
    if dtype == torch.float32:
        return None if np.isfinite(np.frombuffer(rows, np.float32)).all() else "a memory token is not a finite number"
    return None if (np.frombuffer(rows, np.int32) >= 0).all() else "a code is negative"


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


def _rows(folder: Path, info: SegmentInfo, *, in_memory: bool, check: bool = False) -> Tensor:
    """The rows of a segment, memory-mapped or read.

    Args:
        folder: folder of the bank.
        info: what the manifest says about the segment.
        in_memory: True to read and check them, in one pass.
        check: True to compare the file with the manifest before it is mapped.

    Raises:
        MalformedError: when the file is not what the manifest says.
        FileNotFoundError: when it is missing.
    """
    content: bytearray | mmap.mmap
    with open_file(folder / info.tokens_file) as file:
        if in_memory:
            content = bytearray()
            _check_tokens(file, info, content)
        else:
            # The check reads the file instead of mapping it, or all of it would count as memory of this process.
            if check:
                _check_tokens(file, info)
            # A private mapping: torch has no read-only tensors, and the file must never change.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    rows = torch.frombuffer(content, dtype=dtype_of(info.shape), count=math.prod(info.shape), offset=info.offset)
    return rows.view(info.shape)


def _check_tokens(file: BinaryIO, info: SegmentInfo, read: bytearray | None = None) -> None:
    """Holds size, offset, checksum and numbers of a tokens file against the manifest, in pieces.

    Args:
        file: the file.
        info: what the manifest says about the segment.
        read: gets all that was read; None to keep nothing.
    """
    size = os.fstat(file.fileno()).st_size
    if size != info.offset + info.tensor_bytes:
        raise MalformedError(f"it has {size:,} bytes, and by the manifest {info.offset + info.tensor_bytes:,}")
    digest, fault = hashlib.sha256(), None

    def more(count: int) -> bytes:
        piece = file.read(count)
        digest.update(piece)
        if read is not None:
            read.extend(piece)
        return piece

    left = more(8)
    if 8 + int.from_bytes(left, "little") != info.offset:
        fault = f"its tensor begins at byte {8 + int.from_bytes(left, 'little'):,}, and by the manifest {info.offset:,}"
    for start in range(8, info.offset, _PIECE):
        more(min(_PIECE, info.offset - start))
    while piece := more(_PIECE):  # of whole numbers, because all sizes are multiples of 4
        fault = fault or fault_of(piece, dtype_of(info.shape))
    if digest.hexdigest() != info.tokens:
        raise MalformedError("its checksum differs from the manifest's")
    if fault is not None:
        raise MalformedError(fault)

"""A segment: entries of a bank in files that never change.

    <name>.safetensors    the columns of its rows (`mac_rag.memory.rows`), one after the other; all ids in its header
    <name>.jsonl          one sealed line for each entry: its documents, its rows, the checksum of its rows
    <name>.texts.jsonl    in a bank that keeps texts, their lines; see `mac_rag.memory.storage.texts_file`
    <name>.index          where the lines are; see `mac_rag.memory.storage.entry_index`

Each entry can be verified by itself, which is done when its record or its rows are read. Each file can name what
the other has lost (`mac_rag.memory.storage.repair`).
Document ids are data in these files and never become part of a path.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mac_rag.atomic_files import write_file
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.entry_table import Record
from mac_rag.memory.parts import Part, PlacedRecord, Texts
from mac_rag.memory.rows import OVERVIEW, RowLayout, Rows
from mac_rag.memory.storage import record_lines, tokens_file
from mac_rag.memory.storage.entry_index import EntryIndex, read_index
from mac_rag.memory.storage.manifest import SegmentInfo
from mac_rag.memory.storage.record_lines import RecordLine
from mac_rag.memory.storage.records_file import REMEDY, RecordsFile
from mac_rag.memory.storage.texts_file import TextsFile, text_line
from mac_rag.untrusted_files import MalformedError, lines_of, open_file

_ROWS = 256  # rows of a column that are written at a time


class Segment(Part):
    """A part of a bank that is on disk, with memory-mapped rows.

    In a bank that overwrites what it deletes, rows and texts are in memory: a mapped file would become zeros as well.

    Args:
        folder: folder of the bank.
        info: what the manifest says about the segment.
        layout: how the bank keeps its rows.
        rows: the rows of all entries.
        records: the entries.
        verified: True if the rows are known to be what was written.
        texts: the file of the texts; None in a bank without texts.

    Attributes:
        folder: folder of the bank.
        table: the entries.
    """

    table: RecordsFile

    def __init__(
        self,
        folder: Path,
        info: SegmentInfo,
        layout: RowLayout,
        rows: Rows,
        records: RecordsFile,
        texts: TextsFile | None,
        *,
        verified: bool,
    ) -> None:
        super().__init__(rows, records)
        self.folder = folder
        self._info = info
        self._layout = layout
        self._texts_file = texts
        self._verified = Verified(torch.full((len(records),), verified), overview=verified)
        self.tombstone(*info.tombstones)

    @property
    def name(self) -> str:
        """Name of its files, without the suffix."""
        return self._info.name

    @property
    def info(self) -> SegmentInfo:
        """What the next manifest has to say about the segment."""
        return self._info.model_copy(update={"tombstones": tuple(self.tombstones)})

    def _verify(self, index: Tensor | slice) -> None:
        if self._verified.all:
            return
        for number in self._unverified(index):
            self._check_entry(number)
        self._verified.all = bool(self._verified.entries.all())

    def _unverified(self, index: Tensor | slice) -> list[int]:
        """Numbers of the entries that have some of all rows, and were not verified yet."""
        rows = torch.arange(len(self.stored))[index]
        entries = (torch.searchsorted(self.table.starts, rows, right=True) - 1).unique()
        numbers: list[int] = entries[~self._verified.entries[entries]].tolist()
        return numbers

    def _span(self, number: int) -> tuple[int, int]:
        """The first row of an entry, and the first behind it."""
        start, stop = self.table.starts[number : number + 2].tolist()
        return start, stop

    def checksum(self, placed: PlacedRecord) -> str:
        number = int(torch.searchsorted(self.table.starts, placed.start))
        self._check_entry(number)
        return self.table.checksum(number)

    def _check_entry(self, number: int) -> None:
        """Reads the rows of an entry by its number."""
        start, stop = self._span(number)
        rows = self.stored[start:stop]
        is_whole = rows.checksum() == self.table.checksum(number)
        self._check(rows, None if is_whole else self._described(number))
        self._verified.entries[number] = True

    def _described(self, number: int) -> str:
        try:
            return describe(self.table.record(number).document_ids)
        except DamageError:
            return f"the memory tokens of entry {number:,}"

    def _check(self, rows: Rows, fault: str | None) -> None:
        """Raises DamageError for a fault that is known of some columns of these rows, or one in their numbers."""
        fault = fault or rows.fault(self._layout, self._info.shape[-1])
        if fault is not None:
            raise DamageError(f"{self.folder / self._info.tokens_file} is damaged: {fault}{REMEDY}")

    def overview(self) -> Rows:
        """As `Part.overview`.

        Raises:
            DamageError: when these columns are not what was written.
        """
        if not self._verified.overview:
            columns = self.stored.overview
            changed = columns.digest() != self._info.overview
            self._check(columns, "its overview differs from what was written" if changed else None)
            self._verified.overview = True
        return super().overview()

    def check_records(self) -> None:
        """Reads the whole file of the records.

        Raises:
            DamageError: when it is not what was written.
            FileNotFoundError: when it is missing.
        """
        path = self.folder / self._info.records_file
        try:
            read = index_of_records(path, self._info)
        except MalformedError as error:
            raise DamageError(f"{path} is damaged: {error}{REMEDY}") from None
        if not self.table.agrees(read):
            raise DamageError(f"{path} is damaged: it does not say what the index says{REMEDY}")

    def check_rows(self) -> None:
        """Reads the whole file of the rows.

        Raises:
            DamageError: when it is not what was written.
            FileNotFoundError: when it is missing.
        """
        try:
            tokens_file.check_file(self.folder, self._info)
        except MalformedError as error:
            raise DamageError(f"{self.folder / self._info.tokens_file} is damaged: {error}{REMEDY}") from None
        self._verify(slice(None))
        self.overview()

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
            raise DamageError(f"{self.folder / self._info.texts_file} is damaged: {error}{REMEDY}") from None

    def lacks_text(self, record: Record) -> bool:
        """As `Part.lacks_text`; no text is read as long as the segment has all.

        Raises:
            DamageError: as `texts`.
        """
        if self._texts_file is not None and self._texts_file.count == int(self.table.documents[-1]):
            return False
        return super().lacks_text(record)

    def check_texts(self) -> None:
        """Reads all texts.

        Raises:
            DamageError: when their file is damaged.
        """
        for record, _ in self if self._texts_file is not None else ():
            self.texts(record)

    def at(self, info: SegmentInfo) -> Segment | None:
        """This segment as another manifest describes it; None if these are other files, or if entries came back."""
        more = set(info.tombstones).difference(self.tombstones)
        expected = self._info.model_copy(update={"tombstones": info.tombstones})
        if (
            info != expected
            or not set(self.tombstones) <= set(info.tombstones)
            or not all(each in self for each in more)
        ):
            return None
        segment = self.copy()
        if more:
            segment.tombstone(*sorted(more))
        return segment


class Verified:
    """What of a segment's rows is known to be what was written. Copies of the segment share it.

    Attributes:
        entries: bool `[m]`, for each entry.
        all: True for all entries.
        overview: True for what is kept beside the memory tokens of all rows.
    """

    def __init__(self, entries: Tensor, *, overview: bool) -> None:
        self.entries = entries
        self.all = bool(entries.all())
        self.overview = overview


def write_segment(
    folder: Path,
    parts: Sequence[Part],
    layout: RowLayout,
    *,
    keep_texts: bool = False,
    secure_delete: bool = False,
) -> Segment:
    """Writes the live entries of some parts as a new segment. The caller must `sync_folder` before it commits.

    Args:
        folder: folder of the bank.
        parts: the parts.
        layout: how the bank keeps its rows.
        keep_texts: True to write their texts as well.
        secure_delete: True if the files will be overwritten before they are removed.

    Raises:
        BankError: for metadata or a text too long to be read again.
        DamageError: when rows or texts to be copied from another segment are not what was written there.
    """
    name = f"segment-{secrets.token_hex(8)}"
    entries = [(part, placed) for part in parts for placed in part]
    checksums, places = [], 0
    for part, placed in entries:
        checksums.append(part.checksum(placed))
        places = max(places, part.entry_rows(placed).needed_places)
    shape = (sum(part.count for part in parts), *layout.row_shape(parts[0].stored))
    header = tokens_file.header([entry.record for _, entry in entries], layout, shape, places)
    overview = hashlib.sha256()

    def column(name: str) -> Iterator[memoryview]:
        for part in parts:
            for start in range(0, part.count, _ROWS):
                rows = part.rows(slice(start, min(start + _ROWS, part.count))).resized(places)
                yield from Rows({name: rows.columns[name]}).pieces()

    def rows_file() -> Iterator[bytes | memoryview]:
        yield header
        for name in layout.columns(shape, places):
            for piece in column(name):
                if name in OVERVIEW:
                    overview.update(piece)
                yield piece

    written: list[tuple[RecordLine, int]] = []

    def records_file() -> Iterator[bytes]:
        start = 0
        for (_, (record, _)), checksum in zip(entries, checksums, strict=True):
            line = RecordLine(record, start, checksum)
            try:
                data = record_lines.encode(line) + b"\n"
            except MalformedError as error:
                raise BankError(f"{describe(record.document_ids[:3])} cannot be stored: {error}") from None
            written.append((line, len(data)))
            yield data
            start += record.rows

    def texts_file() -> Iterator[bytes]:
        for part, (record, _) in entries:
            for member, text in zip(record.members, part.texts(record), strict=True):
                if text is not None:
                    yield text_line(member.document_id, text)

    write = partial(write_file, secure_delete=secure_delete)
    digests = {
        "tokens": write(folder / f"{name}.safetensors", rows_file()),
        "records": write(folder / f"{name}.jsonl", records_file()),
        "overview": overview.hexdigest(),
    }
    index = EntryIndex.of(written)
    digests["index"] = write(folder / f"{name}.index", [index.encoded()])
    if keep_texts:
        digests["texts"] = write(folder / f"{name}.texts.jsonl", texts_file())
    info = SegmentInfo(name=name, entries=len(entries), shape=shape, places=places, offset=len(header), **digests)
    try:
        kept = (tokens_file.load_rows if secure_delete else tokens_file.map_rows)(folder, info, layout)
        records = RecordsFile(folder / info.records_file, index, in_memory=secure_delete)
        texts = _texts_file(folder, info, secure_delete)
    except MalformedError as error:
        raise DamageError(f"{folder / name} is not what was written there just now: {error}") from None
    return Segment(folder, info, layout, kept, records, texts, verified=True)


def read_segment(
    folder: Path,
    info: SegmentInfo,
    layout: RowLayout,
    *,
    secure_delete: bool,
) -> Segment:
    """Opens a segment. Its rows and its records are verified when they are first read.

    Args:
        folder: folder of the bank.
        info: what the manifest says about the segment.
        layout: how the bank keeps its rows.
        secure_delete: True if its files will be overwritten before they are removed: it is read now.

    Raises:
        FileNotFoundError: when one of its files is missing, as happens after a writer has replaced the segment.
        DamageError: when one of its files is not what was written, or with `secure_delete` after such a replacement.
    """
    path = folder / info.index_file
    try:
        index = read_index(path, info)
        path = folder / info.records_file
        records = RecordsFile(path, index, in_memory=secure_delete)
        if not torch.isin(torch.tensor(info.tombstones, dtype=torch.long), index.sequences).all():
            raise MalformedError("the manifest says that entries were deleted that it never had")
        path = folder / info.tokens_file
        rows = (tokens_file.load_rows if secure_delete else tokens_file.map_rows)(folder, info, layout)
        path = folder / info.texts_file
        texts = _texts_file(folder, info, secure_delete)
    except MalformedError as error:
        raise DamageError(f"{path} is damaged: {error}{REMEDY}") from None
    return Segment(folder, info, layout, rows, records, texts, verified=secure_delete)


def index_of_records(path: Path, info: SegmentInfo) -> EntryIndex:
    """The index of a segment, made of its records, all of which are read and verified.

    Raises:
        MalformedError: when they are not what was written.
        FileNotFoundError: when the file is missing.
    """
    digest = hashlib.sha256()
    lengths: list[int] = []
    with open_file(path) as file:
        lines = record_lines.consecutive(_measured(_hashed(file, digest), lengths), info.entries, info.shape[0])
        index = EntryIndex.of((line, lengths[-1]) for line in lines)
    if digest.hexdigest() != info.records:
        raise MalformedError("its checksum differs from the manifest's")
    return index


def _measured(lines: Iterable[bytes], lengths: list[int]) -> Iterator[bytes]:
    for line in lines:
        lengths.append(len(line))
        yield line


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
    known, checksums = _live_checksums(before)
    still, now = _live_checksums(after)
    old = still < next_sequence
    still, now = still[old], now[old]
    if not torch.isin(still, known).all():
        return False
    return torch.equal(checksums[torch.searchsorted(known, still)], now)


def _live_checksums(segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Sequence numbers of all live entries, ascending, and the checksums of their rows, uint8 `[n, 32]`."""
    sequences, checksums = torch.empty(0, dtype=torch.long), torch.empty(0, 32, dtype=torch.uint8)
    return (
        torch.cat([sequences, *(segment.sequences for segment in segments)]),
        torch.cat([checksums, *(segment.table.checksums[segment.numbers] for segment in segments)]),
    )


def describe(document_ids: Sequence[str]) -> str:
    """Names an entry in an error message."""
    return "the memory tokens of " + ", ".join(map(repr, document_ids))

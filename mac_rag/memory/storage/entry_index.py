"""The index of a segment: where the record of each entry stands, so that a bank is opened without reading them.

<name>.index    safetensors; for m entries with d documents:

sequences   [m] int64       sequence numbers, ascending
starts      [m + 1] int64   the number of each entry's first row, and of all rows
documents   [m + 1] int64   the number of documents before each entry, and of all
lines       [m + 1] int64   where each entry's line begins in the records file, and where the last one ends
checksums   [m, 32] uint8   sha256 of each entry's rows
id_hashes   [d] int64       `mac_rag.data.document_ids.id_hash` of each document, entry by entry
order       [d] int64       the places of these hashes in ascending order of the hash
dates       [d] int64       and with it
superseded  [s] int64
superseding [s] int64       see `mac_rag.memory.entry_table.Dating`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mac_rag.data.provenance import Member
from mac_rag.memory.entry_table import Dating, id_hashes
from mac_rag.memory.parts import PART_BITS
from mac_rag.memory.storage.manifest import SEQUENCES, SegmentInfo
from mac_rag.memory.storage.record_lines import LONGEST_LINE, RecordLine
from mac_rag.untrusted_files import MalformedError, is_hole, open_file

_PIECE = 1 << 20


class EntryIndex(NamedTuple):
    """See the module."""

    sequences: Tensor
    starts: Tensor
    documents: Tensor
    lines: Tensor
    checksums: Tensor
    id_hashes: Tensor
    order: Tensor
    dates: Tensor
    superseded: Tensor
    superseding: Tensor

    @property
    def dating(self) -> Dating:
        """The last three columns."""
        return Dating(self.dates, self.superseded, self.superseding)

    @classmethod
    def of(cls, lines: Iterable[tuple[RecordLine, int]]) -> EntryIndex:
        """The index of consecutive lines, each with its length in bytes."""
        sequences, rows, documents, lengths = [], [], [], []
        members: list[Member] = []
        checksums = bytearray()
        for (record, _, checksum), length in lines:
            sequences.append(record.sequence)
            rows.append(record.rows)
            documents.append(len(record.members))
            lengths.append(length)
            checksums += bytes.fromhex(checksum)
            members += record.members
        ids = id_hashes([member.document_id for member in members])
        starts, before, places = (_sums(counts) for counts in (rows, documents, lengths))
        return cls(
            torch.tensor(sequences, dtype=torch.long),
            starts,
            before,
            places,
            torch.tensor(checksums, dtype=torch.uint8).view(-1, 32),
            ids,
            ids.argsort(stable=True),
            *Dating.of(members),
        )

    def entries_with(self, id_hash: int) -> Iterator[int]:
        """Numbers of the entries with a document of this hash."""
        place = int(torch.searchsorted(self.id_hashes, id_hash, sorter=self.order))
        while place < len(self.order) and int(self.id_hashes[self.order[place]]) == id_hash:
            yield int(torch.searchsorted(self.documents, self.order[place], right=True)) - 1
            place += 1

    def encoded(self) -> bytes:
        """The bytes of the file."""
        return save({name: column.contiguous() for name, column in self._asdict().items()})

    def check(self, info: SegmentInfo) -> None:
        """Refuses what cannot be true.

        Args:
            info: what the manifest says about the segment.

        Raises:
            MalformedError: names the column.
        """
        count, documents = info.entries, self.id_hashes.numel()
        sums, superseding = [(count + 1,)] * 3, [(self.superseding.numel(),)] * 2
        shapes = [(count,), *sums, (count, 32), *[(documents,)] * 3, *superseding]
        for (name, column), shape in zip(self._asdict().items(), shapes, strict=True):
            dtype = torch.uint8 if name == "checksums" else torch.int64
            if column.dtype != dtype or column.shape != shape:
                raise MalformedError(f"{name} are {list(column.shape)} in {column.dtype}, not {list(shape)} in {dtype}")
        if int(self.sequences[0]) < 0 or int(self.sequences[-1]) >= SEQUENCES or not _ascends(self.sequences):
            raise MalformedError("sequence numbers do not ascend")
        self._check_sums("starts", 1 << PART_BITS, info.shape[0])
        self._check_sums("documents", LONGEST_LINE, documents)
        self._check_sums("lines", LONGEST_LINE + 1, None)
        inside = documents > 0 and int(self.order.min()) >= 0 and int(self.order.max()) < documents
        if not inside or not torch.zeros(documents, dtype=torch.bool).index_fill_(0, self.order, True).all():
            raise MalformedError("order leaves some of the documents out")
        if not _ascends(self.id_hashes[self.order], strictly=False):
            raise MalformedError("order does not sort id_hashes")
        places = self.superseding
        inside = not len(places) or 0 <= int(places[0]) <= int(places[-1]) < documents
        if not inside or not _ascends(places, strictly=False):
            raise MalformedError("superseding are not places of its documents")

    def _check_sums(self, name: str, most: int, total: int | None) -> None:
        column: Tensor = getattr(self, name)
        from_zero = int(column[0]) == 0 and _ascends(column)
        if not from_zero or int(column.diff().max()) > most or total not in (None, int(column[-1])):
            raise MalformedError(f"{name} are not the sums of counts from 1 to {most:,}")


def read_index(path: Path, info: SegmentInfo) -> EntryIndex:
    """Reads an index.

    Args:
        path: the file.
        info: what the manifest says about the segment.

    Raises:
        MalformedError: when it is not what was written, or says what cannot be true.
        FileNotFoundError: when it is missing.
    """
    content, digest = bytearray(), hashlib.sha256()
    with open_file(path) as file:
        while piece := file.read(_PIECE):
            if len(piece) == _PIECE and is_hole(piece):
                raise MalformedError("it has a hole")
            digest.update(piece)
            content += piece
    if digest.hexdigest() != info.index:
        raise MalformedError("its checksum differs from the manifest's")
    try:
        index = EntryIndex(**load(bytes(content)))
    except (SafetensorError, TypeError, ValueError) as error:
        raise MalformedError(f"it is no index: {error!r:.200}") from None
    index.check(info)
    return index


def _ascends(column: Tensor, *, strictly: bool = True) -> bool:
    """True if the numbers ascend; differences of numbers of 64 bits may need more of them, so none is taken."""
    return bool((column[1:] > column[:-1] if strictly else column[1:] >= column[:-1]).all())


def _sums(counts: list[int]) -> Tensor:
    """The sums of the counts before each, and of all, int64 `[m + 1]`."""
    return torch.tensor([0, *counts], dtype=torch.long).cumsum(0)

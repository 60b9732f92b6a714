"""Which entries a bank has at one version, in arrays: numbers of entries, rows and documents, their hashes and dates.

So a bank of a million documents is looked through without a loop over them. A directory never changes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mac_rag.bank.database import MOST_VALUES, PART_BITS, SEQUENCES, Connection
from mac_rag.data.dates import ALWAYS
from mac_rag.data.document_ids import id_hash
from mac_rag.data.provenance import Member
from mac_rag.errors import DamageError

_NOTHING = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of the bank without its memory tokens.

    Attributes:
        sequence: the entry's number in the order of arrival; never used for another entry.
        rows: number of rows of memory tokens.
        members: the documents that the entry stands for: one, or several that were merged.
    """

    sequence: int
    rows: int
    members: tuple[Member, ...]

    @property
    def document_ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(member.document_id for member in self.members)


class Dating(NamedTuple):
    """When d documents count, and which others they supersede.

    Attributes:
        dates: int64 `[d]`, `Member.moment` of each document, entry by entry.
        superseded: int64 `[s]`, `id_hash` of each document that one of them supersedes; it may be in no bank.
        superseding: int64 `[s]`, the place of the document that supersedes it among the d, ascending.
    """

    dates: Tensor
    superseded: Tensor
    superseding: Tensor

    @classmethod
    def of(cls, documents: Iterable[tuple[int, Sequence[int]]]) -> Dating:
        """That of documents in their order, each with its moment and the hashes of those that it supersedes."""
        dates: list[int] = []
        superseded: list[int] = []
        superseding: list[int] = []
        for place, (moment, hashes) in enumerate(documents):
            dates.append(moment)
            superseded += hashes
            superseding += [place] * len(hashes)
        return cls(*(torch.tensor(column, dtype=torch.long) for column in (dates, superseded, superseding)))

    @classmethod
    def cat(cls, parts: Sequence[Dating]) -> Dating:
        """That of the documents of several parts, in order."""
        before = [0, *accumulate(len(part.dates) for part in parts)]
        return cls(
            torch.cat([_NOTHING, *(part.dates for part in parts)]),
            torch.cat([_NOTHING, *(part.superseded for part in parts)]),
            torch.cat([_NOTHING, *(part.superseding + first for part, first in zip(parts, before))]),
        )


class Timeline:
    """The documents of a bank, in the order of its rows, with what says when they count.

    Args:
        hashes: int64 `[d]`, `id_hash` of each document.
        dating: their dates, and which others they supersede.
        members: int64 `[m]`, the number of documents of each entry.
        rows: int64 `[m]`, the number of rows of each entry.
    """

    def __init__(self, hashes: Tensor, dating: Dating, members: Tensor, rows: Tensor) -> None:
        self.hashes = hashes
        self.dating = dating
        self.members = members
        self.rows = rows

    @classmethod
    def of(cls, records: Sequence[Record]) -> Timeline:
        """That of entries."""
        members = [member for record in records for member in record.members]
        return cls(
            id_hashes([member.document_id for member in members]),
            Dating.of((member.moment, list(map(id_hash, member.supersedes))) for member in members),
            torch.tensor([len(record.members) for record in records], dtype=torch.long),
            torch.tensor([record.rows for record in records], dtype=torch.long),
        )

    @classmethod
    def cat(cls, parts: Collection[Timeline]) -> Timeline:
        """That of several parts, in order."""
        return cls(
            torch.cat([_NOTHING, *(part.hashes for part in parts)]),
            Dating.cat([part.dating for part in parts]),
            torch.cat([_NOTHING, *(part.members for part in parts)]),
            torch.cat([_NOTHING, *(part.rows for part in parts)]),
        )

    def taken(self, entries: Tensor) -> Timeline:
        """That of some entries, by their places, in this order."""
        documents = _spans(self.members, entries)
        dates, superseded, superseding = self.dating
        counts = torch.bincount(superseding, minlength=len(dates))
        dating = Dating(
            dates[documents],
            superseded[_spans(counts, documents)],
            torch.arange(len(documents)).repeat_interleave(counts[documents]),
        )
        return Timeline(self.hashes[documents], dating, self.members[entries], self.rows[entries])

    @cached_property
    def row_dates(self) -> Tensor:
        """When each row counts, int64 `[N]`: the date of its document, of merged ones the latest."""
        entries = torch.arange(len(self.members)).repeat_interleave(self.members)
        latest = torch.full_like(self.members, ALWAYS).scatter_reduce(0, entries, self.dating.dates, "amax")
        return latest.repeat_interleave(self.rows)

    @cached_property
    def by_hash(self) -> tuple[Tensor, Tensor]:
        """The different hashes, ascending, and for each document the place of its hash among them."""
        found: tuple[Tensor, Tensor] = self.hashes.unique(return_inverse=True)
        return found


class Directory:
    """The entries of a bank in the order of their sequence numbers.

    Args:
        sequences: int64 `[m]`, ascending.
        timeline: their documents.
    """

    def __init__(self, sequences: Tensor, timeline: Timeline) -> None:
        self.sequences = sequences
        self.timeline = timeline

    @classmethod
    def of(cls, records: Sequence[Record]) -> Directory:
        """That of some entries."""
        return cls(torch.tensor([record.sequence for record in records], dtype=torch.long), Timeline.of(records))

    @classmethod
    def read(cls, connection: Connection, entries: str = "") -> Directory:
        """That of entries of a bank.

        Args:
            connection: a connection to the bank.
            entries: a condition on the column `sequence` of the table of the entries; empty for all.

        Raises:
            DamageError: when they are not what was written.
        """
        where = f"WHERE {entries}" if entries else ""
        found = connection.rows(f"SELECT sequence, rows, documents, crc FROM entry {where} ORDER BY sequence")
        try:
            if not all(
                0 <= sequence < SEQUENCES and 0 < rows < 1 << PART_BITS and 0 < documents < 1 << PART_BITS
                for sequence, rows, documents, _ in found
            ):
                raise ValueError("an entry has a number that no entry has")
            if any(index_crc(*numbers) != crc for *numbers, crc in found):
                raise ValueError("the checksum of an entry differs")
            low, high = (found[0][0] << PART_BITS, (found[-1][0] + 1) << PART_BITS) if found else (0, 0)
            if not entries:  # all documents, also those of no entry
                low, high = -(1 << 63), (1 << 63) - 1
            documents = connection.rows(
                "SELECT key, hash, moment, supersedes, index_crc FROM document WHERE key >= ? AND key < ? ORDER BY key",
                (low, high),
            )
            if any(
                index_crc(key, hashed, moment, data=hashes) != crc for key, hashed, moment, hashes, crc in documents
            ):
                raise ValueError("the checksum of a document's date and hash differs")
            columns = np.array(found, dtype=np.int64).reshape(-1, 4).T.copy()
            sequences, rows, members, _ = map(torch.from_numpy, columns)
            keys = torch.tensor([key for key, *_ in documents], dtype=torch.long)
            if entries:  # there may be documents of other entries between these
                mask = torch.isin(keys >> PART_BITS, sequences)
                documents = [row for row, is_one in zip(documents, mask.tolist()) if is_one]
                keys = keys[mask]
            if len(keys) != int(members.sum()) or not torch.equal(keys, _keys(sequences, members)):
                raise ValueError("its entries and its documents do not agree")
            dating = Dating.of(
                (moment, np.frombuffer(hashes, dtype="<i8").tolist()) for _, _, moment, hashes, _ in documents
            )
            hashes = torch.tensor([value for _, value, *_ in documents], dtype=torch.long)
            return cls(sequences, Timeline(hashes, dating, members, rows))
        except (ValueError, TypeError, OverflowError, RuntimeError, struct.error) as error:
            raise DamageError(f"{connection.path} is damaged: {error}; restore it from a backup") from error

    def with_entries(self, connection: Connection, sequences: Sequence[int]) -> Directory:
        """This one, and those of some entries that a bank holds; see `read`."""
        directory = self
        for first in range(0, len(sequences), MOST_VALUES):
            some = ",".join(map(str, sequences[first : first + MOST_VALUES]))
            directory = directory.joined(Directory.read(connection, f"sequence IN ({some})"))
        return directory

    def joined(self, other: Directory) -> Directory:
        """This one, and the entries of another among them."""
        sequences = torch.cat([self.sequences, other.sequences])
        timeline = Timeline.cat([self.timeline, other.timeline])
        if not len(self.sequences) or not len(other.sequences) or self.sequences[-1] < other.sequences[0]:
            return Directory(sequences, timeline)
        order = sequences.argsort()
        return Directory(sequences[order], timeline.taken(order))

    def without(self, sequences: Collection[int]) -> Directory:
        """The entries but some."""
        if not sequences:
            return self
        others = (~torch.isin(self.sequences, torch.tensor(list(sequences), dtype=torch.long))).nonzero()[:, 0]
        return Directory(self.sequences[others], self.timeline.taken(others))

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.timeline.hashes)

    @cached_property
    def row_keys(self) -> Tensor:
        """Keys of all rows, int64 `[N]`, ascending."""
        return _keys(self.sequences, self.timeline.rows)

    @property
    def row_entries(self) -> Tensor:
        """The place of each row's entry, int64 `[N]`."""
        return torch.arange(len(self.sequences)).repeat_interleave(self.timeline.rows)


def _spans(counts: Tensor, places: Tensor) -> Tensor:
    """Numbers of what belongs to some of consecutive groups, by the size of each group."""
    chosen = counts[places]
    starts = (counts.cumsum(0) - counts)[places] - (chosen.cumsum(0) - chosen)
    return torch.arange(int(chosen.sum())) + starts.repeat_interleave(chosen)


def _keys(sequences: Tensor, counts: Tensor) -> Tensor:
    """Keys of the rows or documents of entries, int64."""
    first = counts.cumsum(0) - counts
    within = torch.arange(int(counts.sum())) - first.repeat_interleave(counts)
    return (sequences << PART_BITS).repeat_interleave(counts) + within


def index_crc(*numbers: int, data: bytes = b"") -> int:
    """Checksum of what a directory is made of: numbers of 64 bits, and bytes."""
    return zlib.crc32(data, zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers)))


def id_hashes(document_ids: Sequence[str]) -> Tensor:
    """`id_hash` of each document, int64 `[n]`."""
    return torch.tensor([id_hash(name) for name in document_ids], dtype=torch.long)

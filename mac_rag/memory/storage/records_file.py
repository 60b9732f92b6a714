"""The records of a segment, each read from its line when somebody asks for it."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from mac_rag.data.document_ids import id_hash
from mac_rag.errors import DamageError
from mac_rag.memory.entry_table import Dating, EntryTable, Record
from mac_rag.memory.storage import record_lines
from mac_rag.memory.storage.entry_index import EntryIndex
from mac_rag.untrusted_files import MalformedError, open_file, read_text_bytes

REMEDY = "; repair the bank to keep what is not lost"


class RecordsFile(EntryTable):
    """The entries of a segment.

    The file stays readable after its name is gone.

    Args:
        path: the file.
        index: where its lines are, and what they must say.
        in_memory: True to read it now, because it will be overwritten before it is removed.

    Raises:
        MalformedError: when it has another size than the index says, or is no regular file.
        FileNotFoundError: when it is missing.
    """

    def __init__(self, path: Path, index: EntryIndex, *, in_memory: bool = False) -> None:
        self.sequences, self.starts, self.documents = index.sequences, index.starts, index.documents
        self._index = index
        self._path = path
        self._content: bytes | mmap.mmap
        if in_memory:
            self._content = read_text_bytes(path, sys.maxsize)
        else:
            with open_file(path) as file:
                self._check_size(os.fstat(file.fileno()).st_size)
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._check_size(len(self._content))

    def _check_size(self, size: int) -> None:
        if size != int(self._index.lines[-1]):
            raise MalformedError(f"it has {size:,} bytes, and by its index {int(self._index.lines[-1]):,}")

    def record(self, number: int) -> Record:
        """As `EntryTable.record`: its line must be sealed, and say what the index says."""
        begin, end = self._index.lines[number : number + 2].tolist()
        try:
            line = record_lines.decode_alone(self._content[begin : end - 1])
        except MalformedError as error:
            raise self._damage(number, str(error)) from None
        first, last = self.documents[number : number + 2].tolist()
        record = line.record
        said = (record.sequence, line.start, line.stop, line.checksum, [*map(id_hash, record.document_ids)])
        expected = (
            int(self.sequences[number]),
            *self.starts[number : number + 2].tolist(),
            self.checksum(number),
            self._index.id_hashes[first:last].tolist(),
        )
        if said != expected:
            raise self._damage(number, "it does not say what the index says")
        return record

    def find(self, document_id: str) -> tuple[int, Record] | None:
        """As `EntryTable.find`."""
        for number in self._index.entries_with(id_hash(document_id)):
            record = self.record(number)
            if document_id in record.document_ids:  # and not another with the same hash
                return number, record
        return None

    @property
    def id_hashes(self) -> Tensor:
        """As `EntryTable.id_hashes`."""
        return self._index.id_hashes

    @property
    def dating(self) -> Dating:
        """As `EntryTable.dating`."""
        return self._index.dating

    @property
    def checksums(self) -> Tensor:
        """Sha256 of the rows of each entry, uint8 `[m, 32]`."""
        return self._index.checksums

    def checksum(self, number: int) -> str:
        """Sha256 of the rows of an entry."""
        return bytes(self._index.checksums[number].tolist()).hex()

    def agrees(self, index: EntryIndex) -> bool:
        """True if an index that was made of the records says what this one says."""
        return all(map(torch.equal, self._index, index))

    def _damage(self, number: int, problem: str) -> DamageError:
        return DamageError(f"{self._path} is damaged: line {number + 1}: {problem}{REMEDY}")

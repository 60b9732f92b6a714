"""Checks every byte of a bank, and names what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.bm25 import index_faults
from mac_rag.bank.directory import span
from mac_rag.data.document_ids import id_hash
from mac_rag.errors import BankError, DamageError


@dataclass(frozen=True)
class Verification:
    """What a check of a bank has found.

    Attributes:
        path: file of the bank.
        documents: number of its documents.
        faults: what is damaged; empty for a bank that is as it was written.
    """

    path: Path
    documents: int
    faults: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """True if nothing is damaged."""
        return not self.faults

    def __str__(self) -> str:
        if self.clean:
            return f"{self.path} is as it was written: {self.documents:,} documents"
        remedy = "restore a backup, or delete the documents that are named and adapt to them again"
        return "\n".join([f"{self.path} is damaged; {remedy}:", *(f"  {fault}" for fault in self.faults)])


def verify(path: str | Path) -> Verification:
    """Checks a bank: SQLite's own check of its file, and all rows, documents, texts and the index by their checksums.

    Args:
        path: file of the bank.

    Raises:
        BankError: when there is no bank, or it cannot be opened.
    """
    path = Path(path)
    try:
        bank = MemoryBank.open(path)
    except DamageError as error:
        return Verification(path, 0, (str(error),))
    faults: dict[str, None] = {}

    def try_to(check: Callable[[], object]) -> None:
        try:
            check()
        except BankError as error:
            faults[str(error).removeprefix(f"{path} is damaged: ")] = None

    def check_file() -> None:
        for (fault,) in bank.connection.rows("PRAGMA integrity_check"):
            if fault != "ok":
                faults[fault] = None
        for table, key, *_ in bank.connection.rows("PRAGMA foreign_key_check"):
            faults[f"row {key} of the table {table} belongs to nothing"] = None

    with bank:
        try_to(check_file)
        for sequence in bank.directory.sequences.tolist():
            try_to(partial(_check_entry, bank, sequence))
        if bank.layout.summary:
            try_to(lambda: list(bank.overview()))
        try_to(lambda: faults.update(dict.fromkeys(index_faults(bank))))
        return Verification(path, len(bank), tuple(faults))


def _check_entry(bank: MemoryBank, sequence: int) -> None:
    entry = bank.entry(sequence)
    marks = bank.connection.rows(
        "SELECT hash, moment FROM document WHERE key >= ? AND key <= ? ORDER BY key", span(sequence)
    )
    for member, mark in zip(entry.members, marks, strict=True):
        if mark != (id_hash(member.document_id), member.moment):
            raise DamageError(f"the date or the hash of document {member.document_id!r:.80}")
    _ = entry.memory, entry.texts

"""Retrieval for a question while another thread changes the retriever and the bank."""

from __future__ import annotations

from collections.abc import Container, Sequence

from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError
from mac_rag.memory.interface import BankContents
from mac_rag.memory.shared import SharedBank
from mac_rag.retrieval.base import Hit, Retriever
from mac_rag.sync import is_held


class ConsistentRetrieval:
    """A retriever as a question sees it that sees one snapshot of the bank.

    A change reaches the retriever before it is committed to the bank. If only some documents are allowed, they may have
    been chosen by the metadata that the snapshot holds. So new versions of documents, for which the choice may not
    hold, are left out while they are being written.

    Args:
        retriever: the retriever.
        bank: the bank that changes along with it.
        snapshot: what the question sees of the bank.
        changes: `bank.changes` before the snapshot was taken.
    """

    def __init__(self, retriever: Retriever, bank: SharedBank, snapshot: BankContents, changes: int) -> None:
        self._retriever = retriever
        self._bank = bank
        self._snapshot = snapshot
        self._changes = changes

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        """See `Retriever.retrieve`."""
        hits = self._retriever.retrieve(questions, k, allowed=allowed)
        was_changed = self._changes % 2 or self._bank.changes != self._changes
        if allowed is None or not was_changed or not self._tells():
            return hits
        return [[hit for hit in row if not self._is_new(hit)] for row in hits]

    def _tells(self) -> bool:
        """True if the retriever tells what it holds, so that its documents are those of the bank."""
        try:
            self._retriever.content_hashes([])
        except ConfigError:
            return False
        return True

    def _is_new(self, hit: Hit) -> bool:
        name = hit.document_id
        return name in self._snapshot and not is_held(
            self._snapshot, name, content_hash(Document(name, hit.text, hit.metadata))
        )

"""Adapts to documents in steps: plans their token ids, makes memory tokens of them, writes these to the bank.

`MACEngine` takes the steps in order, and `mac_rag.sync` keeps the retriever in agreement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from torch import Tensor

from mac_rag.config import BoundConfig
from mac_rag.data.provenance import Member, content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DocumentError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.contents import Contents
from mac_rag.memory.reduction import BoundedBank
from mac_rag.model import MACModel
from mac_rag.sync import is_held

Plan: TypeAlias = dict[str, list[list[int]]]  # document id -> token ids of its rows


class Adapter:
    """Writes documents to a bank as memory tokens, without committing.

    Args:
        model: makes the memory tokens.
        bound: largest size of the bank, and how to reduce it; None lets it grow.
    """

    def __init__(self, model: MACModel, bound: BoundConfig | None) -> None:
        self.model = model
        self.bound = bound
        self._bounded: BoundedBank | None = None

    def plan(
        self,
        documents: Sequence[Document],
        bank: Contents,
        on_long: Literal["chunk", "error"] = "chunk",
        known: Mapping[str, list[list[int]]] | None = None,
    ) -> Plan:
        """Token ids of the documents that are new to a bank or changed: for each document a row for each chunk.

        Args:
            documents: documents with unique ids.
            bank: the bank, or a snapshot of it.
            on_long: for a document beyond the model's limit: split it into chunks, or raise an error.
            known: token ids of some of the documents, from an earlier plan.

        Raises:
            DocumentError: for an empty document, one that is no text, or with `on_long="error"` one beyond the limit.
            BankError: for an id that occurs twice, or metadata that the bank cannot store.
        """
        plan: Plan = {}
        seen: set[str] = set()
        for document in documents:
            if document.id in seen:
                raise BankError(f"document id {document.id!r} occurs twice; ids must be unique")
            seen.add(document.id)
            if isinstance(document.text, str) and is_held(bank, document.id, content_hash(document)):
                continue
            if known is not None and document.id in known:
                plan[document.id] = known[document.id]
                continue
            try:
                plan[document.id] = self.model.amortization.plan(document.text, whole=on_long == "error")
            except DocumentError as error:
                raise DocumentError(f"document {document.id!r}: {error}") from None
            Member.of(document)  # raises for metadata that the bank cannot store
        return plan

    def encode(self, documents: Sequence[Document], plan: Plan) -> Tensor | None:
        """Memory tokens `[rows, T, D]` of planned documents; None for no documents."""
        rows = [row for document in documents for row in plan[document.id]]
        return self.model.amortize_rows(rows) if rows else None

    def put(self, bank: MemoryBank, documents: Sequence[Document], phi: Tensor | None, plan: Plan) -> tuple[str, ...]:
        """Writes documents to the bank; returns the ids of documents that it forgot to stay within its bound."""
        if phi is None:
            return ()
        rows = [len(plan[document.id]) for document in documents]
        if self.bound is None:
            return bank.put(documents, phi, rows)
        if self._bounded is None or self._bounded.bank is not bank:
            self._bounded = BoundedBank(bank, self.bound.maximum, self.bound.method, seed=self.bound.seed)
        return self._bounded.put(documents, phi, rows).forgotten

    def remember(self, bank: MemoryBank, documents: Sequence[Document]) -> None:
        """All steps at once."""
        plan = self.plan(documents, bank)
        new = [document for document in documents if document.id in plan]
        self.put(bank, new, self.encode(new, plan), plan)

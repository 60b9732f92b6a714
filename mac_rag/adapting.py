"""Adapts to documents in steps: plans their token ids, makes memory tokens of them, writes these to the bank.

`MACEngine` takes the steps in order, and `mac_rag.sync` keeps the retriever in agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

from torch import Tensor

from mac_rag.config import BoundConfig
from mac_rag.data.characters import shown_id
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DocumentError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.interface import Bank, BankContents
from mac_rag.memory.parts import PART_BITS
from mac_rag.memory.reduction import BoundedBank
from mac_rag.memory.views.overview import layout_for, put_with_overview
from mac_rag.model import MACModel
from mac_rag.progress import progress_bar
from mac_rag.sync import SyncedBank, is_held

# Documents encoded and committed at a time: enough to fill length-sorted batches, few enough to lose little in a crash.
GROUP = 512

# Document id -> token ids of its rows; no rows for a document whose text the bank holds with other metadata.
Plan: TypeAlias = dict[str, list[list[int]]]


class Adapter:
    """Writes documents to a bank as memory tokens.

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
        bank: BankContents,
        on_long: Literal["chunk", "error"] = "chunk",
        known: Mapping[str, list[list[int]]] | None = None,
        *,
        progress: bool = False,
    ) -> Plan:
        """Token ids of the documents that are new to a bank or changed: for each document a row for each chunk.

        A document whose kept text was lost counts as changed, so that the bank keeps the text again. One whose metadata
        alone have changed has no rows: its memory tokens stay.

        Args:
            documents: documents with unique ids.
            bank: the bank, or a snapshot of it.
            on_long: for a document beyond the model's limit: split it into chunks, or raise an error.
            known: token ids of some of the documents, from an earlier plan.
            progress: shows a progress bar, which also moves within a long document.

        Raises:
            DocumentError: for an empty document, one of too many rows for a bank, and with `on_long="error"` one beyond
                the limit; and as `Member.of`.
            BankError: for an id that occurs twice, and for documents that supersede each other; and as `Member.of`.
            DamageError: when the bank keeps texts, and their file is damaged.
        """
        members: dict[str, Member] = {}
        for document in documents:
            member = Member.of(document)
            if document.id in members:
                raise BankError(f"document id {shown_id(document.id)} occurs twice; ids must be unique")
            members[document.id] = member
        check_supersession(members, bank)
        new = [document for document in documents if is_lacking(bank, document.id, members[document.id].content_hash)]
        plan: Plan = {}
        with progress_bar("split", sum(len(document.text) for document in new), disable=not progress) as bar:
            for document in new:
                if holds_text(bank, document):
                    plan[document.id] = []
                    bar.advance(len(document.text))
                else:
                    rows = None if known is None else known.get(document.id)
                    plan[document.id] = rows or self._rows(document, on_long, bar.advance)
        return plan

    def _rows(
        self, document: Document, on_long: Literal["chunk", "error"], advance: Callable[[int], object]
    ) -> list[list[int]]:
        try:
            rows = self.model.amortization.plan(document.text, whole=on_long == "error", advance=advance)
            if len(rows) >> PART_BITS:
                raise DocumentError(f"its {len(rows):,} rows are too many; split it below {1 << PART_BITS:,} rows")
        except DocumentError as error:
            raise DocumentError(f"document {shown_id(document.id)}: {error}") from None
        return rows

    def encode(self, documents: Sequence[Document], plan: Plan) -> Tensor | None:
        """Memory tokens `[rows, T, D]` of planned documents; None for no documents."""
        rows = [row for document in documents for row in plan[document.id]]
        return self.model.amortize_rows(rows) if rows else None

    def write(
        self,
        synced: SyncedBank,
        documents: Sequence[Document],
        plan: Plan,
        unfiled: Container[str],
        *,
        progress: bool = False,
    ) -> tuple[int, tuple[str, ...]]:
        """Writes the `unfiled` documents to the retriever and the planned ones to the bank, and commits, in groups.

        Args:
            synced: bank and retriever.
            documents: the documents, each of them planned or unfiled.
            plan: token ids of those that the bank lacks.
            unfiled: ids of those that the retriever lacks.
            progress: shows a progress bar.

        Returns:
            The number of rows of memory tokens that were written, and the ids of documents that the bank forgot.
        """
        rows = 0
        forgotten: list[str] = []
        with progress_bar("adapt", len(documents), disable=not progress) as bar:
            for first in range(0, len(documents), GROUP):
                group = documents[first : first + GROUP]
                new = [document for document in group if document.id in plan]
                for document in new:  # a group before may have cost the bank a document whose text it held
                    if not plan[document.id] and not holds_text(synced.bank, document):
                        plan[document.id] = self._rows(document, "chunk", lambda _: None)
                phi = self.encode(new, plan)  # first: if it fails, nothing has changed yet
                counts = {document.id: len(plan[document.id]) for document in new}
                forgotten += self.write_encoded(synced, group, phi, counts, unfiled)
                rows += 0 if phi is None else len(phi)
                bar.advance(len(group))
        return rows, tuple(forgotten)

    def write_encoded(
        self,
        synced: SyncedBank,
        documents: Sequence[Document],
        phi: Tensor | None,
        rows: Mapping[str, int],
        unfiled: Container[str],
    ) -> tuple[str, ...]:
        """Writes documents with their memory tokens to retriever and bank, and commits; on an error, neither changes.

        Args:
            synced: bank and retriever.
            documents: the documents.
            phi: memory tokens `[rows, T, D]` of those that the bank lacks, in the order of `documents`; None if there
                are none.
            rows: the ids of those that the bank lacks, and the number of rows of each; 0 where it lacks the metadata.
            unfiled: ids of those that the retriever lacks.

        Returns:
            The ids of documents that the bank forgot.
        """
        new = [document for document in documents if document.id in rows]
        to_file = [document for document in documents if document.id in unfiled]
        counts = [rows[document.id] for document in new]
        return synced.put(to_file, partial(self.put, synced.bank, new, phi, counts))

    def put(
        self, bank: Bank, documents: Sequence[Document], phi: Tensor | None, rows: Sequence[int]
    ) -> tuple[str, ...]:
        """Writes documents to the bank, without committing.

        Args:
            bank: the bank.
            documents: the documents.
            phi: their memory tokens `[rows, T, D]`; None for none.
            rows: number of rows of each document; 0 for one that only gets other metadata.

        Returns:
            The ids of documents that it forgot to stay within its bound.
        """
        if not all(rows):  # before others come, for which the bank may forget these
            bank.describe([document for document, count in zip(documents, rows) if not count])
            documents, rows = zip(*[each for each in zip(documents, rows) if each[1]]) if any(rows) else ((), ())
        if phi is None:
            return ()
        if self.bound is None:
            if isinstance(bank, MemoryBank):
                return put_with_overview(bank, self.model.aggregation, documents, phi, rows)
            return bank.put(documents, phi, rows)
        assert isinstance(bank, MemoryBank)  # see `MACEngine`
        bank.keep_rows_as(layout_for(self.model.aggregation))
        if self._bounded is None or self._bounded.bank is not bank:
            self._bounded = BoundedBank(bank, self.bound.maximum, self.bound.method, seed=self.bound.seed)
        return self._bounded.put(documents, phi, rows).forgotten

    def remember(self, bank: Bank, documents: Sequence[Document]) -> None:
        """Plans, encodes and puts documents, without committing."""
        plan = self.plan(documents, bank)
        new = [document for document in documents if document.id in plan]
        self.put(bank, new, self.encode(new, plan), [len(plan[document.id]) for document in new])


def is_lacking(bank: BankContents, document_id: str, content: str) -> bool:
    """True if the bank does not hold a document with this content hash, or has lost its kept text.

    Raises:
        DamageError: when the bank keeps texts, and their file is damaged.
    """
    return not is_held(bank, document_id, content) or bank.is_textless(document_id)


def holds_text(bank: BankContents, document: Document) -> bool:
    """True if the bank holds a document with this text, whatever its metadata, and has not lost the kept text."""
    if document.id not in bank or bank.is_textless(document.id):
        return False
    return any(
        member.document_id == document.id and member.matches(document.text) for member in bank[document.id].members
    )


def check_supersession(members: Mapping[str, Member], bank: BankContents) -> None:
    """Refuses documents that would supersede each other in a circle.

    Args:
        members: the documents that come, by id.
        bank: the bank that they come to.

    Raises:
        BankError: names the documents of the circle.
    """

    def superseded(name: str) -> tuple[str, ...]:
        member = members.get(name)
        if member is None and name in bank:
            member = next(one for one in bank[name].members if one.document_id == name)
        return () if member is None else member.supersedes

    done: set[str] = set()
    for first in (name for name, member in members.items() if member.supersedes):
        path: dict[str, Iterator[str]] = {} if first in done else {first: iter(superseded(first))}
        while path:
            name = next(reversed(path))
            following = next(path[name], None)
            if following is None:
                done.add(name)
                del path[name]
            elif following in path:
                circle = [*list(path)[list(path).index(following) :], following]
                raise BankError(
                    f"documents supersede each other in a circle: {' -> '.join(map(shown_id, circle))}; take one of "
                    "them out of `supersedes`"
                )
            elif following not in done:
                path[following] = iter(superseded(following))

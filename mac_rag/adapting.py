"""Adapts to documents in three steps: plans their token ids, encodes them to memory tokens, writes these to the bank.

`MACEngine` runs the steps in order, and `mac_rag.sync` keeps the retriever in agreement.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.database import PART_BITS
from mac_rag.bank.interface import Bank, BankContents
from mac_rag.bank.overview import keep_rows_for, put_with_overview
from mac_rag.bank.reduction import BoundedBank
from mac_rag.bank.rows import RowLayout
from mac_rag.config import BoundConfig
from mac_rag.data.characters import shown_id
from mac_rag.data.languages import language_of
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DocumentError, MACError
from mac_rag.model import BATCH_TOKENS, AmortizedModel, MACModel, OwnKVModel
from mac_rag.progress import progress_bar
from mac_rag.retrieval.base import Retriever
from mac_rag.retrieval.dense import check_finite
from mac_rag.shipped_models import shipped_name
from mac_rag.sources import sentence_spans
from mac_rag.sync import SyncedBank, is_held

_log = logging.getLogger(__name__)

# Most documents in one commit; they stay in memory until then.
GROUP = 512
# Seconds from one commit to the next, or a little more. A crash or an interrupt may lose as much work.
SECONDS = 30.0
# Tokens that are encoded together, or a little more: several batches, so that texts of similar length share a batch.
# The windows do not depend on time, because the shape of a batch can change the last bits.
WINDOW = 4 * BATCH_TOKENS

# Document id -> token ids of its rows; no rows for a document of which only the metadata changed.
Plan: TypeAlias = dict[str, list[list[int]]]
# What a bank keeps of documents: memory tokens `[rows, T, D]`, or the codes of each row, `[n, bytes]`.
Written: TypeAlias = Tensor | list[Tensor]
# Makes of each window's rows of token ids what the bank keeps, in their order, and None of a window without rows. The
# function that it gets is called with the number of rows that are done.
Encode: TypeAlias = Callable[[Iterable[list[list[int]]], Callable[[int], object] | None], Iterator[Written | None]]


class DocumentWriter:
    """Writes documents to a bank as memory tokens.

    Args:
        model, bound: as `MACEngine` takes them.
        index: an index in the bank that scores its documents, which is written with them; None if there is none, or
            if the retriever is in the bank.
        encode: encodes the windows that are written; None for the model in this process.
    """

    def __init__(
        self,
        model: MACModel,
        bound: BoundConfig | None,
        index: Retriever | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.model = model
        self.bound = bound
        self.index = index
        self._encode = encode or self._encoded_here
        self._bounded: BoundedBank | None = None
        self._warns = model.config.languages is not None and find_spec("py3langid") is not None

    def plan(
        self,
        documents: Sequence[Document],
        bank: BankContents,
        on_long: Literal["chunk", "error"] = "chunk",
        known: Mapping[str, list[list[int]]] | None = None,
        *,
        on_bad: Callable[[int, MACError], object] | None = None,
        progress: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> Plan:
        """Token ids of the documents that are new to a bank or changed, with one row per chunk.

        A document of which only the metadata changed has no rows: its memory tokens stay.

        Args:
            documents: documents with unique ids.
            bank: the bank, or a snapshot of it.
            on_long: for a document beyond the model's limit: split it into chunks, or raise an error.
            known: token ids of some of the documents, from an earlier plan.
            on_bad: called with the index and the error of each document that is left out of the plan; None to raise the
                error.
            progress: shows a progress bar, which also moves within a long document.
            cancelled: as `MACEngine.adapt` takes it.

        Raises:
            DocumentError: for a document that is empty, has too many rows for a bank, or, with `on_long="error"`,
                exceeds the limit; and as `Member.of`.
            BankError: for an id that occurs twice, and for documents that supersede each other; and as `Member.of`.
        """
        members: dict[str, Member] = {}
        good: list[tuple[int, Document]] = []
        for index, document in enumerate(documents):
            try:
                member = Member.of(document)
                if document.id in members:
                    raise BankError(f"document id {shown_id(document.id)} occurs twice; ids must be unique")
            except (DocumentError, BankError) as error:
                if on_bad is None:
                    raise
                on_bad(index, error)
            else:
                members[document.id] = member
                good.append((index, document))
        check_supersession(members, bank)
        new = [each for each in good if not is_held(bank, each[1].id, members[each[1].id].content_hash)]
        plan: Plan = {}
        characters = sum(len(document.text) for _, document in new)
        with progress_bar("split", characters, disable=not progress, cancelled=cancelled) as bar:
            for index, document in new:
                if holds_text(bank, document):
                    plan[document.id] = []
                    bar.advance(len(document.text))
                    continue
                if self._warns and known is None:
                    self._check_language(document)
                rows = None if known is None else known.get(document.id)
                try:
                    plan[document.id] = rows or self._rows(document, on_long, bar.advance)
                except DocumentError as error:
                    if on_bad is None:
                        raise
                    on_bad(index, error)
        return plan

    def _check_language(self, document: Document) -> None:
        """Warns once, of the first document that is certainly in a language that the model does not read."""
        read = self.model.config.languages or ()
        found = language_of(document.text)
        if found is None or found in read:
            return
        self._warns = False
        _log.warning(
            "document %s is in a language (%s) that %s does not read (it reads %s): answers about this document and "
            "others like it will be wrong; translate them, or take a model that has learned their language",
            shown_id(document.id),
            found,
            shipped_name(self.model.fingerprint) or "this model",
            ", ".join(read),
        )

    def _rows(
        self, document: Document, on_long: Literal["chunk", "error"], advance: Callable[[int], object]
    ) -> list[list[int]]:
        try:
            rows = self.model.plan(document.text, whole=on_long == "error", advance=advance)
            if len(rows) >> PART_BITS:
                raise DocumentError(
                    f"it has {len(rows):,} rows, and a document may have {(1 << PART_BITS) - 1:,}; split it"
                )
        except DocumentError as error:
            raise DocumentError(f"document {shown_id(document.id)}: {error}") from None
        return rows

    def encode(self, documents: Sequence[Document], plan: Plan) -> Written | None:
        """What the bank keeps of planned documents; None for no documents."""
        rows = (rows_of(window, plan) for window in windows(documents, plan))
        return joined(list(self._encoded_here(rows, None)))

    def _encoded_here(
        self, rows: Iterable[list[list[int]]], advance: Callable[[int], object] | None
    ) -> Iterator[Written | None]:
        return (self.model.amortize_rows(some, advance=advance) if some else None for some in rows)

    def write(
        self,
        synced: SyncedBank,
        documents: Sequence[Document],
        plan: Plan,
        unfiled: Container[str],
        *,
        progress: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[int, tuple[str, ...]]:
        """Writes the `unfiled` documents to the retriever and the planned ones to the bank.

        Commits every `SECONDS`, and at the latest after `GROUP` documents.

        Args:
            synced: bank and retriever.
            documents: the documents, each of them planned or unfiled.
            plan: token ids of the documents that the bank lacks.
            unfiled: ids of the documents that the retriever lacks.
            progress: shows a progress bar, which moves with every batch.
            cancelled: as `MACEngine.adapt` takes it.

        Returns:
            The number of rows of memory tokens that were written, and the ids of documents that the bank forgot.
        """
        groups = (documents[first : first + GROUP] for first in range(0, len(documents), GROUP))
        parts = [window for group in groups for window in windows(group, plan)]
        count = reached = 0
        forgotten: list[str] = []
        committed = time.monotonic()
        rows_in_all = sum(map(len, plan.values()))
        with progress_bar("adapt", rows_in_all, disable=not progress, cancelled=cancelled) as bar:
            pending: list[Document] = []
            encoded: list[Written | None] = []
            planned = (rows_of(window, self._replanned(window, plan, synced.bank)) for window in parts)
            # If a window cannot be encoded, nothing of it, and of those since the last commit, is written.
            for window, made in zip(parts, self._encode(planned, bar.advance), strict=True):
                pending += window
                encoded.append(made)
                reached += len(window)
                if reached < len(documents) and reached % GROUP and time.monotonic() - committed < SECONDS:
                    continue
                forgotten += self._write(synced, pending, plan, encoded, unfiled)
                count += sum(len(plan[document.id]) for document in pending if document.id in plan)
                pending, encoded, committed = [], [], time.monotonic()
                bar.note(f"{reached:,} of {len(documents):,} documents saved")
        return count, tuple(forgotten)

    def _replanned(self, documents: Sequence[Document], plan: Plan, bank: BankContents) -> Plan:
        """The plan, with rows for documents whose text an earlier commit has pruned since it was made."""
        for document in documents:
            if plan.get(document.id) == [] and not holds_text(bank, document):
                plan[document.id] = self._rows(document, "chunk", lambda _: None)
        return plan

    def _write(
        self,
        synced: SyncedBank,
        documents: Sequence[Document],
        plan: Plan,
        encoded: Sequence[Written | None],
        unfiled: Container[str],
    ) -> tuple[str, ...]:
        """Writes documents with what their windows have become to retriever and bank, and commits.

        On an error, neither changes. Returns the ids of documents that the bank forgot.
        """
        before = sum(len(plan.get(document.id, ())) for document in documents)
        self._replanned(documents, plan, synced.bank)  # windows may have been encoded before the commit that pruned
        new = [document for document in documents if document.id in plan]
        counts = [len(plan[document.id]) for document in new]
        phi = joined(encoded) if sum(counts) == before else self.encode(new, plan)
        to_file = [document for document in documents if document.id in unfiled]
        return synced.put(to_file, partial(self.put, synced.bank, new, phi, counts))

    def put(
        self, bank: Bank, documents: Sequence[Document], phi: Written | None, rows: Sequence[int]
    ) -> tuple[str, ...]:
        """Writes documents to the bank, without committing.

        Args:
            bank: the bank.
            documents: the documents.
            phi: their memory tokens `[rows, T, D]`; None if there are none.
            rows: number of rows of each document; 0 for a document of which only the metadata changes.

        Returns:
            The ids of documents that the bank forgot to stay within its bound.
        """
        if not all(rows):  # first, because the bank may forget these documents to make room for the others
            bank.describe([document for document, count in zip(documents, rows) if not count])
            documents, rows = zip(*[each for each in zip(documents, rows) if each[1]]) if any(rows) else ((), ())
        if phi is None:
            return ()
        forgotten = self._put(bank, documents, phi, rows)
        if self.index is not None:
            self.index.put(documents)
            for name in self.index.held(forgotten):
                self.index.delete(name)
        return forgotten

    def _put(self, bank: Bank, documents: Sequence[Document], phi: Written, rows: Sequence[int]) -> tuple[str, ...]:
        summaries = self._sentence_keys(documents, rows)
        if self.bound is None:
            if isinstance(bank, MemoryBank) and isinstance(self.model, AmortizedModel):
                assert isinstance(phi, Tensor)
                return put_with_overview(bank, self.model.aggregation, documents, phi, rows)
            if isinstance(bank, MemoryBank) and isinstance(self.model, OwnKVModel):
                keep_rows_for_model(bank, self.model)
                return bank.put(documents, phi, rows, summarise=None if summaries is None else lambda _: summaries)
            return bank.put(documents, phi, rows)
        assert isinstance(bank, MemoryBank)  # see `MACEngine`
        keep_rows_for_model(bank, self.model)
        if self._bounded is None or self._bounded.bank is not bank:
            self._bounded = BoundedBank(bank, self.bound.maximum, self.bound.method)
        return self._bounded.put(documents, phi, rows, summaries=summaries)

    def _sentence_keys(self, documents: Sequence[Document], rows: Sequence[int]) -> Tensor | None:
        """What the sentence encoder makes of each row, `[N, 2 P]`: of its two halves, one after the other.

        None for a model without an LM's own keys and values, or without a sentence encoder.
        """
        if not isinstance(self.model, OwnKVModel) or self.model.sentences is None:
            return None
        chunks = self.model.chunks
        parts = [
            half
            for document, count in zip(documents, rows)
            for part in ([document.text] if count == 1 else chunks(document.text))
            for half in halves(part)
        ]
        vectors = self.model.sentences.documents(parts)
        check_finite(vectors, [f"the text {part!r:.60}" for part in parts])
        keys: Tensor = torch.from_numpy(vectors).unflatten(0, (-1, 2)).flatten(1)
        return keys

    def remember(self, bank: Bank, documents: Sequence[Document]) -> None:
        """Plans, encodes and puts documents, without committing."""
        plan = self.plan(documents, bank)
        new = [document for document in documents if document.id in plan]
        self.put(bank, new, self.encode(new, plan), [len(plan[document.id]) for document in new])


def keep_rows_for_model(bank: MemoryBank, model: MACModel) -> None:
    """Has an empty bank keep rows for a model, as `mac_rag.bank.overview.keep_rows_for` does."""
    if isinstance(model, AmortizedModel):
        keep_rows_for(bank, model.aggregation)
    elif isinstance(model, OwnKVModel):
        width = 0 if model.sentences is None else 2 * model.sentences.width
        bank.keep_rows_as(RowLayout(token_bytes=model.token_bytes, summary=width, prior_keys=width))


def halves(text: str) -> list[str]:
    """A text cut after the sentence that ends nearest to its middle; a single sentence twice.

    A sentence encoder says more of a few sentences than of many, and reads no more than the first part of a long text.
    """
    ends = [end for _, end in sentence_spans(text)[:-1]]
    cut = min(ends, key=lambda end: abs(2 * end - len(text)), default=0)
    return [text[:cut], text[cut:].strip()] if cut else [text, text]


def rows_of(documents: Sequence[Document], plan: Plan) -> list[list[int]]:
    """The token ids of documents, row after row."""
    return [row for document in documents for row in plan.get(document.id, ())]


def windows(documents: Sequence[Document], plan: Plan) -> Iterator[list[Document]]:
    """Divides documents, in their order, into groups to encode together: each of about `WINDOW` tokens or one document.

    Documents that are not planned stay in the group of their neighbours.
    """
    window: list[Document] = []
    tokens = 0
    for document in documents:
        window.append(document)
        tokens += sum(map(len, plan.get(document.id, ())))
        if tokens >= WINDOW:
            yield window
            window, tokens = [], 0
    if window:
        yield window


def joined(parts: Sequence[Written | None]) -> Written | None:
    """The rows of all parts; None if there are none."""
    rows = [part for part in parts if part is not None]
    tensors = [part for part in rows if isinstance(part, Tensor)]
    if tensors:
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return [row for part in rows for row in part] or None


def holds_text(bank: BankContents, document: Document) -> bool:
    """True if the bank holds a document with this text, whatever its metadata."""
    if document.id not in bank:
        return False
    entry = bank[document.id]
    return entry.members[entry.place(document.id)].matches(document.text)


def check_supersession(members: Mapping[str, Member], bank: BankContents) -> None:
    """Refuses documents that would supersede each other in a circle.

    Args:
        members: document id -> the new documents.
        bank: the bank to which they are added.

    Raises:
        BankError: if there is a circle; names its documents.
    """

    def superseded(name: str) -> tuple[str, ...]:
        member = members.get(name)
        if member is None and name in bank:
            entry = bank[name]
            member = entry.members[entry.place(name)]
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

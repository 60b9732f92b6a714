"""The engine: the one place where a model, its memory bank and a retriever meet.

LlamaIndex, the evaluations and the command line are thin faces over it. One lock makes it safe to use from several
threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mac_rag import DEFAULT_MODEL
from mac_rag.config import AttentionConfig, BoundConfig
from mac_rag.data.provenance import Member, content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, DocumentError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.reduction import BoundedBank
from mac_rag.memory.storage.manifest import Intent
from mac_rag.memory.views.reader import BankReader
from mac_rag.model import MACModel
from mac_rag.progress import progress_bar
from mac_rag.sync import Reconciliation, finish, is_held, reconcile, unfiled

if TYPE_CHECKING:
    from typing import Literal

    from mac_rag.retrieval.base import Retriever

_log = logging.getLogger(__name__)

# Documents that are encoded and committed at a time: enough to fill length-sorted batches, few enough to lose little.
_ADAPT_GROUP = 512


@dataclass(frozen=True)
class AdaptReport:
    """What a call of `adapt` did.

    Attributes:
        added, updated, unchanged: how many documents.
        rows: rows of memory tokens that were written.
        forgotten: ids of documents that went to make room in a bounded bank, or because they had been merged with one
            that was updated.
        filed: how many documents were written to the retriever.
    """

    added: int
    updated: int
    unchanged: int
    rows: int
    forgotten: tuple[str, ...] = ()
    filed: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer and what it was given from.

    Attributes:
        text: the answer.
        contexts: the documents that stood in front of the question, as they were used.
        document_ids: ids of the documents that the retriever found, best first.
        truncated: whether documents were shortened to fit the LM's window.
        discarded_prior: share of the document prior on documents that preselection left out; zero without it.
    """

    text: str
    contexts: tuple[str, ...]
    document_ids: tuple[str, ...]
    truncated: bool
    discarded_prior: float = 0.0


class MACEngine:
    """Adapts to documents and answers questions.

    Args:
        model: a model, or the name or path of one.
        bank: a bank that the model wrote; None for an empty one.
        retriever: finds documents to put in front of a question; None for memory alone. It is kept in step with the
            bank by `adapt` and `forget`, which change it first. What a crash interrupted between the two is finished by
            the next engine that opens both; `reconcile` lets a bank follow that is behind for other reasons.
        k: how many documents the retriever finds.
        attention: how questions attend to the bank; None for exact attention to all of it.
        bound: keeps the bank from growing beyond a size; None lets it grow.
        memory_weight: lambda, of what is said with memory behind documents, against what is said without (see
            `mac_rag.lm.max_rule`); None for what the model is configured to.

    Raises:
        ConfigError: for a way of attending that the model does not support.
        FingerprintError: when another model wrote the bank.
    """

    def __init__(
        self,
        model: MACModel | str = DEFAULT_MODEL,
        bank: MemoryBank | None = None,
        retriever: Retriever | None = None,
        *,
        k: int = 5,
        attention: AttentionConfig | None = None,
        bound: BoundConfig | None = None,
        memory_weight: float | None = None,
    ) -> None:
        self.model = MACModel.from_pretrained(model) if isinstance(model, str) else model
        self.bank = MemoryBank(self.model.fingerprint) if bank is None else bank
        self.bank.check_model(self.model.fingerprint)
        self.retriever = retriever
        self.k = k
        self.attention = attention or AttentionConfig()
        self.bound = bound
        self.memory_weight = memory_weight
        self._lock = threading.RLock()
        self._reader = BankReader(self.model, self.bank, self.attention)
        self._bounded: BoundedBank | None = None
        if self.bank.writable:
            self._finish()

    def adapt(
        self,
        documents: Iterable[Document],
        *,
        on_long: Literal["chunk", "error"] = "chunk",
        progress: bool = False,
    ) -> AdaptReport:
        """Remembers documents (the online stage of algorithm 2): no gradient, no question, one pass.

        A document that the bank already holds with this id, text and metadata costs nothing; one with a known id and
        other text or metadata replaces the old. All documents are checked before the first is written, so bad input
        loses nothing. A bank on disk is committed every few hundred documents: after an interruption, the same call
        goes on where it stopped.

        Args:
            documents: with ids of their own.
            on_long: what to do with a document beyond the model's limit: remember it in chunks, or refuse it.
            progress: shows a progress bar.

        Raises:
            DocumentError: for an empty document, one that is no text, or with `on_long="error"` one beyond the limit.
            BankError: for an id that occurs twice in the call.
            FingerprintError: when another model wrote the bank.
        """
        with self._lock:
            self.bank.check_model(self.model.fingerprint)
            self._finish()
            documents = list(documents)
            fresh = self.check(documents, on_long=on_long)
            lacking = unfiled(self.retriever, documents, fresh)
            pending = [document for document in documents if document.id in fresh or document.id in lacking]
            if pending:
                self.bank.commit()  # a bank that cannot be written to says so before the retriever is
            updated = sum(document_id in self.bank for document_id in fresh)
            rows = 0
            forgotten: list[str] = []
            with progress_bar("adapt", len(pending), disable=not progress) as bar:
                for first in range(0, len(pending), _ADAPT_GROUP):
                    group = pending[first : first + _ADAPT_GROUP]
                    written, gone = self._write(group, fresh, lacking)
                    rows += written
                    forgotten += gone
                    bar.advance(len(group))
            unchanged = len(documents) - len(fresh)
            return AdaptReport(len(fresh) - updated, updated, unchanged, rows, tuple(forgotten), len(lacking))

    def check(
        self, documents: Iterable[Document], *, on_long: Literal["chunk", "error"] = "chunk"
    ) -> dict[str, list[str]]:
        """What `adapt` would remember: documents that are new or changed, by id, as chunks within the model's limit.

        Raises:
            DocumentError, BankError: as `adapt`.
        """
        fresh: dict[str, list[str]] = {}
        seen: set[str] = set()
        for document in documents:
            if document.id in seen:
                raise BankError(f"document id {document.id!r} occurs twice; ids must be unique")
            seen.add(document.id)
            if not self._is_known(document):
                fresh[document.id] = self._chunks(document, on_long)
                Member.of(document)  # refuses what the bank could not keep
        return fresh

    def _write(
        self, documents: Sequence[Document], fresh: Mapping[str, list[str]], lacking: Container[str]
    ) -> tuple[int, tuple[str, ...]]:
        """Writes `lacking` documents to the retriever and then `fresh` ones to the bank, and commits.

        Returns:
            How many rows of memory tokens were written, and the ids of documents that the bank forgot.
        """
        new = [document for document in documents if document.id in fresh]
        phi = self.model.amortize([chunk for document in new for chunk in fresh[document.id]]) if new else None
        filing = [document for document in documents if document.id in lacking]
        if self.retriever is not None and filing:
            self.bank.commit(Intent(puts=tuple(document.id for document in filing)))
            self.retriever.put(filing)
        gone = () if phi is None else self._put(new, phi, [len(fresh[document.id]) for document in new])
        self.bank.commit(None if self.retriever is None else Intent())
        return 0 if phi is None else len(phi), gone

    def _remember(self, documents: Sequence[Document]) -> None:
        """Writes documents of the retriever to the bank."""
        self._write(documents, self.check(documents), ())

    def _finish(self) -> None:
        """Does the rest of a change that was interrupted between the retriever and the bank."""
        if self.retriever is not None and self.bank.intent:
            done = finish(self.bank, self.retriever, self._remember)
            _log.warning("finished an interrupted change of retriever and bank: %d documents", done)

    def _is_known(self, document: Document) -> bool:
        return isinstance(document.text, str) and is_held(self.bank, document.id, content_hash(document))

    def _put(self, documents: Sequence[Document], phi: Tensor, rows: Sequence[int]) -> tuple[str, ...]:
        """Writes documents to the bank; returns the ids of others that went."""
        if self.bound is None:
            return self.bank.put(documents, phi, rows)
        if self._bounded is None or self._bounded.bank is not self.bank:
            self._bounded = BoundedBank(self.bank, self.bound.maximum, self.bound.method, seed=self.bound.seed)
        return self._bounded.put(documents, phi, rows).forgotten

    def _chunks(self, document: Document, on_long: str) -> list[str]:
        try:
            chunks = self.model.amortization.split(document.text)
            if len(chunks) > 1 and on_long == "error":
                self.model.amortization.ids(document.text)
        except DocumentError as error:
            raise DocumentError(f"document {document.id!r}: {error}") from None
        return chunks

    def forget(self, document_id: str) -> tuple[str, ...]:
        """Removes a document from the retriever and the bank, if only one of them holds it from that one.

        Returns:
            The ids of all documents that the bank has forgotten: this one, and those that it was merged with.

        Raises:
            BankError: for an id that neither holds.
        """
        with self._lock:
            self._finish()
            if self.retriever is None or document_id not in self.retriever:
                gone = self.bank.delete(document_id)
                self.bank.commit()
                return gone
            self.bank.commit(Intent(deletes=(document_id,)))
            self.retriever.delete(document_id)
            gone = self.bank.delete(document_id) if document_id in self.bank else ()
            self.bank.commit(Intent())
            return gone

    def reconcile(self, *, allow_emptying: bool = False) -> Reconciliation:
        """Lets the bank follow the retriever after a crash between the two; see `mac_rag.sync.reconcile`.

        A bank that is bounded by random pruning lacks documents on purpose. They are adapted again here, and others
        pruned for them.

        Args:
            allow_emptying: lets all documents of the bank go, where the retriever holds none of them.

        Raises:
            ConfigError: without a retriever, or with one that does not tell what it holds.
            BankError: when the retriever holds none of the bank's documents.
            DocumentError: for a document of the retriever that cannot be adapted.
            FingerprintError: when another model wrote the bank.
        """
        with self._lock:
            self.bank.check_model(self.model.fingerprint)
            if self.retriever is None:
                raise ConfigError("there is no retriever to reconcile the bank with; give the engine one")
            self._finish()
            return reconcile(
                self.bank, self.retriever, self._remember, group=_ADAPT_GROUP, allow_emptying=allow_emptying
            )

    def answer(
        self,
        questions: Sequence[str],
        *,
        contexts: Sequence[Sequence[str]] | None = None,
        use_memory: bool = True,
        use_retriever: bool = True,
        allowed: Container[str] | None = None,
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        batch_size: int = 32,
        progress: bool = False,
    ) -> list[Answer]:
        """Answers questions: `LM(d + x; phi*)`, phi* from the bank and d from the retriever.

        Args:
            questions: texts.
            contexts: documents for each question, used instead of the retriever's.
            use_memory: False to answer without the bank.
            use_retriever: False to answer without the retriever.
            allowed: ids of the documents that may have any influence, through the retriever or the bank; None for all.
            overflow: when documents and question are beyond the LM's window: refuse, or leave out the last documents,
                never the question.
            max_new_tokens: None for the model's configured length.
            num_beams: 1 is greedy.
            batch_size: questions of one generation.
            progress: shows a progress bar.

        Raises:
            BankError: for an empty bank where memory is wanted, or none of its documents allowed.
            DocumentError: for an empty question, or a prompt beyond the window.
            FingerprintError: when another model wrote the bank.
        """
        with self._lock:
            self.bank.check_model(self.model.fingerprint)
            found = self._contexts(questions, contexts, use_retriever, allowed)
            fitted = [
                self.fitted(question, texts, overflow, max_new_tokens)
                for question, (texts, _) in zip(questions, found, strict=True)
            ]
            lengths = [len(question) + sum(map(len, texts)) for question, (texts, _) in zip(questions, fitted)]
            order = sorted(range(len(questions)), key=lengths.__getitem__)
            answers: list[Answer | None] = [None] * len(questions)
            with progress_bar("answer", len(questions), disable=not progress) as bar:
                for first in range(0, len(order), batch_size):
                    chosen = order[first : first + batch_size]
                    asked = [questions[i] for i in chosen]
                    memory = self._current().aggregate(asked, allowed) if use_memory else None
                    texts = self.model.generate(
                        asked,
                        [fitted[i][0] for i in chosen],
                        modulation=None if memory is None else memory.phi,
                        max_new_tokens=max_new_tokens,
                        num_beams=num_beams,
                        memory_weight=self.memory_weight,
                    )
                    discarded = [0.0] * len(chosen) if memory is None else memory.discarded.tolist()
                    for i, text, share in zip(chosen, texts, discarded, strict=True):
                        answers[i] = Answer(text, fitted[i][0], found[i][1], fitted[i][1], share)
                    bar.advance(len(chosen))
            return [answer for answer in answers if answer is not None]

    def stream(
        self,
        question: str,
        *,
        contexts: Sequence[str] | None = None,
        use_memory: bool = True,
        use_retriever: bool = True,
        allowed: Container[str] | None = None,
        max_new_tokens: int | None = None,
    ) -> Iterator[str]:
        """Yields the answer to one question piece by piece; the pieces joined are what `answer` returns.

        Raises:
            BankError, DocumentError, FingerprintError: as `answer`, at the call and not at the first piece.
        """
        with self._lock:
            self.bank.check_model(self.model.fingerprint)
            given = None if contexts is None else [contexts]
            (found, _) = self._contexts([question], given, use_retriever, allowed)[0]
            fitted, _ = self.fitted(question, found, "error", max_new_tokens)
            phi = self._current().aggregate([question], allowed).phi if use_memory else None
        return self._pieces(question, fitted, phi, max_new_tokens)

    def _pieces(
        self, question: str, contexts: Sequence[str], phi: Tensor | None, max_new_tokens: int | None
    ) -> Iterator[str]:
        pieces = self.model.stream(
            question, contexts, modulation=phi, max_new_tokens=max_new_tokens, memory_weight=self.memory_weight
        )
        while True:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def aggregate(self, questions: Sequence[str], allowed: Container[str] | None = None) -> Tensor:
        """phi* `[B, T, D]` of each question (equation 1).

        Raises:
            BankError: for an empty bank, or none of its documents allowed.
            DocumentError: for an empty question, or one beyond the limit.
            FingerprintError: when another model wrote the bank.
        """
        with self._lock:
            return self._current().aggregate(questions, allowed).phi

    def document_attention(
        self, questions: Sequence[str], allowed: Container[str] | None = None
    ) -> tuple[list[str], Tensor]:
        """How much of each question's attention goes to each document of the bank.

        Documents that were merged share the attention to their one entry equally.

        Returns:
            The document ids, and the attention mass `[B, documents]`; each row sums to 1.

        Raises:
            BankError: for an empty bank, or none of its documents allowed.
            ConfigError: for a way of attending that does not reach single documents.
        """
        with self._lock:
            mass = self._current().attention_mass(questions, allowed).cpu()
            ids = self.bank.document_ids
            place = {document_id: index for index, document_id in enumerate(ids)}
            owners = [
                (row, place[i], len(members)) for row, members in enumerate(self.bank.row_members) for i in members
            ]
            rows, documents, shared = (torch.tensor(column) for column in zip(*owners, strict=True))
            found = mass.new_zeros(len(questions), len(ids))
            return ids, found.index_add_(1, documents, mass[:, rows] / shared)

    def _current(self) -> BankReader:
        """The reader of the bank that is set now."""
        self.bank.check_model(self.model.fingerprint)
        if self._reader.bank is not self.bank:
            self._reader = BankReader(self.model, self.bank, self.attention)
        return self._reader

    def _contexts(
        self,
        questions: Sequence[str],
        contexts: Sequence[Sequence[str]] | None,
        use_retriever: bool,
        allowed: Container[str] | None,
    ) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The documents in front of each question, and the ids of those that the retriever found."""
        if contexts is not None:
            return [(tuple(texts), ()) for texts in contexts]
        if self.retriever is None or not use_retriever:
            return [((), ())] * len(questions)
        hits = self.retriever.retrieve(questions, self.k, allowed=allowed)
        return [(tuple(hit.text for hit in row), tuple(hit.document_id for hit in row)) for row in hits]

    def fitted(
        self,
        question: str,
        contexts: Sequence[str],
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
    ) -> tuple[tuple[str, ...], bool]:
        """The documents as they fit into the LM's window before the question, and whether they were shortened.

        Args:
            question, contexts, overflow, max_new_tokens: as `answer` takes them, of one question.

        Raises:
            DocumentError: for an empty question, or a prompt beyond the window.
        """
        prompts = self.model.base_lm.prompts
        room = self.model.context_window - (max_new_tokens or self.model.config.max_new_tokens)
        self.model.input_encoder.ids(question)  # an empty or endless question is an error with or without memory
        used = len(prompts.prompt(question, contexts))
        if used <= room:
            return tuple(contexts), False
        if overflow == "error" or len(prompts.prompt(question)) > room:
            raise DocumentError(
                f"{len(contexts)} documents and the question take {used} tokens, but the LM's window leaves room for "
                f"{room}; give fewer or shorter documents (a smaller k or chunk size)"
            )
        return prompts.shortened(question, contexts, room), True

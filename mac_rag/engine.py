"""The engine: the one place where a model, its memory bank and a retriever meet.

LlamaIndex, the evaluations and the command line are thin faces over it. One lock makes it safe to use from several
threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from mac_rag import DEFAULT_MODEL
from mac_rag.config import AttentionConfig, BoundConfig
from mac_rag.data.provenance import Member, content_hash
from mac_rag.data.types import AdaptReport, Answer, Document
from mac_rag.errors import BankError, DocumentError
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.reduction import BoundedBank
from mac_rag.memory.views.reader import Aggregated, BankReader
from mac_rag.model import MACModel
from mac_rag.progress import progress_bar
from mac_rag.sync import Reconciliation, SyncedBank, is_held

if TYPE_CHECKING:
    from mac_rag.retrieval.base import Retriever

__all__ = ["AdaptReport", "Answer", "MACEngine"]

_log = logging.getLogger(__name__)

# Documents that are encoded and committed at a time: enough to fill length-sorted batches, few enough to lose little.
_ADAPT_GROUP = 512

Plan: TypeAlias = dict[str, list[list[int]]]  # document id -> token ids of its rows


class MACEngine:
    """Adapts to documents and answers questions.

    Examples:
        >>> from mac_rag import Document, MACEngine
        >>> engine = MACEngine("mac-tiny")
        >>> engine.adapt([Document("may", "Ada Voss was appointed head of the Orsena museum.")]).added
        1
        >>> len(engine.answer(["Who was appointed?"]))
        1

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
        ConfigError: for an `attention` that the model does not support.
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
            plan = self._plan(documents, on_long)
            lacking = self._synced.unfiled(documents, plan)
            pending = [document for document in documents if document.id in plan or document.id in lacking]
            if pending:
                self.bank.commit()  # a bank that cannot be written to says so before the retriever is
            updated = sum(document_id in self.bank for document_id in plan)
            rows = 0
            forgotten: list[str] = []
            with progress_bar("adapt", len(pending), disable=not progress) as bar:
                for first in range(0, len(pending), _ADAPT_GROUP):
                    group = pending[first : first + _ADAPT_GROUP]
                    written, gone = self._write(group, plan, lacking)
                    rows += written
                    forgotten += gone
                    bar.advance(len(group))
            unchanged = len(documents) - len(plan)
            return AdaptReport(len(plan) - updated, updated, unchanged, rows, tuple(forgotten), len(lacking))

    def _plan(self, documents: Sequence[Document], on_long: str = "chunk") -> Plan:
        """Token ids of the documents that are new or changed, by id: one row, or one for each chunk of a long one."""
        plan: Plan = {}
        seen: set[str] = set()
        for document in documents:
            if document.id in seen:
                raise BankError(f"document id {document.id!r} occurs twice; ids must be unique")
            seen.add(document.id)
            known = isinstance(document.text, str) and is_held(self.bank, document.id, content_hash(document))
            if known:
                continue
            try:
                plan[document.id] = self.model.amortization.plan(document.text, whole=on_long == "error")
            except DocumentError as error:
                raise DocumentError(f"document {document.id!r}: {error}") from None
            Member.of(document)  # refuses what the bank could not keep
        return plan

    def _write(self, documents: Sequence[Document], plan: Plan, lacking: Container[str]) -> tuple[int, tuple[str, ...]]:
        """Writes `lacking` documents to the retriever and then planned ones to the bank, and commits.

        Returns:
            How many rows of memory tokens were written, and the ids of documents that the bank forgot.
        """
        new = [document for document in documents if document.id in plan]
        phi = self._encoded(new, plan)  # first, for this may fail and has changed nothing yet
        filing = [document for document in documents if document.id in lacking]
        gone = self._synced.put(filing, lambda: self._put(new, phi, plan))
        return 0 if phi is None else len(phi), gone

    def _remember(self, documents: Sequence[Document]) -> None:
        """Writes documents of the retriever to the bank."""
        plan = self._plan(documents)
        new = [document for document in documents if document.id in plan]
        self._put(new, self._encoded(new, plan), plan)

    def _encoded(self, documents: Sequence[Document], plan: Plan) -> Tensor | None:
        rows = [row for document in documents for row in plan[document.id]]
        return self.model.amortize_rows(rows) if rows else None

    def _put(self, documents: Sequence[Document], phi: Tensor | None, plan: Plan) -> tuple[str, ...]:
        """Writes documents to the bank; returns the ids of others that went."""
        if phi is None:
            return ()
        rows = [len(plan[document.id]) for document in documents]
        if self.bound is None:
            return self.bank.put(documents, phi, rows)
        if self._bounded is None or self._bounded.bank is not self.bank:
            self._bounded = BoundedBank(self.bank, self.bound.maximum, self.bound.method, seed=self.bound.seed)
        return self._bounded.put(documents, phi, rows).forgotten

    @property
    def _synced(self) -> SyncedBank:
        return SyncedBank(self.bank, self.retriever)

    def _finish(self) -> None:
        """Does the rest of a change that was interrupted between the retriever and the bank."""
        if self.retriever is not None and self.bank.intent:
            done = self._synced.finish(self._remember)
            _log.warning("finished an interrupted change of retriever and bank: %d documents", done)

    def forget(self, document_id: str) -> tuple[str, ...]:
        """Removes a document from the retriever and the bank, if only one of them holds it from that one.

        Returns:
            The ids of all documents that the bank has forgotten: this one, and those that it was merged with.

        Raises:
            BankError: for an id that neither holds.
        """
        with self._lock:
            self._finish()
            return self._synced.delete([document_id]).forgotten

    def reconcile(self, *, allow_emptying: bool = False) -> Reconciliation:
        """Lets the bank follow the retriever after a crash between the two; see `mac_rag.sync.SyncedBank.reconcile`.

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
            self._finish()
            return self._synced.reconcile(self._remember, group=_ADAPT_GROUP, allow_emptying=allow_emptying)

    def answer(
        self,
        questions: Sequence[str | FittedPrompt],
        *,
        contexts: Sequence[Sequence[str]] | None = None,
        use_memory: bool = True,
        use_retriever: bool = True,
        k: int | None = None,
        memory_weight: float | None = None,
        allowed: Container[str] | None = None,
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        batch_size: int = 32,
        progress: bool = False,
    ) -> list[Answer]:
        """Answers questions: `LM(d + x; phi*)`, phi* from the bank and d from the retriever.

        Args:
            questions: texts; or prompts that `MACModel.fit_to_window` has made, for which nothing is retrieved.
            contexts: documents for each question, used instead of the retriever's.
            use_memory: False to answer without the bank.
            use_retriever: False to answer without the retriever.
            k: how many documents the retriever finds; None for the engine's number.
            memory_weight: lambda behind documents; None for the engine's.
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
            retrieved = self._contexts(questions, contexts, use_retriever, k, allowed)
            prompts = [
                self.model.fit_to_window(question, texts, overflow=overflow, max_new_tokens=max_new_tokens)
                for question, (texts, _) in zip(questions, retrieved, strict=True)
            ]
            lengths = [len(prompt.question) + sum(map(len, prompt.contexts)) for prompt in prompts]
            order = sorted(range(len(prompts)), key=lengths.__getitem__)
            answers: dict[int, Answer] = {}
            with progress_bar("answer", len(prompts), disable=not progress) as bar:
                for first in range(0, len(order), batch_size):
                    places = order[first : first + batch_size]
                    batch = [prompts[i] for i in places]
                    memory = self._aggregated(batch, allowed) if use_memory else None
                    texts = self.model.generate(
                        batch,
                        modulation=None if memory is None else memory.phi,
                        max_new_tokens=max_new_tokens,
                        num_beams=num_beams,
                        memory_weight=self.memory_weight if memory_weight is None else memory_weight,
                    )
                    discarded = [0.0] * len(batch) if memory is None else memory.discarded.tolist()
                    for i, prompt, text, share in zip(places, batch, texts, discarded, strict=True):
                        answers[i] = Answer(text, prompt.contexts, retrieved[i][1], prompt.truncated, share)
                    bar.advance(len(batch))
            return [answers[i] for i in range(len(prompts))]

    def stream(
        self,
        question: str | FittedPrompt,
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
            one = None if contexts is None else [contexts]
            (texts, _) = self._contexts([question], one, use_retriever, None, allowed)[0]
            prompt = self.model.fit_to_window(question, texts, max_new_tokens=max_new_tokens)
            phi = self._aggregated([prompt], allowed).phi if use_memory else None
        pieces = self.model.stream(
            prompt, modulation=phi, max_new_tokens=max_new_tokens, memory_weight=self.memory_weight
        )

        def locked() -> Iterator[str]:
            while True:
                with self._lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece

        return locked()

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
            ConfigError: for an `attention` that does not tell single documents apart.
        """
        with self._lock:
            return self._current().document_mass(questions, allowed)

    def _aggregated(self, prompts: Sequence[FittedPrompt], allowed: Container[str] | None) -> Aggregated:
        questions, ids = [prompt.question for prompt in prompts], [prompt.question_ids for prompt in prompts]
        return self._current().aggregate(questions, allowed, ids=ids)

    def _current(self) -> BankReader:
        """The reader of the bank that is set now."""
        self.bank.check_model(self.model.fingerprint)
        if self._reader.bank is not self.bank:
            self._reader = BankReader(self.model, self.bank, self.attention)
        return self._reader

    def _contexts(
        self,
        questions: Sequence[str | FittedPrompt],
        contexts: Sequence[Sequence[str]] | None,
        use_retriever: bool,
        k: int | None,
        allowed: Container[str] | None,
    ) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The documents in front of each question, and the ids of those that the retriever found."""
        if contexts is not None:
            return [(tuple(texts), ()) for texts in contexts]
        texts = [question for question in questions if isinstance(question, str)]
        if self.retriever is None or not use_retriever or not texts:
            return [((), ())] * len(questions)
        hits = iter(self.retriever.retrieve(texts, self.k if k is None else k, allowed=allowed))
        rows = [next(hits) if isinstance(question, str) else [] for question in questions]
        return [(tuple(hit.text for hit in row), tuple(hit.document_id for hit in row)) for row in rows]

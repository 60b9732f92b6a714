"""The engine: the one place where a model, its memory bank and a retriever meet.

The LlamaIndex components, the evaluations and the command line all use it. Threads may share it. Threads that ask take
turns, and questions that wait at the same time are answered in one batch. Threads that change the bank take turns among
themselves; meanwhile, questions are answered from the bank's last commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from torch import Tensor

from mac_rag.adapting import GROUP, DocumentWriter, Encode
from mac_rag.asking import (
    Call,
    ConsistentRetrieval,
    Settings,
    Steps,
    aggregate_prompts,
    answer_calls,
    answer_together,
    evidence_from,
    group_of,
    written,
)
from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.bm25 import BankBM25Retriever
from mac_rag.bank.interface import Bank, BankContents, SharedBank
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.bank.reader import reader_of
from mac_rag.batching_queue import Batch, BatchingQueue, isolating_errors
from mac_rag.config import AttentionConfig, BoundConfig
from mac_rag.data.characters import check_text
from mac_rag.data.dates import AsOf, moment_of_question
from mac_rag.data.types import AdaptReport, Answer, Decoded, Document, Source, Token
from mac_rag.errors import ConfigError, MACError
from mac_rag.lm.base_lm import Pieces
from mac_rag.lm.continuous_batch import ContinuousBatch
from mac_rag.lm.decoding import GREEDY, Sampling
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel, OwnKVModel, Phi
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.shipped_models import DEFAULT_MODEL
from mac_rag.sources import find_sources
from mac_rag.sync import Reconciliation, SyncedBank

if TYPE_CHECKING:
    from mac_rag.retrieval.base import Hit, Retriever

__all__ = ["AdaptReport", "Answer", "MACEngine"]

# Most questions, over all threads, whose attention is computed in one batch.
_ATTENTION_BATCH = 32
# One queue for all engines of a model: a question's modulation is attached to the LM while it is answered.
_queues: WeakKeyDictionary[MACModel, BatchingQueue] = WeakKeyDictionary()
_queues_lock = threading.Lock()
_log = logging.getLogger(__name__)


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
        retriever: retrieves documents to put in front of a question; None for memory alone. `adapt` and `forget`
            change retriever and bank, the retriever first. If a crash interrupts such a change, the next engine that
            opens both finishes it; `reconcile` repairs a bank that is out of date for any other reason.
        k: number of documents to retrieve.
        attention: how questions attend to the bank; None for exact attention to all of it.
        bound: largest size of the bank, and how to reduce it; None lets it grow.
        memory_weight: lambda, the weight of the LM with memory against the LM alone for questions with documents in
            front (see `mac_rag.lm.decoding`); None for the model's configured weight.
        workers: encodes what `adapt` writes, such as `mac_rag.distributed.adapting.RayWorkers`; None for the model in
            this process.

    Attributes:
        on_batch: callback for statistics, called with the number of questions before each batch is answered; None for
            no callback.

    Raises:
        ConfigError: for an `attention` that the model or the bank does not support; for a `bound` of a bank in shards.
        FingerprintError: if another model wrote the bank.
    """

    def __init__(
        self,
        model: MACModel | str = DEFAULT_MODEL,
        bank: Bank | None = None,
        retriever: Retriever | None = None,
        *,
        k: int = 5,
        attention: AttentionConfig | None = None,
        bound: BoundConfig | None = None,
        memory_weight: float | None = None,
        workers: Encode | None = None,
    ) -> None:
        loaded = MACModel.from_pretrained(model) if isinstance(model, str) else model
        bank = MemoryBank(loaded.fingerprint) if bank is None else bank
        self.model = loaded
        self.retriever = retriever
        self.k = k
        self.attention = attention or AttentionConfig()
        self._shared = SharedBank(bank)
        self.bank.check_model(loaded.fingerprint)
        self._queue = _queue_of(loaded)
        prior = self._prior_of_documents()
        self._seen = self._shared.latest()  # the snapshot that the current question sees
        self._reader = reader_of(loaded, self._seen, self.attention, prior)
        self._seen.release()
        self._last_known: KnownDocuments | None = None  # cache: from the last question without `allowed`
        if bound is not None and not isinstance(self.bank, MemoryBank):
            raise ConfigError("a bank in shards cannot be bounded, because it merges no entries; leave out `bound`")
        self.memory_weight = memory_weight
        self._writer = DocumentWriter(self.model, bound, None if prior is retriever else prior, workers)
        self.on_batch: Callable[[int], object] | None = None
        if self.bank.writable:
            with self._shared.changing():
                self._finish()

    def _prior_of_documents(self) -> BM25Retriever | None:
        """What scores all documents of the bank, for a model whose LM attends to rows: BM25, in the bank's file."""
        if not isinstance(self.model, OwnKVModel) or not isinstance(self.bank, MemoryBank):
            return None
        if isinstance(self.retriever, BM25Retriever) and self.retriever.is_in(self.bank):
            return self.retriever
        return BankBM25Retriever(self.bank)

    @property
    def bank(self) -> Bank:
        """The bank. Change it through the engine, or while no other thread uses the engine."""
        return self._shared.bank

    @bank.setter
    def bank(self, bank: Bank) -> None:
        self._shared.bank = bank

    @property
    def snapshot(self) -> BankContents:
        """The bank contents from which questions are answered.

        These are the present contents, or, while the engine changes the bank, those of its last commit. During a
        question, they are the snapshot that this question sees.
        """
        return self._seen if self._queue.is_mine else self._shared.latest()

    def refresh(self) -> bool:
        """Moves a bank that is open for reading to the writer's last commit, between two questions.

        Returns:
            True if there was a new commit.

        Raises:
            BankError: if the bank on disk is damaged; questions are then answered from the old commit.
            FingerprintError: if a bank of another model has replaced it.
        """
        with self._shared.changing():
            return self.bank.refresh()

    def adapt(
        self,
        documents: Iterable[Document],
        *,
        on_long: Literal["chunk", "error"] = "chunk",
        on_bad: Callable[[Document, MACError], object] | None = None,
        progress: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> AdaptReport:
        """Remembers documents (the online stage of algorithm 2): no gradient, no question, one pass.

        A document that the bank already holds with this id, text and metadata costs nothing. A document with a known id
        and a new text replaces the old one. If only its metadata changed, such as the date, it keeps its memory tokens,
        and nothing is computed. All documents are checked before the first is written, so bad input changes nothing. A
        bank on disk is committed every 30 seconds or 512 documents, whichever comes first; after an interruption, the
        same call resumes.

        A document counts from its `date` on, or from now on if it has none, and the documents that it `supersedes` stop
        counting then; see `Document`, and `as_of` of `answer`.

        Args:
            documents: documents with unique ids.
            on_long: for a document beyond the model's limit: split it into chunks, or raise an error.
            on_bad: called with each document that cannot be adapted, and its error. That document is left out, and all
                others are adapted. Of several documents with one id, the first is adapted. None to raise the error.
            progress: shows a progress bar.
            cancelled: returns True once the call need not be finished. It is asked after each batch of the LM, and what
                is not committed by then is taken back.

        Returns:
            The numbers of documents that were added, updated, left unchanged and written to the retriever, the number
            of rows of memory tokens, and the ids of documents that the bank forgot.

        Raises:
            DocumentError: for a document that is empty, no text, holds NUL or half of a surrogate pair, or, with
                `on_long="error"`, is longer than the limit. Names the document, and the place in its text.
            BankError: for an id that occurs twice in the call; for an id or metadata that cannot be kept exactly, or a
                date that cannot be read (see `mac_rag.data.provenance.Member.of`); for documents that supersede each
                other in a circle.
            CancelledError: if `cancelled` returned True.
            FingerprintError: if another model wrote the bank.
        """
        documents, seen = list(documents), self.snapshot
        bad: dict[int, MACError] = {}
        # Planning can take long, so it comes before the lock.
        plan = self._writer.plan(
            documents,
            seen,
            on_long,
            on_bad=None if on_bad is None else bad.__setitem__,
            progress=progress,
            cancelled=cancelled,
        )
        if on_bad is not None:
            for index in sorted(bad):
                on_bad(documents[index], bad[index])
        documents = [document for index, document in enumerate(documents) if index not in bad]
        with self._shared.changing():
            self.bank.check_model(self.model.fingerprint)
            self._finish()
            version = seen.version
            seen.release()  # so that the log need not keep what this call replaces
            if self.bank.version != version:  # the bank has changed since
                plan = self._writer.plan(documents, self.bank, on_long, plan)
            unfiled = self._synced.missing_from_retriever(documents, plan)
            pending = [document for document in documents if document.id in plan or document.id in unfiled]
            if pending:
                self.bank.commit()  # raises for a bank that is not writable, before anything else is done
            updated = sum(document_id in self.bank for document_id in plan)
            rows, forgotten = self._writer.write(
                self._synced, pending, plan, unfiled, progress=progress, cancelled=cancelled
            )
            unchanged = len(documents) - len(plan)
            return AdaptReport(len(plan) - updated, updated, unchanged, rows, forgotten, len(unfiled))

    def _remember(self, documents: Sequence[Document]) -> None:
        """Writes documents of the retriever to the bank."""
        self._writer.remember(self.bank, documents)

    @property
    def _synced(self) -> SyncedBank:
        return SyncedBank(self.bank, self.retriever, self._writer.index)

    def _finish(self) -> None:
        """Finishes a change that was interrupted between the retriever and the bank."""
        if self.retriever is not None and self.bank.intent and (count := self._synced.finish(self._remember)):
            _log.warning("finished an interrupted change of retriever and bank: %d documents", count)

    def forget(self, document_id: str) -> tuple[str, ...]:
        """Deletes a document from the retriever and the bank, whichever holds it.

        Returns:
            The ids of all documents that the bank has forgotten: this one, and those that it was merged with.

        Raises:
            BankError: for an id that neither holds.
        """
        with self._shared.changing():
            self._finish()
            return self._synced.delete([document_id]).from_bank

    def reconcile(self, *, allow_emptying: bool = False) -> Reconciliation:
        """Makes the bank agree with the retriever; see `mac_rag.sync.SyncedBank.reconcile`.

        A bank that is bounded by random pruning lacks documents on purpose. This call adapts to them again, and prunes
        others in their place.

        Args:
            allow_emptying: allows the deletion of all documents of the bank, if the retriever holds none of them.

        Raises:
            ConfigError: without a retriever, or with one that does not tell what it holds.
            BankError: if the retriever holds none of the bank's documents.
            DocumentError: for a document of the retriever that cannot be adapted.
            FingerprintError: if another model wrote the bank.
        """
        with self._shared.changing():
            self.bank.check_model(self.model.fingerprint)
            self._finish()
            return self._synced.reconcile(self._remember, group=GROUP, allow_emptying=allow_emptying)

    def compact(self) -> None:
        """Makes the bank's file as small as its contents; see `MemoryBank.compact`.

        Raises:
            BankError: if the file cannot be written, or another process reads an older commit; compact it again.
        """
        with self._shared.changing():
            self._finish()
            self.bank.compact()

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
        as_of: AsOf = None,
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        sources: int = 0,
        min_confidence: float | None = None,
        batch_size: int = 32,
        progress: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """Answers questions: `LM(d + x; phi*)`, phi* from the bank and d from the retriever.

        Calls of several threads that wait at the same time share batches if all their other arguments are equal. Calls
        that come while the LM writes answers join them, whatever their arguments.

        Args:
            questions: texts, or prompts made by `MACModel.fit_to_window`. Nothing is retrieved for a prompt.
            contexts: documents for each question, used instead of retrieved ones.
            use_memory: False to answer without the bank.
            use_retriever: False to answer without the retriever.
            k: number of documents to retrieve; None for the engine's number.
            memory_weight: lambda for questions with documents in front; None for the engine's.
            allowed: ids of the documents that may have any influence, through the retriever or the bank; None for all.
            as_of: the moment of the question, as `mac_rag.data.dates.read_date` takes it. Documents of a later date
                have no influence, nor have documents that another one has superseded by then: answers are those of a
                bank that never held them. Only documents of the bank are retrieved. None for all dates: a superseded
                document then has no influence, whatever the date of the one that supersedes it.
            overflow: what to do if documents and question exceed the LM's window: raise an error, or truncate the
                documents, the last one first. The question is never truncated.
            max_new_tokens: longest answer in tokens; None for the model's configured length.
            sampling: how tokens are chosen, and what ends an answer early.
            sources: most documents to name in `Answer.sources` as what the answer rests on. With memory, this takes
                another pass over the bank.
            min_confidence: computes `Answer.confidence`, and answers "I don't know" if it is below this value; 0 to
                compute it only. This takes another pass of the LM. None for neither.
            batch_size: most questions that are answered at a time.
            progress: shows a progress bar.
            cancelled: returns True once nobody waits for the answers any more. A call that is still in the queue is
                then dropped; one that is being answered is finished.

        Raises:
            CancelledError: if `cancelled` returned True before the call's turn came.
            BankError: with `use_memory`, for an empty bank, or if none of its documents is allowed or counts by then.
            ConfigError: for `sources` with an `attention` that does not tell single documents apart; for a
                `min_confidence` outside [0, 1], or if no calibration was fitted for the model and this kind of answer.
            DataError: for an `as_of` that is not a date.
            DocumentError: for an empty question, or a prompt that exceeds the window.
            FingerprintError: if another model wrote the bank.
        """
        settings = Settings(
            use_memory=use_memory,
            use_retriever=use_retriever,
            k=self.k if k is None else k,
            memory_weight=self.memory_weight if memory_weight is None else memory_weight,
            allowed=allowed,
            as_of=moment_of_question(as_of),
            overflow=overflow,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            sources=sources,
            min_confidence=min_confidence,
            batch_size=batch_size,
            progress=progress,
        )
        return self._submit(Call(questions, contexts, partial(self._answer, settings)), settings, cancelled)

    def _answer(self, settings: Settings, calls: Batch[Call], batch: ContinuousBatch) -> Steps:
        if self.on_batch is not None:
            self.on_batch(sum(len(call.questions) for call in calls))
        with self._question() as retriever:
            seen = self._seen
            settings = replace(settings, allowed=self._known(settings.allowed, settings.as_of))
            for is_due in answer_calls(calls, settings, self._reader, retriever, batch):
                yield is_due
                if self._seen is not seen:  # others have asked meanwhile
                    self._seen = seen
                    self._reader.follow(seen)

    def stream(
        self,
        question: str | FittedPrompt,
        *,
        contexts: Sequence[str] | None = None,
        use_memory: bool = True,
        use_retriever: bool = True,
        k: int | None = None,
        memory_weight: float | None = None,
        allowed: Container[str] | None = None,
        as_of: AsOf = None,
        overflow: Literal["error", "truncate"] = "error",
        max_new_tokens: int | None = None,
        sampling: Sampling = GREEDY,
    ) -> Iterator[Decoded]:
        """Yields the answer to one question piece by piece; the joined pieces equal what `answer` returns.

        Takes the arguments of `answer`. The LM writes it together with other answers, whether or not its pieces are
        taken, and stops once the iterator is closed.

        Raises:
            BankError, DataError, DocumentError, FingerprintError: as `answer`; at the call, not at the first piece.
        """
        settings = Settings(
            use_memory=use_memory,
            use_retriever=use_retriever,
            k=self.k if k is None else k,
            memory_weight=self.memory_weight if memory_weight is None else memory_weight,
            allowed=allowed,
            as_of=moment_of_question(as_of),
            overflow=overflow,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
        )
        lm, closed = self.model.base_lm, threading.Event()
        pieces = Pieces(lm.tokenizer, sampling)
        said: SimpleQueue[Decoded | BaseException | None] = SimpleQueue()

        def hear(tokens: Sequence[Token]) -> bool:
            if lm.keeps_letters:  # otherwise the whole answer tells which letters its document has
                for piece in pieces.after(tokens):
                    said.put(piece)
            return closed.is_set() or not threading.main_thread().is_alive()

        def ask() -> None:
            call = Call([question], None if contexts is None else [contexts], partial(self._answer, settings), hear)
            try:
                [answer] = self._submit(call, settings, closed.is_set)
                assert answer.decoded is not None
                for piece in pieces.last(Decoded(answer.text, answer.decoded.tokens, answer.decoded.ended)):
                    said.put(piece)
            except BaseException as error:
                said.put(error)
            said.put(None)

        def received() -> Decoded | None:
            piece = said.get()
            if isinstance(piece, BaseException):
                raise piece
            return piece

        def told() -> Iterator[Decoded]:
            try:
                piece = received()
                yield Decoded("")  # until here within the call, which raises what goes wrong
                while piece is not None:
                    yield piece
                    piece = received()
            finally:
                closed.set()

        if self._queue.is_mine:  # no other thread could have a turn
            ask()
        else:
            threading.Thread(target=copy_context().run, args=(ask,), name="stream").start()
        stream = told()
        next(stream)
        return stream

    def _submit(self, call: Call, settings: Settings, cancelled: Callable[[], bool] | None) -> list[Answer]:
        return self._queue.submit(
            answer_together,
            call,
            group=(id(self), settings.group),
            size=len(call.questions),
            limit=settings.batch_size,
            joins=answer_together,
            cancelled=cancelled,
        )

    def wait_for_crowds(self, seconds: float) -> None:
        """Lets a batch wait for further questions as long as each comes within so many seconds of the one before.

        This holds for all engines of the model, and only while several questions come together: a question that comes
        alone is answered at once.
        """
        self._queue.patience = seconds

    def turn(self) -> AbstractContextManager[None]:
        """A turn of its own in the model's queue, for work beside the engine that must not slow down its questions."""
        return self._queue.turn()

    @property
    def is_shared(self) -> bool:
        """True if the model's queue also serves others; see `BatchingQueue.is_shared`."""
        return self._queue.is_shared

    @property
    def recent_questions(self) -> tuple[int, int]:
        """Hits and misses of the cache that holds phi* of recent questions."""
        return self._reader.recent_questions

    def retrieve(
        self,
        questions: Sequence[str],
        *,
        k: int | None = None,
        allowed: Container[str] | None = None,
        as_of: AsOf = None,
    ) -> list[list[Hit]]:
        """The documents that `answer` puts in front of each question, the best first; none without a retriever.

        Takes the arguments of `answer`.

        Raises:
            DataError: for an `as_of` that is not a date.
            DocumentError: for an empty question.
            FingerprintError: if another model wrote the bank.
        """
        moment = moment_of_question(as_of)
        for question in questions:
            check_text(question)
        with self._queue.turn(soon=True), self._question() as found:
            if found is None:
                return [[] for _ in questions]
            return found.retrieve(questions, self.k if k is None else k, allowed=self._known(allowed, moment))

    def fit(
        self,
        hits: Sequence[Hit],
        write: Callable[[Sequence[str]], FittedPrompt],
        *,
        use_memory: bool = True,
        allowed: Container[str] | None = None,
        as_of: AsOf = None,
    ) -> FittedPrompt:
        """A prompt with documents for `answer`; those that the model reads from the bank do not stand in it.

        Args:
            hits: the documents, the best first; the id of one that is only known by its text is empty. Such a text may
                be several documents with blank lines between them.
            write: makes the prompt from the texts that stand in it, by `MACModel.fit_to_window` or `fit_conversation`.
            use_memory, allowed, as_of: as `answer` takes them.

        Raises:
            DataError: for an `as_of` that is not a date.
            FingerprintError: if another model wrote the bank.
            MACError: as `write`.
        """
        if not (hits and use_memory and isinstance(self.model, OwnKVModel)):  # others read all documents in the prompt
            return written(write, [], hits)
        moment = moment_of_question(as_of)
        with self._queue.turn(soon=True), self._question():
            read, others = self._reader.apart(hits, self._known(allowed, moment))
        return written(write, read, others)

    def aggregate(self, questions: Sequence[str], allowed: Container[str] | None = None, *, as_of: AsOf = None) -> Phi:
        """phi* of each question (equation 1), `[B, T, D]` or the rows that it sees; arguments as `answer` takes them.

        Raises:
            BankError: for an empty bank, or if none of its documents is allowed.
            DataError: for an `as_of` that is not a date.
            DocumentError: for an empty question, or one that exceeds the limit.
            FingerprintError: if another model wrote the bank.
        """
        moment = moment_of_question(as_of)
        with self._queue.turn(soon=True), self._question():
            return self._reader.aggregate(questions, self._known(allowed, moment)).phi

    def document_attention(
        self, questions: Sequence[str], allowed: Container[str] | None = None, *, as_of: AsOf = None
    ) -> tuple[list[str], Tensor]:
        """Each question's attention to each document that may have influence, as shares of 1.

        Merged documents share the attention to their common entry equally. `allowed` and `as_of` are as `answer` takes
        them.

        Returns:
            The document ids, and the attention mass `[B, documents]`; each row sums to 1.

        Raises:
            BankError: for an empty bank, or if none of its documents is allowed.
            ConfigError: for an `attention` that does not tell single documents apart.
            DataError: for an `as_of` that is not a date.
        """
        moment = moment_of_question(as_of)
        return self._queue.submit(
            lambda calls: isolating_errors(lambda some: self._attention(some, allowed, moment), calls),
            questions,
            group=(id(self), "attention", group_of(allowed), moment),
            size=len(questions),
            limit=_ATTENTION_BATCH,
        )

    def sources(
        self,
        question: str | FittedPrompt,
        answer: str | None = None,
        *,
        most: int = 5,
        texts: Mapping[str, str] | None = None,
        use_memory: bool = True,
        allowed: Container[str] | None = None,
        as_of: AsOf = None,
    ) -> tuple[Source, ...]:
        """The documents that an answer rests on, the first one most; see `mac_rag.sources`.

        `MACEngine.answer` does this for many questions at once. Use this method for a streamed answer.

        Args:
            question: the question, or the prompt that asks it.
            answer: the answer; None if it is not known, and then no sentence is named.
            most: most sources to return.
            texts: document id -> text as the LM read it in front of the question, the best first.
            use_memory: False for an answer without the bank.
            allowed, as_of: as `answer` takes them.

        Raises:
            BankError: with `use_memory`, for an empty bank, or if none of its documents is allowed.
            ConfigError: for an `attention` that does not tell single documents apart.
            DataError: for an `as_of` that is not a date.
        """
        moment = moment_of_question(as_of)
        prompt = question if isinstance(question, FittedPrompt) else FittedPrompt(question, (), ())
        with self._queue.turn(soon=True), self._question():
            known, masses = self._known(allowed, moment), None
            if use_memory:
                mass = aggregate_prompts(self._reader, [prompt], known, mass=True).mass
                assert mass is not None
                masses = self._reader.by_document(mass, known)
            return find_sources([prompt.question], [answer], [texts or {}], masses, self._reader, most)[0]

    def evidence(
        self,
        prompts: Sequence[FittedPrompt],
        answers: Sequence[str],
        *,
        use_memory: bool = True,
        allowed: Container[str] | None = None,
        as_of: AsOf = None,
    ) -> Tensor:
        """Evidence about answers, from which their confidence is computed: see `mac_rag.asking.evidence_of`.

        Args:
            prompts: B prompts, as `MACModel.fit_to_window` makes them.
            answers: their B answers.
            use_memory, allowed, as_of: as they were passed to `answer`.

        Returns:
            `[B, len(mac_rag.model.calibration.EVIDENCE)]`, on the CPU.

        Raises:
            BankError: with `use_memory`, for an empty bank, or if none of its documents is allowed.
            ConfigError: for the strategy sharded.
        """
        moment = moment_of_question(as_of)
        with self._queue.turn(soon=True), self._question():
            known = self._known(allowed, moment)
            phi = aggregate_prompts(self._reader, prompts, known).phi if use_memory else None
            return evidence_from(self._reader, prompts, answers, phi, known)

    def _attention(
        self, calls: Sequence[Sequence[str]], allowed: Container[str] | None, as_of: int | None
    ) -> list[tuple[list[str], Tensor]]:
        with self._question():
            allowed = self._known(allowed, as_of)
            ids, mass = self._reader.document_mass([question for questions in calls for question in questions], allowed)
        return [(list(ids), rows) for rows in mass.split([len(questions) for questions in calls])]

    def _known(self, allowed: Container[str] | None, as_of: int | None) -> Container[str] | None:
        """The documents that may influence the current question: those of `allowed` that count at `as_of`."""
        seen = self._seen
        if as_of is None and not seen.supersedes:
            return allowed
        if allowed is not None:
            return KnownDocuments(seen, as_of, allowed)
        last = self._last_known
        if last is None or last.as_of != as_of:
            last = self._last_known = KnownDocuments(seen, as_of)
        return last

    @contextmanager
    def _question(self) -> Iterator[ConsistentRetrieval | None]:
        """Holds the snapshot of the bank that a question sees. Yields the retriever as the question sees it."""
        changes = self._shared.changes
        seen = self._shared.latest().renewed(self._seen)
        if seen is not self._seen:  # bank and model meet
            seen.check_model(self.model.fingerprint)
            self._seen = seen
        if self._last_known is not None and self._last_known.bank is not self._seen:
            self._last_known = None
        try:
            self._reader.follow(self._seen)
            retriever = self.retriever
            yield None if retriever is None else ConsistentRetrieval(retriever, self._shared, self._seen, changes)
        finally:
            seen.release()  # a bank's log grows as long as somebody reads an old commit


def _queue_of(model: MACModel) -> BatchingQueue:
    """The queue in which all engines of a model take turns."""
    with _queues_lock:
        queue = _queues.setdefault(model, BatchingQueue())
        if isinstance(model, OwnKVModel):
            model.turn = queue.turn
        return queue

"""What an engine reads of its bank for a question: phi*, attention, and the documents that an answer rests on."""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from mac_rag.asking import ConsistentRetrieval, Memory, Retrieval, group_of
from mac_rag.batching_queue import BatchingQueue, isolating_errors
from mac_rag.config import AttentionConfig
from mac_rag.data.characters import check_text
from mac_rag.data.dates import AsOf, moment_of_question
from mac_rag.data.types import Source
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.memory.interface import Bank, BankContents
from mac_rag.memory.known_documents import KnownDocuments
from mac_rag.memory.shared import SharedBank
from mac_rag.memory.views.base_reader import Aggregated
from mac_rag.memory.views.reader import reader_of
from mac_rag.model import MACModel
from mac_rag.sources import find_sources

if TYPE_CHECKING:
    from mac_rag.retrieval.base import Hit, Retriever

# Questions of several threads whose attention is computed together.
_ATTENTION_BATCH = 32
# One queue for all engines of a model: a question's modulation is attached to the LM while it is answered.
_queues: WeakKeyDictionary[MACModel, BatchingQueue] = WeakKeyDictionary()
_queues_lock = threading.Lock()


class BankQuestions:
    """The part of `mac_rag.engine.MACEngine` that reads the bank for questions. It documents the arguments.

    Args:
        model: the model.
        bank: a bank that the model wrote.
        retriever: the retriever, or None.
        k: documents that it puts in front of a question.
        attention: how questions attend to the bank.
    """

    def __init__(
        self, model: MACModel, bank: Bank, retriever: Retriever | None, k: int, attention: AttentionConfig
    ) -> None:
        self.model = model
        self.retriever = retriever
        self.k = k
        self.attention = attention
        self._shared = SharedBank(bank)
        self.bank.check_model(model.fingerprint)
        self._queue = _queue_of(model)
        self._seen = self._shared.latest()  # by the question whose turn it is
        self._reader = reader_of(model, self._seen, attention)
        self._last_known: KnownDocuments | None = None  # of the last question without `allowed`

    @property
    def bank(self) -> Bank:
        """The bank. Change it through the engine, or while no other thread uses the engine."""
        return self._shared.bank

    @bank.setter
    def bank(self, bank: Bank) -> None:
        self._shared.bank = bank

    @property
    def snapshot(self) -> BankContents:
        """The contents of the bank that questions are answered from.

        These are its contents now, or, while the engine changes it, those of the last commit. During a question it is
        what that question sees.
        """
        return self._seen if self._queue.is_mine else self._shared.latest()

    def wait_for_crowds(self, seconds: float) -> None:
        """Lets a batch wait for further questions as long as they come within so many seconds of each other.

        It holds for all engines of the model, and only while several questions come together: one that comes alone is
        answered at once.
        """
        self._queue.patience = seconds

    @property
    def recent_questions(self) -> tuple[int, int]:
        """How often phi* of a question was found among those of recent questions, and how often it was not."""
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

        Arguments are as `answer` takes them.

        Raises:
            DataError: for an `as_of` that is no date.
            DocumentError: for an empty question.
            FingerprintError: when another model wrote the bank.
        """
        moment = moment_of_question(as_of)
        for question in questions:
            check_text(question)
        with self._queue.turn():
            found = self._begin()
            if found is None:
                return [[] for _ in questions]
            return found.retrieve(questions, self.k if k is None else k, allowed=self._known(allowed, moment))

    def aggregate(
        self, questions: Sequence[str], allowed: Container[str] | None = None, *, as_of: AsOf = None
    ) -> Tensor:
        """phi* `[B, T, D]` of each question (equation 1); `allowed` and `as_of` as `answer` takes them.

        Raises:
            BankError: for an empty bank, or none of its documents allowed.
            DataError: for an `as_of` that is no date.
            DocumentError: for an empty question, or one beyond the limit.
            FingerprintError: when another model wrote the bank.
        """
        moment = moment_of_question(as_of)
        with self._queue.turn():
            self._begin()
            return self._reader.aggregate(questions, self._known(allowed, moment)).phi

    def document_attention(
        self, questions: Sequence[str], allowed: Container[str] | None = None, *, as_of: AsOf = None
    ) -> tuple[list[str], Tensor]:
        """The share of each question's attention that goes to each document that may have influence.

        Documents that were merged share the attention to their one entry equally. `allowed` and `as_of` are as `answer`
        takes them.

        Returns:
            The document ids, and the attention mass `[B, documents]`; each row sums to 1.

        Raises:
            BankError: for an empty bank, or none of its documents allowed.
            ConfigError: for an `attention` that does not tell single documents apart.
            DataError: for an `as_of` that is no date.
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
        question: str,
        answer: str | None = None,
        *,
        most: int = 5,
        texts: Mapping[str, str] | None = None,
        use_memory: bool = True,
        allowed: Container[str] | None = None,
        as_of: AsOf = None,
    ) -> tuple[Source, ...]:
        """The documents that an answer rests on, the first one most; see `mac_rag.sources`.

        `answer` of the engine does this for many questions at once. This is for answers that came piece by piece.

        Args:
            question: the question.
            answer: the answer; None where it is not known, and then no sentence is named.
            most: largest number of sources.
            texts: by id, the documents in front of the question as the LM read them, the best first.
            use_memory: False for an answer without the bank.
            allowed, as_of: as `answer` takes them.

        Raises:
            BankError: with `use_memory`, for an empty bank, or none of its documents allowed.
            ConfigError: for an `attention` that does not tell single documents apart.
            DataError: for an `as_of` that is no date.
        """
        moment = moment_of_question(as_of)
        with self._queue.turn():
            self._begin()
            masses = self._reader.document_mass([question], self._known(allowed, moment)) if use_memory else None
            return find_sources([question], [answer], [texts or {}], masses, self._seen, most)[0]

    def _attention(
        self, calls: Sequence[Sequence[str]], allowed: Container[str] | None, as_of: int | None
    ) -> list[tuple[list[str], Tensor]]:
        self._begin()
        allowed = self._known(allowed, as_of)
        ids, mass = self._reader.document_mass([question for questions in calls for question in questions], allowed)
        return [(list(ids), rows) for rows in mass.split([len(questions) for questions in calls])]

    def _aggregated(
        self, prompts: Sequence[FittedPrompt], allowed: Container[str] | None, mass: bool = False
    ) -> Aggregated:
        questions, ids = [prompt.question for prompt in prompts], [prompt.question_ids for prompt in prompts]
        return self._reader.aggregate(questions, allowed, ids=ids, mass=mass)

    def evidence(
        self,
        prompts: Sequence[FittedPrompt],
        answers: Sequence[str],
        *,
        use_memory: bool = True,
        allowed: Container[str] | None = None,
    ) -> Tensor:
        """What is known of answers, from which confidence is computed: see `mac_rag.asking.evidence_of`.

        Args:
            prompts: B prompts, as `MACModel.fit_to_window` makes them.
            answers: the answers to them.
            use_memory, allowed: as `answer` had them.

        Returns:
            `[B, len(mac_rag.model.calibration.EVIDENCE)]`, on the CPU.

        Raises:
            BankError: with `use_memory`, for an empty bank, or none of its documents allowed.
            ConfigError: for the strategy sharded.
        """
        with self._queue.turn():
            self._begin()
            known, memory = self._known(allowed, None), self._memory
            phi = memory.aggregate(prompts, known, False).phi if use_memory else None
            return memory.evidence(self.model, prompts, answers, phi, known)

    @property
    def _memory(self) -> Memory:
        """The bank as the question whose turn it is sees it."""
        reader = self._reader
        return Memory(self._seen, self._aggregated, reader.prior_evidence, reader.by_document)

    def _known(self, allowed: Container[str] | None, as_of: int | None) -> Container[str] | None:
        """The documents that may influence the question whose turn it is: those of `allowed` that count by then."""
        seen = self._seen
        if as_of is None and not seen.supersedes:
            return allowed
        if allowed is not None:
            return KnownDocuments(seen, as_of, allowed)
        last = self._last_known
        if last is None or last.as_of != as_of:
            last = self._last_known = KnownDocuments(seen, as_of)
        return last

    def _begin(self) -> Retrieval | None:
        """Begins a question: chooses the snapshot that it sees, and returns the retriever as it sees it."""
        changes = self._shared.changes
        self._seen = self._shared.latest()
        self._seen.check_model(self.model.fingerprint)
        if self._last_known is not None and self._last_known.bank is not self._seen:
            self._last_known = None
        self._reader.follow(self._seen)
        if self.retriever is None:
            return None
        return ConsistentRetrieval(self.retriever, self._shared, self._seen, changes)


def _queue_of(model: MACModel) -> BatchingQueue:
    """The queue in which all engines of a model take turns."""
    with _queues_lock:
        return _queues.setdefault(model, BatchingQueue())

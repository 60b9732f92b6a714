"""The engine: the one place where a model, its memory bank and a retriever meet.

LlamaIndex, the evaluations and the command line are thin faces over it. One lock makes it safe to use from several
threads; the bank's keys and values are projected once per version of the bank, not per question.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.errors import BankError, DocumentError
from mac_rag.memory.bank import MemoryBank, content_hash
from mac_rag.model import MACModel
from mac_rag.progress import progress_bar

if TYPE_CHECKING:
    from typing import Literal

    from mac_rag.nn.aggregation import BankProjection
    from mac_rag.retrieval.base import Retriever

# Documents encoded and added to the bank at a time: enough to fill length-sorted batches, few enough to stop early.
_ADAPT_GROUP = 512
# Attention logits of one block that are in memory at once; decides how many questions go together.
_LOGITS = 64_000_000


@dataclass(frozen=True)
class AdaptReport:
    """What a call of `adapt` did, counted in documents; `rows` counts the rows of memory tokens written."""

    added: int
    updated: int
    unchanged: int
    rows: int


@dataclass(frozen=True)
class Answer:
    """An answer and what it was given from.

    Attributes:
        text: the answer.
        contexts: the documents that stood in front of the question, as they were used.
        document_ids: ids of the documents that the retriever found, best first.
        truncated: whether documents were shortened to fit the LM's window.
    """

    text: str
    contexts: tuple[str, ...]
    document_ids: tuple[str, ...]
    truncated: bool


class MACEngine:
    """Adapts to documents and answers questions.

    Args:
        model: a model, or the name or path of one.
        bank: a bank that the model wrote; None for an empty one.
        retriever: finds documents to put in front of a question; None for memory alone. It is kept in step with the
            bank by `adapt` and `forget`.
        k: how many documents the retriever finds.

    Raises:
        FingerprintError: when another model wrote the bank.
    """

    def __init__(
        self,
        model: MACModel | str = "mac-tiny",
        bank: MemoryBank | None = None,
        retriever: Retriever | None = None,
        *,
        k: int = 5,
    ) -> None:
        self.model = MACModel.from_pretrained(model) if isinstance(model, str) else model
        self.bank = MemoryBank.for_model(self.model) if bank is None else bank
        self.bank.check_model(self.model.fingerprint)
        self.retriever = retriever
        self.k = k
        self._lock = threading.RLock()
        self._projection: tuple[tuple[MemoryBank, int], BankProjection] | None = None

    def adapt(
        self,
        documents: Iterable[Document],
        *,
        on_long: Literal["chunk", "error"] = "chunk",
        progress: bool = False,
    ) -> AdaptReport:
        """Remembers documents (the online stage of algorithm 2): no gradient, no question, one pass.

        A document whose id and text the bank already holds costs nothing; one with a known id and a new text replaces
        the old. All documents are checked before the first is written, so bad input loses nothing.

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
            fresh, seen = [], set()
            unchanged = 0
            for document in documents:
                if document.id in seen:
                    raise BankError(f"document id {document.id!r} occurs twice; ids must be unique")
                seen.add(document.id)
                chunks = self._chunks(document, on_long)
                if document.id in self.bank and self.bank[document.id].content_hash == content_hash(document.text):
                    unchanged += 1
                else:
                    fresh.append((document, chunks))
            updated = rows = 0
            with progress_bar("adapt", len(fresh), disable=not progress) as bar:
                for first in range(0, len(fresh), _ADAPT_GROUP):
                    group = fresh[first : first + _ADAPT_GROUP]
                    phi = self.model.amortize([chunk for _, chunks in group for chunk in chunks])
                    updated += sum(document.id in self.bank for document, _ in group)
                    self.bank.put([document for document, _ in group], phi, [len(chunks) for _, chunks in group])
                    rows += len(phi)
                    bar.advance(len(group))
            if self.retriever is not None:
                for document, _ in fresh:
                    if document.id in self.retriever:
                        self.retriever.delete(document.id)
                self.retriever.add([document for document, _ in fresh])
            return AdaptReport(len(fresh) - updated, updated, unchanged, rows)

    def _chunks(self, document: Document, on_long: str) -> list[str]:
        try:
            chunks = self.model.amortization.split(document.text)
            if len(chunks) > 1 and on_long == "error":
                self.model.amortization.ids(document.text)
        except DocumentError as error:
            raise DocumentError(f"document {document.id!r}: {error}") from None
        return chunks

    def forget(self, document_id: str) -> None:
        """Removes a document from the bank and the retriever.

        Raises:
            BankError: for an unknown id.
        """
        with self._lock:
            self.bank.delete(document_id)
            if self.retriever is not None and document_id in self.retriever:
                self.retriever.delete(document_id)

    def answer(
        self,
        questions: Sequence[str],
        *,
        contexts: Sequence[Sequence[str]] | None = None,
        use_memory: bool = True,
        use_retriever: bool = True,
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
            overflow: when documents and question are beyond the LM's window: refuse, or shorten the documents, never
                the question.
            max_new_tokens: None for the model's configured length.
            num_beams: 1 is greedy.
            batch_size: questions of one generation.
            progress: shows a progress bar.

        Raises:
            BankError: for an empty bank where memory is wanted.
            DocumentError: for an empty question, or a prompt beyond the window.
            FingerprintError: when another model wrote the bank.
        """
        with self._lock:
            self.bank.check_model(self.model.fingerprint)
            found = self._contexts(questions, contexts, use_retriever)
            fitted = [
                self._fit(question, texts, overflow, max_new_tokens)
                for question, (texts, _) in zip(questions, found, strict=True)
            ]
            lengths = [len(question) + sum(map(len, texts)) for question, (texts, _) in zip(questions, fitted)]
            order = sorted(range(len(questions)), key=lengths.__getitem__)
            answers: list[Answer | None] = [None] * len(questions)
            with progress_bar("answer", len(questions), disable=not progress) as bar:
                for first in range(0, len(order), batch_size):
                    chosen = order[first : first + batch_size]
                    asked = [questions[i] for i in chosen]
                    texts = self.model.generate(
                        asked,
                        [fitted[i][0] for i in chosen],
                        modulation=self._aggregate(asked) if use_memory else None,
                        max_new_tokens=max_new_tokens,
                        num_beams=num_beams,
                    )
                    for i, text in zip(chosen, texts, strict=True):
                        answers[i] = Answer(text, fitted[i][0], found[i][1], fitted[i][1])
                    bar.advance(len(chosen))
            return [answer for answer in answers if answer is not None]

    def stream(
        self,
        question: str,
        *,
        contexts: Sequence[str] | None = None,
        use_memory: bool = True,
        use_retriever: bool = True,
        max_new_tokens: int | None = None,
    ) -> Iterator[str]:
        """Yields the answer to one question piece by piece; the pieces joined are what `answer` returns.

        Raises:
            BankError, DocumentError, FingerprintError: as `answer`, at the call and not at the first piece.
        """
        with self._lock:
            self.bank.check_model(self.model.fingerprint)
            (found, _) = self._contexts([question], None if contexts is None else [contexts], use_retriever)[0]
            fitted, _ = self._fit(question, found, "error", max_new_tokens)
            phi = self._aggregate([question]) if use_memory else None
        return self._pieces(question, fitted, phi, max_new_tokens)

    def _pieces(
        self, question: str, contexts: Sequence[str], phi: Tensor | None, max_new_tokens: int | None
    ) -> Iterator[str]:
        pieces = self.model.stream(question, contexts, modulation=phi, max_new_tokens=max_new_tokens)
        while True:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def document_attention(self, questions: Sequence[str]) -> tuple[list[str], Tensor]:
        """How much of each question's attention goes to each document of the bank.

        Returns:
            The document ids, and the attention mass `[B, documents]`; each row sums to 1.

        Raises:
            BankError: for an empty bank.
        """
        with self._lock:
            bank = self._projected()
            rows = [self.model.attention(part, bank) for part in self._groups(questions, bank)]
            ids = self.bank.document_ids
            place = {document_id: index for index, document_id in enumerate(ids)}
            index = torch.tensor([place[members[0]] for members in self.bank.row_members])
            mass = torch.cat(rows).cpu()
            return ids, mass.new_zeros(len(questions), len(ids)).index_add_(1, index, mass)

    def _aggregate(self, questions: Sequence[str]) -> Tensor:
        bank = self._projected()
        return torch.cat([self.model.aggregate(part, bank) for part in self._groups(questions, bank)])

    def _groups(self, questions: Sequence[str], bank: BankProjection) -> list[Sequence[str]]:
        """Questions in groups whose attention logits fit into memory."""
        sizes = self.model.config
        size = max(1, _LOGITS // (sizes.aggregation.heads * sizes.tokens**2 * bank.documents))
        return [questions[first : first + size] for first in range(0, len(questions), size)]

    def _projected(self) -> BankProjection:
        self.bank.check_model(self.model.fingerprint)
        current = (self.bank, self.bank.version)
        if self._projection is None or self._projection[0] != current:
            self._projection = (current, self.model.project(self.bank.phi))
        return self._projection[1]

    def _contexts(
        self, questions: Sequence[str], contexts: Sequence[Sequence[str]] | None, use_retriever: bool
    ) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The documents in front of each question, and the ids of those that the retriever found."""
        if contexts is not None:
            return [(tuple(texts), ()) for texts in contexts]
        if self.retriever is None or not use_retriever:
            return [((), ())] * len(questions)
        hits = self.retriever.retrieve(questions, self.k)
        return [(tuple(hit.text for hit in row), tuple(hit.document_id for hit in row)) for row in hits]

    def _fit(
        self, question: str, contexts: Sequence[str], overflow: str, max_new_tokens: int | None
    ) -> tuple[tuple[str, ...], bool]:
        """The documents as they fit into the LM's window before the question, and whether they were shortened."""
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

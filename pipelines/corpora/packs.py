"""Packs of documents and questions as in use: what BM25 finds for a question, and what else can be asked about it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field, field_validator

from mac_rag.config import Config
from mac_rag.data.characters import shown_id
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import DataError
from mac_rag.lm.block_prompt import BlockPrompt
from mac_rag.retrieval import BM25Retriever
from pipelines.corpora.qa_data import mentions

_DEPTH = 12  # documents that are retrieved for a pack; those that are not in it are what others ask about in vain

_JOINED, _MOST_TOKENS = 0.25, 512  # of documents that are joined: their share, and their most tokens


class PackConfig(Config):
    """What a pack holds.

    Attributes:
        documents: numbers of documents; one is drawn for each pack.
        questions: most questions of a pack.
        absent: share of questions whose document is not in the pack; their target is the abstention.
    """

    documents: tuple[int, ...] = (1, 2, 3, 4, 5)
    questions: int = Field(12, ge=1)
    absent: float = Field(0.0, ge=0, le=1)

    @field_validator("documents")
    @classmethod
    def _at_least_one(cls, documents: tuple[int, ...]) -> tuple[int, ...]:
        if not documents or not 1 <= min(documents) <= max(documents) <= _DEPTH:
            raise ValueError(f"documents must hold numbers from 1 to {_DEPTH}, got {list(documents)}")
        return documents


class Pack(NamedTuple):
    """Documents, and questions that see all of them.

    Attributes:
        documents: the documents, in the order of their scores for the first question.
        questions: the questions.
        answers: the target of each.
        scores: `[questions][documents]`, BM25's.
    """

    documents: list[Document]
    questions: list[Question]
    answers: list[str]
    scores: list[list[float]]


class PackMaker:
    """Makes packs of a data set.

    Args:
        config: what they hold.
        data: documents, those of one title one after another, and questions.
        abstention: the target of a question whose document is absent.

    Raises:
        DataError: for a question without an answer; names it.
    """

    def __init__(self, config: PackConfig, data: QADataset, abstention: str) -> None:
        for question in data.questions:
            if not question.answers:
                raise DataError(
                    f"question {shown_id(question.id)} of {data.name}, {data.split} has no answer, and reading is "
                    "trained on answers; leave it out, or let pipelines.self_study write some"
                )
        self.data = data
        self.config, self._abstention = config, abstention
        self._documents = {document.id: document for document in data.documents}
        self._about = data.questions_by_document()
        self._retriever = BM25Retriever()
        self._retriever.add(data.documents)

    def make(self, question: Question, rng: random.Random) -> Pack:
        """A pack around a question: its best documents, and others that can be asked about them."""
        config = self.config
        count = rng.choice(config.documents)
        [hits] = self._retriever.retrieve([question.question], _DEPTH)
        found = [self._documents[hit.document_id] for hit in hits]
        if rng.random() < config.absent:
            documents = self._without(question, found)[:count]
            wanted = [question] if documents else []
        else:
            ranks = {document.id: rank for rank, document in enumerate(found, 1)}
            # More documents rather than the right one in the place of a better hit: as in use, its score is what it is.
            count = max(count, *(ranks.get(name, count) for name in needed(question)))
            documents = self._with(question, found[: min(count, max(config.documents))])
            wanted = [question]
        if not documents:  # nothing was found but what answers
            documents, wanted = self._with(question, []), [question]
        present = {document.id for document in documents}
        about = [q for document in documents for q in self._about[document.id] if q is not question]
        about = [q for q in about if needed(q) <= present]
        rng.shuffle(about)
        about.sort(key=lambda q: self._found_for(q, present))
        vain = [q for document in found for q in self._about[document.id] if not needed(q) <= present]
        vain = [q for q in vain if q is not question and not any(mentions(d.text, q.answers) for d in documents)]
        rng.shuffle(vain)
        for _ in range(config.questions - len(wanted)):
            source = vain if vain and rng.random() < config.absent else about
            if not source:
                break
            wanted.append(source.pop())
        rng.shuffle(wanted)
        answers = [q.answers[0] if needed(q) <= present else self._abstention for q in wanted]
        scores = self._retriever.scores([q.question for q in wanted], [document.id for document in documents])
        return Pack(documents, wanted, answers, scores)

    def _found_for(self, question: Question, present: set[str]) -> int:
        """How many of a pack's documents are also the best ones for this question.

        Other documents score far below the right one, unless BM25 is wrong about that: from such questions an LM
        would learn to trust the scores less than they deserve.
        """
        [hits] = self._retriever.retrieve([question.question], len(present))
        return sum(hit.document_id in present for hit in hits)

    def best(self, question: Question, count: int, *, with_needed: bool = False) -> tuple[list[Document], list[float]]:
        """The best documents for a question, the first ones if no word of it occurs in any, and their scores.

        `with_needed` puts those that it needs in the places of the last ones.
        """
        [hits] = self._retriever.retrieve([question.question], count)
        found = [self._documents[hit.document_id] for hit in hits] or list(self.data.documents[:count])
        documents = self._with(question, found) if with_needed else found
        [scores] = self._retriever.scores([question.question], [document.id for document in documents])
        return documents, scores

    def gold(self, question: Question) -> Document:
        """The document that answers a question."""
        return self._documents[question.gold]

    def _with(self, question: Question, found: list[Document]) -> list[Document]:
        """At least the documents that a question needs; those that were not found take the places of the last ones."""
        missing = needed(question) - {document.id for document in found}
        others = [document for document in found if document.id not in needed(question)]
        left_out = {document.id for document in others[max(0, len(others) - len(missing)) :]}
        kept = [document for document in found if document.id not in left_out]
        return [*kept, *(self._documents[name] for name in sorted(missing))]

    def _without(self, question: Question, found: Sequence[Document]) -> list[Document]:
        """Documents that do not answer a question; of several that it needs, the last is left out."""
        return [d for d in found if d.id != question.gold and not mentions(d.text, question.answers)]


def needed(question: Question) -> set[str]:
    """The ids of all documents that a question needs."""
    return {question.gold, *question.further_ids}


def joined_documents(
    data: QADataset, prompt: BlockPrompt, *, seed: int, share: float = _JOINED, most: int = _MOST_TOKENS
) -> QADataset:
    """A data set in which some neighbouring documents of one title are one document; its id is that of the first.

    Args:
        share: probability that a document is joined with the one before it.
        most: most tokens of joined documents.
    """
    rng = random.Random(f"join/{seed}")
    documents: list[Document] = []
    place: dict[str, str] = {}
    tokens = [len(ids) for ids in prompt.texts.batch([document.text for document in data.documents])]
    used = 0
    for document, length in zip(data.documents, tokens, strict=True):
        title = document.metadata.get("title")
        same = bool(documents) and title is not None and documents[-1].metadata.get("title") == title
        # One token more for the line break.
        if same and used + length < most and rng.random() < share:
            last = documents.pop()
            documents.append(dataclasses.replace(last, text=f"{last.text.strip()}\n{document.text.strip()}"))
            place[document.id] = last.id
            used += length + 1
        else:
            documents.append(document)
            place[document.id] = document.id
            used = length
    questions = [
        dataclasses.replace(q, document_id=place[q.gold], further_ids=tuple(place[name] for name in q.further_ids))
        for q in data.questions
    ]
    return dataclasses.replace(data, documents=tuple(documents), questions=tuple(questions))

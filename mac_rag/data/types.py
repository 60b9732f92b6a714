"""Documents, questions and data sets: the types that every data set is read into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from mac_rag.data.dates import date_in, superseded_in
from mac_rag.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Document:
    """One document `d` of the stream.

    Attributes:
        id: id of the document, unique within its data set; its key in the memory bank.
        text: text of the document.
        metadata: provenance such as `title` and `date`, stored with the memory tokens; must fit into JSON. Two keys
            have a meaning of their own: `date` and `supersedes`, see the properties.

    Examples:
        >>> bridge = Document("bridge", "Anna Berg opened the bridge.", {"date": "2004-05", "supersedes": "plan"})
        >>> bridge.date.isoformat(), bridge.supersedes
        ('2004-05-01T00:00:00+00:00', ('plan',))
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def date(self) -> datetime | None:
        """The moment from which the document counts, in UTC: `date` of its metadata, see `mac_rag.data.dates`.

        None without one: it then counts from the moment at which a bank adapts to it.

        Raises:
            DataError: for what is no date, or can be read in two ways.
        """
        return date_in(self.metadata)

    @property
    def supersedes(self) -> tuple[str, ...]:
        """Ids of the documents that stop counting when this one counts: `supersedes` of its metadata, one or a list.

        Raises:
            DataError: for anything but ids.
        """
        return superseded_in(self.metadata)


@dataclass(frozen=True, slots=True)
class Question:
    """One question `x` with its answers `y`, about one document.

    Attributes:
        id: id of the question, unique within its data set.
        question: text of the question.
        answers: all accepted answers; the first one is used in training. Empty where no answer is known: such
            questions can be trained on by distillation.
        document_id: id of the document that contains the answer; None if nobody knows which one does.
        as_of: the moment of the question, as `mac_rag.data.dates.read_date` takes it: what later documents say is no
            answer to it. None for a question about all of the stream.
        further_ids: ids of the documents that the answer needs beside `document_id`.

    Examples:
        >>> Question("q1", "Who opened the bridge?", ("Anna Berg", "Berg"), "bridge").answers[0]
        'Anna Berg'
    """

    id: str
    question: str
    answers: tuple[str, ...]
    document_id: str | None
    as_of: str | None = None
    further_ids: tuple[str, ...] = ()

    @property
    def gold(self) -> str:
        """The id of its document.

        Raises:
            DataError: for a question that names no document.
        """
        if self.document_id is None:
            raise DataError(
                f"question {self.id!r:.200} names no document, and this needs the document of each question; "
                "give the questions a document_id"
            )
        return self.document_id


@dataclass(frozen=True, slots=True)
class QADataset:
    """A stream of documents with questions about them, both in stream order.

    Attributes:
        name: name of the data set.
        split: name of the split.
        documents: all documents of the stream.
        questions: all questions about them.
        notes: what was left out in reading, in sentences for the user.

    Examples:
        >>> documents = (Document("bridge", "Anna Berg opened the bridge."), Document("river", "A ferry on the river."))
        >>> questions = (Question("q1", "Who opened the bridge?", ("Anna Berg",), "bridge"),)
        >>> by_document = QADataset("example", "test", documents, questions).questions_by_document()
        >>> {name: [question.id for question in about] for name, about in by_document.items()}
        {'bridge': ['q1'], 'river': []}
    """

    name: str
    split: str
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]
    notes: tuple[str, ...] = ()

    def questions_by_document(self) -> dict[str, list[Question]]:
        """The questions of each document by its id; an empty list for a document without questions.

        Raises:
            DataError: for a question that names no document.
        """
        grouped: dict[str, list[Question]] = {document.id: [] for document in self.documents}
        for question in self.questions:
            grouped[question.gold].append(question)
        return grouped


def shortest_first(answers: Iterable[str]) -> tuple[str, ...]:
    """The distinct answers that are not blank: the shortest first, then the others in their order."""
    distinct = list(dict.fromkeys(filter(None, map(str.strip, answers))))
    if distinct:
        shortest = min(distinct, key=len)
        distinct.remove(shortest)
        distinct.insert(0, shortest)
    return tuple(distinct)


def first_documents(dataset: QADataset, count: int) -> QADataset:
    """The first `count` documents of a stream, or all if there are fewer, with the questions that need no others.

    Raises:
        ConfigError: if documents would be left out, and a question names no document: it may be about one of these.
    """
    if count >= len(dataset.documents):
        return dataset
    if any(question.document_id is None for question in dataset.questions):
        raise ConfigError(
            f"the first {count:,} of {len(dataset.documents):,} documents are asked for, but the questions name no "
            "documents, and their answers may stand in the others; take all documents"
        )
    documents = dataset.documents[:count]
    ids = {document.id for document in documents}
    questions = tuple(
        question for question in dataset.questions if ids.issuperset((question.gold, *question.further_ids))
    )
    return replace(dataset, documents=documents, questions=questions)


@dataclass(frozen=True)
class AdaptReport:
    """What a call of `MACEngine.adapt` did.

    Attributes:
        added, updated, unchanged: numbers of documents.
        rows: rows of memory tokens that were written.
        forgotten: ids of documents that the bank dropped, to make room or because they had been merged with one that
            was updated.
        filed: number of documents that were written to the retriever.
    """

    added: int
    updated: int
    unchanged: int
    rows: int
    forgotten: tuple[str, ...] = ()
    filed: int = 0


@dataclass(frozen=True)
class Source:
    """A document that an answer rests on.

    Examples:
        >>> Source("press", text="It moved. Rainga Press employs 180 people.", span=(10, 43)).sentence
        'Rainga Press employs 180 people.'

    Attributes:
        document_id: id of the document.
        share: the share of the question's attention in memory that goes to it, from 0 to 1; None if memory was not
            asked, or does not hold the document.
        retrieved: True if the LM read the document in front of the question.
        date: the date of its metadata; None without one.
        metadata: its metadata, as the bank keeps them; empty for a document that the bank does not hold.
        text: what the LM read of it, or else the text that the bank keeps; None where there is neither.
        span: where in `text` the sentence stands that holds most of the answer's words, at least half of them; None
            where no sentence does.
    """

    document_id: str
    share: float | None = None
    retrieved: bool = False
    date: datetime | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    span: tuple[int, int] | None = None

    @property
    def sentence(self) -> str | None:
        """The sentence that the answer rests on; None where none is known."""
        return None if self.text is None or self.span is None else self.text[slice(*self.span)]


@dataclass(frozen=True)
class Answer:
    """An answer and what the LM read for it.

    Examples:
        >>> from mac_rag import MACEngine
        >>> from mac_rag.retrieval import BM25Retriever
        >>> engine = MACEngine("mac-tiny", retriever=BM25Retriever())
        >>> text = "Edgar Flara will join the board of Rainga Press. The company employs 180 people."
        >>> report = engine.adapt([Document("press", text)])
        >>> [answer] = engine.answer(["How many workers does Rainga Press have?"])
        >>> answer.text, answer.document_ids, answer.truncated
        ('180', ('press',), False)

    Attributes:
        text: the answer.
        contexts: the documents in front of the question, as the LM read them.
        document_ids: ids of the documents that the retriever found, the best first.
        truncated: True if documents were shortened or left out to fit the LM's window.
        discarded_prior: share of the document prior on documents that preselection left out; 0 without preselection.
        unread: share of the documents that had no influence because their shards were lost; 0 unless a bank in shards
            has `partial_answers`.
        sources: the documents that it rests on, the first one most; empty unless they were asked for.
        confidence: the probability that the LM's answer is right, as the model's calibration has it; None unless
            `min_confidence` was given.
        guess: the LM's answer where its confidence is below `min_confidence`, and `text` says "I don't know"; else
            None.
    """

    text: str
    contexts: tuple[str, ...]
    document_ids: tuple[str, ...]
    truncated: bool
    discarded_prior: float = 0.0
    unread: float = 0.0
    sources: tuple[Source, ...] = ()
    confidence: float | None = None
    guess: str | None = None

    @property
    def said(self) -> str:
        """What the LM said: the guess where there is one, or else the text."""
        return self.text if self.guess is None else self.guess

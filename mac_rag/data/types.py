"""Documents, questions and data sets: the types that every data set is read into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from mac_rag.data.dates import date_in, superseded_in, with_written_dates
from mac_rag.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Document:
    """One document `d` of the stream.

    Attributes:
        id: id of the document, unique within its data set; its key in the memory bank.
        text: text of the document.
        metadata: provenance such as `title` and `date`, stored with the memory tokens; JSON must be able to hold it.
            Dates and times of Python become texts in ISO 8601.
            Two keys have a special meaning: `date` and `supersedes`, see the properties.

    Examples:
        >>> bridge = Document("bridge", "Anna Berg opened the bridge.", {"date": "2004-05", "supersedes": "plan"})
        >>> bridge.date.isoformat(), bridge.supersedes
        ('2004-05-01T00:00:00+00:00', ('plan',))
    """

    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = with_written_dates(self.metadata)
        if kept is not self.metadata:
            object.__setattr__(self, "metadata", kept)

    @property
    def date(self) -> datetime | None:
        """The moment from which the document counts, in UTC: `date` of its metadata, see `mac_rag.data.dates`.

        None if there is none; the document then counts from the moment at which a bank adapts to it.

        Raises:
            DataError: if it is not a date, or can be read in two ways.
        """
        return date_in(self.metadata)

    @property
    def supersedes(self) -> tuple[str, ...]:
        """Ids of the documents that stop counting when this one counts: `supersedes` of its metadata, one or a list.

        Raises:
            DataError: if it is neither an id nor a list of ids.
        """
        return superseded_in(self.metadata)


@dataclass(frozen=True, slots=True)
class Question:
    """One question `x` with its answers `y`, about one document.

    Attributes:
        id: id of the question, unique within its data set.
        question: text of the question.
        answers: all accepted answers; the first one is used in training. Empty if no answer is known; distillation can
            train on such questions.
        document_id: id of the document that contains the answer; None if it is not known.
        as_of: the moment of the question, as `mac_rag.data.dates.read_date` takes it: later documents do not answer it.
            None for a question about the whole stream.
        further_ids: ids of further documents that the answer needs, besides `document_id`.

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
                f"question {self.id!r:.200} names no document, but the document of each question is needed here; "
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
        notes: sentences for the user about what was left out.

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
        """Document id -> its questions; an empty list for a document without questions.

        Raises:
            DataError: for a question that names no document.
        """
        grouped: dict[str, list[Question]] = {document.id: [] for document in self.documents}
        for question in self.questions:
            grouped[question.gold].append(question)
        return grouped


def shortest_first(answers: Iterable[str]) -> tuple[str, ...]:
    """The distinct answers that are not blank, the shortest first, then the others in their order."""
    distinct = list(dict.fromkeys(filter(None, map(str.strip, answers))))
    if distinct:
        shortest = min(distinct, key=len)
        distinct.remove(shortest)
        distinct.insert(0, shortest)
    return tuple(distinct)


def first_documents(dataset: QADataset, count: int) -> QADataset:
    """The first `count` documents of a stream, or all if there are fewer, with the questions that need no others.

    Raises:
        ConfigError: if documents would be left out, and a question names no document: it may be about any of them.
    """
    if count >= len(dataset.documents):
        return dataset
    if any(question.document_id is None for question in dataset.questions):
        raise ConfigError(
            f"only the first {count:,} of {len(dataset.documents):,} documents were requested, but the questions name "
            "no documents, and their answers may be in the others; take all documents"
        )
    documents = dataset.documents[:count]
    ids = {document.id for document in documents}
    questions = tuple(
        question for question in dataset.questions if ids.issuperset((question.gold, *question.further_ids))
    )
    return replace(dataset, documents=documents, questions=questions)


@dataclass(frozen=True)
class AdaptReport:
    """The result of a call of `MACEngine.adapt`.

    Attributes:
        added, updated, unchanged: numbers of documents.
        rows: number of rows of memory tokens that were written.
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
        share: its share of the question's attention to the memory, from 0 to 1; None if memory was not used, or does
            not hold the document.
        retrieved: True if the LM read the document in front of the question.
        date: the date of its metadata; None if there is none.
        metadata: its metadata, as the bank keeps them; empty for a document that the bank does not hold.
        text: its text as the LM read it, or else as the bank keeps it; None if there is neither.
        span: start and end in `text` of the sentence that holds the most words of the answer, at least half of them;
            None if there is no such sentence.
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
        """The sentence that the answer rests on; None if none is known."""
        return None if self.text is None or self.span is None else self.text[slice(*self.span)]


class Token(NamedTuple):
    """A token of an answer.

    Attributes:
        id: its id.
        log_probability: of the token under the LM with its memory, before temperature, bias and penalties; None unless
            `Sampling.log_probabilities` asked for it.
        alternatives: the most probable tokens in its place, each with its log-probability.
    """

    id: int
    log_probability: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class Decoded(str):
    """A text that an LM has written, or a piece of it.

    Attributes:
        tokens: its tokens, without the one that ends an answer.
        ended: True if an end token or a stop string ended the answer; only the last piece may say so.
    """

    tokens: tuple[Token, ...]
    ended: bool

    def __new__(cls, text: str, tokens: Iterable[Token] = (), ended: bool = False) -> Decoded:
        made = super().__new__(cls, text)
        made.tokens, made.ended = tuple(tokens), ended
        return made


@dataclass(frozen=True, slots=True)
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
        sources: the documents that it rests on, the most important one first; empty unless they were requested.
        confidence: the probability that the LM's answer is right, by the model's calibration; None unless
            `min_confidence` was given.
        guess: the LM's answer if its confidence is below `min_confidence`, so that `text` says "I don't know";
            otherwise None.
        decoded: the answer as the LM wrote it, with its tokens; None if no LM did.
        prompt_tokens: number of tokens of the prompt.
    """

    text: str
    contexts: tuple[str, ...]
    document_ids: tuple[str, ...]
    truncated: bool
    discarded_prior: float = 0.0
    sources: tuple[Source, ...] = ()
    confidence: float | None = None
    guess: str | None = None
    decoded: Decoded | None = field(default=None, repr=False, compare=False)
    prompt_tokens: int = field(default=0, repr=False, compare=False)

    @property
    def said(self) -> str:
        """The LM's own answer: the guess if there is one, otherwise the text."""
        return self.text if self.guess is None else self.guess

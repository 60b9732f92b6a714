"""Documents and questions from the rows of a user's own files: every field is checked, and errors name its place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from mac_rag.data.characters import check_text, shown_id
from mac_rag.data.dates import read_date
from mac_rag.data.protocol import shortest_first
from mac_rag.data.provenance import check_document
from mac_rag.data.records import Record
from mac_rag.data.types import Document, Question
from mac_rag.errors import BankError, DataError, DocumentError
from mac_rag.untrusted_files import ROW

_NO_ANSWER = "give a text or a list of texts; leave unanswerable questions out, or mark them by is_impossible: true"


class Contents:
    """Documents and questions as they are read.

    Args:
        unanswered: True to take questions without answers, too.

    Attributes:
        documents: by id, in the order of the rows.
        questions: by id, in the order of the rows.
        id_of_text: id of the first document with a text, by the sha256 of the text.
        unanswerable: number of questions that were left out, because SQuAD 2.0 marks them as impossible to answer.
    """

    def __init__(self, *, unanswered: bool = False) -> None:
        self._unanswered = unanswered
        self.documents: dict[str, Document] = {}
        self.questions: dict[str, Question] = {}
        self.unanswerable = 0
        self.id_of_text: dict[bytes, str] = {}

    def add_document(self, record: Record) -> None:
        """Adds a row of a file of documents: `id`, `text`, and metadata in all other keys.

        Raises:
            DataError: for a row that is no document, and an id that another document has.
        """
        document_id = _id(record, "id")
        if document_id is None:
            raise record.missing("id", "give each document a name")
        text = _text(record, "text", "every document has a text")
        named = ("id", "text", "contents")
        metadata = {key: record.values[key] for key in record.columns if key in record.values and key not in named}
        if document_id in self.documents:
            raise record.fault("id", f"{shown_id(document_id)} is the id of another document further up")
        self._put(record, Document(document_id, text, metadata))

    def add_row(self, record: Record, *, may_be_alone: bool = False) -> None:
        """Adds a question with the text of its document. Rows with the same text are about one document.

        Args:
            record: the row.
            may_be_alone: True for a file in SQuAD's layout, where a row without `question` is a document alone.

        Raises:
            DataError: for a field that is missing or wrong, and for ids that stand for something else further up.
        """
        text = _text(
            record, "document", "give the text that answers the question, or put documents.jsonl beside questions.jsonl"
        )
        metadata = _mapping(record, "metadata")
        metadata |= {name: record.values[name] for name in ("title", "date") if name in record.values}
        key = hashlib.sha256(text.encode()).digest()
        given = _id(record, "document_id")
        document_id = given or self.id_of_text.get(key) or f"doc-{key.hex()[:16]}"
        document = Document(document_id, text, metadata)
        known = self.documents.get(document_id)
        if known is None:
            self._put(record, document)
        elif known.text != text:
            raise record.fault("document_id", f"{shown_id(document_id)} is the id of another text further up")
        elif known.metadata != metadata:
            field = next(
                name for name in {**known.metadata, **metadata} if known.metadata.get(name) != metadata.get(name)
            )
            raise record.fault(
                field,
                f"document {shown_id(document_id)} has another one further up; give all rows of a document the same",
            )
        if "further_document_ids" in record.values:
            raise record.fault(
                "further_document_ids",
                "only questions apart from their documents name several; put the documents into documents.jsonl and "
                "the questions into questions.jsonl",
            )
        if "question" in record.columns or not may_be_alone:
            self._add_question(record, document_id)

    def add_question(self, record: Record) -> Question | None:
        """Adds a question whose documents have been added before, if it names any.

        `document_id` names the one with the answer, `further_document_ids` those that are needed beside it.

        Returns:
            The question; None if it is left out.

        Raises:
            DataError: for a field that is missing or wrong, for an id of another question, for an unknown document, and
                for a row that has the text of its document.
        """
        if "document" in record.values:
            raise record.fault(
                "document", "the documents stand in a file of their own; name one by document_id, or remove that file"
            )
        document_id = _id(record, "document_id")
        further = _ids(record, "further_document_ids")
        for field, names in (("document_id", [document_id]), ("further_document_ids", further)):
            for name in names:
                if name is not None and name not in self.documents:
                    raise record.fault(field, f"there is no document {shown_id(name)}")
        if further and document_id is None:
            raise record.missing("document_id", "name the document with the answer beside the further ones")
        if document_id in further or len(set(further)) < len(further):
            raise record.fault("further_document_ids", "name each document once, and not the one of document_id again")
        return self._add_question(record, document_id, further)

    def _put(self, record: Record, document: Document) -> None:
        try:
            check_document(document)
        except (DocumentError, BankError) as error:
            raise record.fault("metadata", str(error)) from None
        self.documents[document.id] = document
        self.id_of_text.setdefault(hashlib.sha256(document.text.encode()).digest(), document.id)

    def _add_question(self, record: Record, document_id: str | None, further: tuple[str, ...] = ()) -> Question | None:
        question = _text(record, "question", "every row has a question").strip()
        answers = () if self._unanswered and _has_none(record) else _answers(record)
        if answers is None:
            self.unanswerable += 1
            return None
        question_id = _id(record, "id") or record.name
        if question_id in self.questions:
            raise record.fault("id", f"{shown_id(question_id)} is the id of another question further up")
        added = Question(question_id, question, answers, document_id, _as_of(record), further)
        self.questions[question_id] = added
        return added


def _has_none(record: Record) -> bool:
    """True for a question without answers that is not marked as impossible to answer."""
    return record.values.get("answers") in (None, []) and record.values.get("is_impossible") is not True


def _answers(record: Record) -> tuple[str, ...] | None:
    """The accepted answers, the shortest first; None for a question that is marked as impossible to answer."""
    value = record.values.get("answers")
    if record.values.get("is_impossible") is True:
        return None
    if isinstance(value, Mapping):  # SQuAD on the Hub: a list of texts beside a list of their places
        value = value.get("text")
        if value == []:
            return None
    if value is None or value == []:
        raise record.missing("answers", _NO_ANSWER)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise record.fault("answers", f"it must be a text or a list of texts, got {texts!r:.80}")
    # SQuAD's files: each answer with its place.
    texts = [text["text"] if isinstance(text, Mapping) and "text" in text else text for text in texts]
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise record.fault("answers", f"answer {number} must be a text, got {text!r:.80}; write numbers in quotes")
        _check(record, "answers", text)
    return shortest_first(texts)


def _text(record: Record, field: str, remedy: str) -> str:
    if field not in record.values:
        raise record.missing(field, remedy)
    value = record.values[field]
    if not isinstance(value, str):
        raise record.fault(field, f"it must be a text, got {value!r:.80}")
    if len(value) > ROW:
        raise record.fault(field, f"it has more than {ROW:,} characters; divide it into several documents")
    _check(record, field, value)
    return value


def _as_of(record: Record) -> str | None:
    """The moment of a question, as it was written; None if it has none."""
    value = record.values.get("as_of")
    if value is None:
        return None
    try:
        read_date(value)
    except DataError as error:
        raise record.fault("as_of", str(error)) from None
    return str(value)


def _id(record: Record, field: str) -> str | None:
    """An id, a text or a whole number; None if there is none."""
    value = record.values.get(field)
    return None if value is None else _checked_id(record, field, value)


def _ids(record: Record, field: str) -> tuple[str, ...]:
    """A list of ids, or a single one; empty if there is none."""
    value = record.values.get(field)
    if value is None:
        return ()
    return tuple(_checked_id(record, field, each) for each in (value if isinstance(value, list) else [value]))


def _checked_id(record: Record, field: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise record.fault(field, f"it must be a text, got {value!r:.80}")
    _check(record, field, str(value))
    return str(value)


def _mapping(record: Record, field: str) -> dict[str, Any]:
    value = record.values.get(field, {})
    if not isinstance(value, Mapping):
        raise record.fault(field, f"it must be an object with names and values, got {value!r:.80}")
    return dict(value)


def _check(record: Record, field: str, text: str) -> None:
    try:
        check_text(text)
    except DocumentError as error:
        raise record.fault(field, str(error)) from None

"""A user's own documents and questions, from files of many kinds; their form is seen from the files.

`mac_rag.data.own_files` finds the files, `mac_rag.data.records` reads their rows, and `mac_rag.data.own_rows` checks
these. Here documents and questions are divided into splits.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mac_rag.data.characters import shown_id
from mac_rag.data.metrics import normalize
from mac_rag.data.own_files import Files, find_files
from mac_rag.data.own_rows import Contents
from mac_rag.data.records import read_records
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import ConfigError, DataError

SPLITS = ("train", "val", "test", "all")
FIELDS = (
    "id",
    "document",
    "question",
    "answers",
    "document_id",
    "further_document_ids",
    "as_of",
    "title",
    "date",
    "metadata",
    "is_impossible",
)

# Shares of the splits that are drawn: train the first 80 % of all hashes, val the next 10, test the last 10.
_VAL, _TEST = 0.8, 0.9

_APART = "apart"  # the split of questions whose documents are in different ones


def read_own(
    path: str | Path, split: str, columns: Mapping[str, str] | None = None, *, unanswered: bool = False
) -> QADataset:
    """Reads one split of a user's own data.

    Files named by splits are used as they are, and no text may be in two of them. Otherwise a hash of its title, or of
    its text if it has none, decides the split of a document and of its questions: 80 % train, 10 % val, 10 % test. So
    further rows move no document into another split, and documents of one title stay together.

    Questions of a corpus may name no documents. Then all splits have all documents.

    Args:
        path: a file, a folder, or `hub:OWNER/NAME` (see `mac_rag.data.typed_rows.read_hub`).
        split: one of `SPLITS`; `all` is all of them.
        columns: one of `FIELDS` -> the column or key that holds it, where they differ.
        unanswered: True to read questions without answers, too; they have none.

    Raises:
        ConfigError: for columns of unknown fields.
        DataError: for files that are missing or of no known form, and for a malformed row; names file, row and field.
    """
    unknown = [field for field in columns or {} if field not in FIELDS]
    if unknown:
        raise ConfigError(f"columns names the unknown field {unknown[0]!r}; choose among {', '.join(FIELDS)}")
    files = find_files(path)
    if split not in ("all", *files.splits) and "all" not in files.splits:
        raise DataError(
            f"{path} has the split {' and '.join(files.splits)} by the names of its files, and no {split}; add "
            f"{split}.jsonl and give the folder, or give one file of another name, which is then divided"
        )
    reader = _read_rows if files.corpus is None else _read_corpus
    read = reader(files, columns or {}, unanswered)
    documents = tuple(document for name, document in read.documents if split == "all" or name in (split, "all"))
    questions = tuple(question for name, question in read.questions if split in ("all", name))
    names = [name for name, _ in read.questions]
    apart = (
        f"{names.count(_APART):,} questions are left out, whose documents are in different splits; give train, val and "
        "test in files of their own, or one title to documents that belong together"
    )
    if not questions:
        sizes = ", ".join(f"{names.count(other)} are in {other}" for other in SPLITS[:-1])
        raise DataError(
            f"the split {split!r} of {path} holds no question: of all {len(names):,}, {sizes}. Give more documents, or "
            "files named train, val and test, or take the split 'all'; documents of one title are in one split"
            + (f". {apart}" if _APART in names else "")
        )
    for kind, ids in (("document", [each.id for each in documents]), ("question", [each.id for each in questions])):
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise DataError(f"{path}: {shown_id(twice)} is a {kind} of two splits; the split 'all' needs other ids")
    impossible = sum(count for name, count in read.unanswerable.items() if split == "all" or name in (split, "all"))
    notes = []
    if impossible:
        notes.append(f"{path}: {impossible:,} questions are left out, which are marked as impossible to answer")
    if _APART in names and split != "all":
        notes.append(f"{path}: {apart}")
    if "all" in files.splits and split != "all":
        notes.append(
            f"{path} is divided by documents: {split} has {len(questions):,} of {len(read.questions):,} questions; the "
            "split 'all' has all"
        )
    return QADataset("own", split, documents, questions, tuple(notes))


@dataclass(frozen=True)
class _Read:
    """All of a data set.

    Attributes:
        documents, questions: each with its split; documents of the split `all` are in every split, and questions whose
            documents are in different ones in none.
        unanswerable: number of questions left out in the file of each split, or in the one file, `all`.
    """

    documents: list[tuple[str, Document]]
    questions: list[tuple[str, Question]]
    unanswerable: Mapping[str, int]


def _read_rows(files: Files, columns: Mapping[str, str], unanswered: bool) -> _Read:
    """Reads files whose rows hold question and document."""
    contents: dict[str, Contents] = {}
    for name, file in files.splits.items():
        contents[name] = Contents(unanswered=unanswered)
        for record in read_records(file, columns):
            contents[name].add_row(record, may_be_alone=".json" in file.suffixes)
    unanswerable = {name: read.unanswerable for name, read in contents.items()}
    if "all" in contents:
        read = contents["all"]
        drawn = {document.id: drawn_split(document) for document in read.documents.values()}
        return _Read(
            [(drawn[document.id], document) for document in read.documents.values()],
            [(drawn[question.gold], question) for question in read.questions.values()],
            unanswerable,
        )
    first: dict[bytes, str] = {}  # the split in which a text came first
    for name, read in contents.items():
        for key, document_id in read.id_of_text.items():
            if key in first:
                raise DataError(
                    f"document {shown_id(document_id)} of {files.splits[name]} is also in {files.splits[first[key]]}; "
                    "remove it from one of them, or put all rows into one file, which is then divided by documents"
                )
            first[key] = name
    return _Read(
        [(name, document) for name, read in contents.items() for document in read.documents.values()],
        [(name, question) for name, read in contents.items() for question in read.questions.values()],
        unanswerable,
    )


def _read_corpus(files: Files, columns: Mapping[str, str], unanswered: bool) -> _Read:
    """Reads documents, and questions that name them or no document."""
    assert files.corpus is not None
    contents = Contents(unanswered=unanswered)
    for record in read_records(files.corpus, {"text": columns["document"]} if "document" in columns else {}):
        contents.add_document(record)
    questions: list[tuple[str, Question]] = []
    unanswerable: dict[str, int] = {}
    for name, file in files.splits.items():
        before = contents.unanswerable
        contents.questions.clear()  # ids are unique within a file
        for record in read_records(file, {field: names for field, names in columns.items() if field != "document"}):
            question = contents.add_question(record)
            questions += [] if question is None else [(name, question)]
        unanswerable[name] = contents.unanswerable - before
    nameless = [question for _, question in questions if question.document_id is None]
    if nameless and len(nameless) < len(questions):
        raise DataError(
            f"question {shown_id(nameless[0].id)} names no document, but others do; give a document_id to "
            "every question, or to none"
        )
    if nameless:
        drawn = [(_draw(question.question) if name == "all" else name, question) for name, question in questions]
        return _Read([("all", document) for document in contents.documents.values()], drawn, unanswerable)
    split_of = {} if "all" in files.splits else _asked_in(questions, files)
    placed = [(split_of.get(each.id) or drawn_split(each), each) for each in contents.documents.values()]
    of_document = {document.id: name for name, document in placed}
    asked = []
    for _, question in questions:
        names = {of_document[document_id] for document_id in (question.gold, *question.further_ids)}
        asked.append((names.pop() if len(names) == 1 else _APART, question))
    return _Read(placed, asked, unanswerable)


def _asked_in(questions: Sequence[tuple[str, Question]], files: Files) -> dict[str, str]:
    """The split of each document that questions in files of splits are about."""
    split_of: dict[str, str] = {}
    for name, question in questions:
        for document_id in (question.gold, *question.further_ids):
            if split_of.setdefault(document_id, name) != name:
                raise DataError(
                    f"document {shown_id(document_id)} is asked about in {files.splits[split_of[document_id]]} and in "
                    f"{files.splits[name]} (question {shown_id(question.id)}), so a model would be tested on what "
                    "it was trained on; put all questions into questions.jsonl, which is then divided by documents"
                )
    return split_of


def drawn_split(document: Document) -> str:
    """The split of a document in a file that is divided; the same in whatever file it stands.

    Examples:
        >>> documents = Document("1", "A text.", {"title": "Bridges"}), Document("2", "Another.", {"title": "bridges"})
        >>> drawn_split(documents[0]) == drawn_split(documents[1])
        True
    """
    title = str(document.metadata.get("title", "")).replace("_", " ")  # as SQuAD writes spaces
    return _draw(title) if normalize(title) else _draw(document.text)


def _draw(text: str) -> str:
    # Texts that differ only in case, punctuation and articles go together, as `pipelines.check_splits` compares them.
    digest = hashlib.sha256((normalize(text) or text).encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return "train" if place < _VAL else "val" if place < _TEST else "test"

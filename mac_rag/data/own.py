"""A user's own documents and questions, from files in several forms, which are detected.

`find_files` finds the files and the splits that their names stand for, `read_records` maps the columns of their rows to
our fields, and `OwnContents` checks these. Then documents and questions are divided into splits. An error names file,
row and field.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mac_rag.data.characters import check_text, shown_id
from mac_rag.data.dates import read_date
from mac_rag.data.metrics import normalize
from mac_rag.data.provenance import check_document
from mac_rag.data.readers import HUB, ROWS, TABLES, hub_splits, merged, read_rows
from mac_rag.data.squad import paragraph_rows
from mac_rag.data.table import parsed_cell
from mac_rag.data.types import Document, QADataset, Question, shortest_first
from mac_rag.errors import BankError, ConfigError, DataError, DocumentError
from mac_rag.untrusted_files import ROW, MalformedError

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

# Bounds of the drawn splits: train gets the first 80 % of all hashes, val the next 10 %, test the last 10 %.
_VAL, _TEST = 0.8, 0.9

_APART = "apart"  # the split of questions whose documents are in different splits
SUFFIXES = (*ROWS, ".json", ".json.gz")
# Other names that the fields have in common data sets: SQuAD's, FlashRAG's.
_ALIASES = {"document": ("context",), "answers": ("answer", "golden_answers"), "text": ("contents",)}
_SPLIT_OF = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}
_FORMS = (
    "files named train, val and test, or documents beside questions, each ending in "
    + ", ".join(SUFFIXES)
    + "; or give "
    "one file"
)
_NO_ANSWER = "give a text or a list of texts; leave unanswerable questions out, or mark them with is_impossible: true"


def read_own(
    path: str | Path, split: str, columns: Mapping[str, str] | None = None, *, unanswered: bool = False
) -> QADataset:
    """Reads one split of a user's own data.

    If files are named by splits, they are these splits, and no text may be in two of them. Otherwise, a hash of a
    document's title (or of its text if it has no title) decides the split of the document and its questions: 80 %
    train, 10 % val, 10 % test. So added rows move no document into another split, and documents with one title stay
    together.

    If the documents are in a file of their own, questions may name no documents. Then all splits have all documents.

    Args:
        path: a file, a folder, or `hub:OWNER/NAME` (see `mac_rag.data.readers.read_documents`).
        split: one of `SPLITS`; `all` means all of them together.
        columns: one of `FIELDS` -> the column or key that holds it, if their names differ.
        unanswered: True to also read questions without answers, with empty `answers`.

    Raises:
        ConfigError: for columns of unknown fields.
        DataError: for files that are missing or in an unknown form, and for a malformed row; names file, row and field.
    """
    unknown = [field for field in columns or {} if field not in FIELDS]
    if unknown:
        raise ConfigError(f"columns names the unknown field {unknown[0]!r}; choose one of {', '.join(FIELDS)}")
    files = find_files(path)
    if split not in ("all", *files.splits) and "all" not in files.splits:
        raise DataError(
            f"{path} has the split {' and '.join(files.splits)} by the names of its files, and no {split}; add "
            f"{split}.jsonl and give the folder, or give one file of another name, which is then divided"
        )
    reader = _read_rows if files.corpus is None else _read_corpus
    whole = reader(files, columns or {}, unanswered)
    documents = tuple(document for name, document in whole.documents if split == "all" or name in (split, "all"))
    questions = tuple(question for name, question in whole.questions if split in ("all", name))
    names = [name for name, _ in whole.questions]
    apart = (
        f"{names.count(_APART):,} questions are left out, because their documents are in different splits; give train, "
        "val and test in files of their own, or one title to documents that belong together"
    )
    if not questions:
        sizes = ", ".join(f"{names.count(other)} are in {other}" for other in SPLITS[:-1])
        raise DataError(
            f"the split {split!r} of {path} holds no questions: of all {len(names):,}, {sizes}. Give more documents, "
            "or files named train, val and test, or take the split 'all'; documents with one title are in one split"
            + (f". {apart}" if _APART in names else "")
        )
    for kind, ids in (("document", [each.id for each in documents]), ("question", [each.id for each in questions])):
        if len(set(ids)) < len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise DataError(f"{path}: {shown_id(twice)} is a {kind} of two splits; the split 'all' needs other ids")
    impossible = sum(count for name, count in whole.unanswerable.items() if split == "all" or name in (split, "all"))
    notes = []
    if impossible:
        notes.append(f"{path}: {impossible:,} questions are left out, because they are marked as impossible to answer")
    if _APART in names and split != "all":
        notes.append(f"{path}: {apart}")
    if "all" in files.splits and split != "all":
        notes.append(
            f"{path} is divided by documents: {split} has {len(questions):,} of {len(whole.questions):,} questions; "
            "the split 'all' has all"
        )
    return QADataset("own", split, documents, questions, tuple(notes))


@dataclass(frozen=True)
class _AllSplits:
    """A whole data set.

    Attributes:
        documents: each document with its split; a document of the split `all` is in every split.
        questions: each question with its split; `_APART` if its documents are in different splits.
        unanswerable: split (or `all` for a single file) -> number of questions in its file that were left out.
    """

    documents: list[tuple[str, Document]]
    questions: list[tuple[str, Question]]
    unanswerable: Mapping[str, int]


def _read_rows(files: Files, columns: Mapping[str, str], unanswered: bool) -> _AllSplits:
    """Reads files whose rows hold question and document."""
    contents: dict[str, OwnContents] = {}
    for name, file in files.splits.items():
        contents[name] = OwnContents(unanswered=unanswered)
        for record in read_records(file, columns):
            contents[name].add_row(record, may_be_alone=suffix_of(file) in (".json", ".json.gz"))
    unanswerable = {name: content.unanswerable for name, content in contents.items()}
    if "all" in contents:
        content = contents["all"]
        drawn = {document.id: drawn_split(document) for document in content.documents.values()}
        return _AllSplits(
            [(drawn[document.id], document) for document in content.documents.values()],
            [(drawn[question.gold], question) for question in content.questions.values()],
            unanswerable,
        )
    first: dict[bytes, str] = {}  # the split in which a text came first
    for name, content in contents.items():
        for key, document_id in content.id_of_text.items():
            if key in first:
                raise DataError(
                    f"document {shown_id(document_id)} of {files.splits[name]} is also in {files.splits[first[key]]}; "
                    "remove it from one of them, or put all rows into one file, which is then divided by documents"
                )
            first[key] = name
    return _AllSplits(
        [(name, document) for name, content in contents.items() for document in content.documents.values()],
        [(name, question) for name, content in contents.items() for question in content.questions.values()],
        unanswerable,
    )


def _read_corpus(files: Files, columns: Mapping[str, str], unanswered: bool) -> _AllSplits:
    """Reads a file of documents, and files of questions, which name documents or none."""
    assert files.corpus is not None
    contents = OwnContents(unanswered=unanswered)
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
        return _AllSplits([("all", document) for document in contents.documents.values()], drawn, unanswerable)
    split_of = {} if "all" in files.splits else _split_by_questions(questions, files)
    documents = [(split_of.get(each.id) or drawn_split(each), each) for each in contents.documents.values()]
    of_document = {document.id: name for name, document in documents}
    divided = []
    for _, question in questions:
        names = {of_document[document_id] for document_id in (question.gold, *question.further_ids)}
        divided.append((names.pop() if len(names) == 1 else _APART, question))
    return _AllSplits(documents, divided, unanswerable)


def _split_by_questions(questions: Sequence[tuple[str, Question]], files: Files) -> dict[str, str]:
    """Document id -> split, for documents with questions in the files of splits."""
    split_of: dict[str, str] = {}
    for name, question in questions:
        for document_id in (question.gold, *question.further_ids):
            if split_of.setdefault(document_id, name) != name:
                raise DataError(
                    f"document {shown_id(document_id)} is asked about in {files.splits[split_of[document_id]]} and in "
                    f"{files.splits[name]} (question {shown_id(question.id)}), so a model would be tested on documents "
                    "of its training; put all questions into questions.jsonl, which is then divided by documents"
                )
    return split_of


def drawn_split(document: Document) -> str:
    """The split of a document in a file that is divided; it does not depend on the file.

    Examples:
        >>> documents = Document("1", "A text.", {"title": "Bridges"}), Document("2", "Another.", {"title": "bridges"})
        >>> drawn_split(documents[0]) == drawn_split(documents[1])
        True
    """
    title = str(document.metadata.get("title", "")).replace("_", " ")  # as SQuAD writes spaces
    return _draw(title) if normalize(title) else _draw(document.text)


def _draw(text: str) -> str:
    # Texts that differ only in case, punctuation and articles get one split, because `pipelines.check_splits` compares
    # them so. Not by `comparable`: models have been trained on these splits.
    digest = hashlib.sha256((normalize(text) or text).encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return "train" if place < _VAL else "val" if place < _TEST else "test"


@dataclass(frozen=True)
class Files:
    """The files of a data set.

    Attributes:
        corpus: the file of documents; None if the rows of questions hold them.
        splits: split (`train`, `val`, `test`) -> file of its questions; or `all` -> a single file to be divided.
    """

    corpus: Path | None
    splits: Mapping[str, Path]


def find_files(path: str | Path) -> Files:
    """Finds the files of a data set, which has one of these forms:

    - one file of rows with document, question and answers, or a file in SQuAD's layout;
    - a folder with such files named `train`, `val` (`validation`, `valid`, `dev`) and `test`, at least one of them;
    - a folder with `documents` or `corpus`, and `questions` or questions in files named as above;
    - a data set of the Hub, `hub:OWNER/NAME`, with splits named as above; or one split of it, `hub:OWNER/NAME:SPLIT`.

    Raises:
        DataError: for a path that is none of these.
    """
    if str(path).startswith(HUB):
        return _find_on_hub(str(path))
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"there is no {path}; give a file, a folder with {_FORMS}")
        split = _SPLIT_OF.get(_stem(path), "all")
        return Files(None, {split: path})
    try:
        inside = sorted(file for file in path.iterdir() if suffix_of(file) is not None and not file.is_dir())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    corpora = [file for file in inside if _stem(file) in ("documents", "corpus")]
    questions = [file for file in inside if _stem(file) == "questions"]
    splits = _by_split(path, [file for file in inside if _stem(file) in _SPLIT_OF])
    corpus = _one_of(path, corpora, "documents")
    undivided = _one_of(path, questions, "questions")
    if undivided is not None and splits:
        raise DataError(f"{path} holds {undivided.name} and questions by splits; keep one of the two")
    if undivided is not None and corpus is None:
        raise DataError(f"{path} holds {undivided.name} without documents; put documents.jsonl beside it")
    if undivided is not None:
        splits = {"all": undivided}
    if not splits:
        names = ", ".join(file.name for file in inside) or "no such file"
        raise DataError(f"{path} has no questions; give {_FORMS} (it has {names:.400})")
    return Files(corpus, splits)


def _find_on_hub(name: str) -> Files:
    if ":" in name.removeprefix(HUB):
        return Files(None, {"all": Path(name)})
    names = hub_splits(name)
    if len(names) == 1:
        return Files(None, {"all": Path(f"{name}:{names[0]}")})
    known = [split for split in names if split in _SPLIT_OF]
    if not known:
        raise DataError(
            f"{name} has the splits {', '.join(names):.400}; name one of them, such as {name}:{names[0]:.80}"
        )
    return Files(None, {_SPLIT_OF[split]: Path(f"{name}:{split}") for split in known})


def _by_split(folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    by_split = {
        split: [file for file in files if _SPLIT_OF[_stem(file)] == split] for split in ("train", "val", "test")
    }
    chosen = {split: _one_of(folder, found, f"the split {split}") for split, found in by_split.items()}
    return {split: file for split, file in chosen.items() if file is not None}


def _one_of(folder: Path, files: list[Path], what: str) -> Path | None:
    if len(files) > 1:
        raise DataError(f"{folder} holds {what} twice, in {files[0].name} and {files[1].name}; keep one of them")
    return files[0] if files else None


def _stem(file: Path) -> str:
    return file.name.casefold().removesuffix(suffix_of(file) or "")


class Record(NamedTuple):
    """One row of a data set.

    Attributes:
        where, name: its file and row, for messages; the id of its question if it has none.
        values: field -> value, for all fields that are not empty.
        columns: the names of all columns or keys of the row.
    """

    where: str
    name: str
    values: Mapping[str, Any]
    columns: tuple[str, ...]

    def fault(self, field: str, problem: str) -> DataError:
        """Makes the error to raise for a field of this row."""
        return DataError(f"{self.where}, field {field!r}: {problem}")

    def missing(self, field: str, remedy: str) -> DataError:
        """Makes the error to raise for a field that the row does not have."""
        present = ", ".join(map(repr, self.columns)) or "nothing"
        return self.fault(field, f"it is missing or empty; {remedy} (the row has {present:.200})")


def suffix_of(path: Path) -> str | None:
    """The one of `SUFFIXES` that a file has, in any case; None for another."""
    return next((suffix for suffix in SUFFIXES if path.name.casefold().endswith(suffix)), None)


def read_records(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    """Yields the rows of a file, or of a split of the Hub.

    Args:
        path: a file with one of `SUFFIXES`, or `hub:OWNER/NAME:SPLIT`.
        columns: field -> the column or key that holds it, if their names differ.

    Raises:
        DataError: for a file that cannot be read or is malformed, and for a missing column; names the file and the row.
    """
    file = path.name[: len(path.name) - len(suffix_of(path) or "")]
    for number, (where, row) in enumerate(_rows(path), 1):
        values = dict(row)
        for field, names in _ALIASES.items():
            if values.get(field) in (None, ""):
                values[field] = next((row[name] for name in names if row.get(name) not in (None, "")), None)
        for field, column in columns.items():
            # The row of a paragraph without questions lacks the fields of a question.
            if column not in row and not (set(row) <= {"document", "title"}):
                has = ", ".join(map(repr, row)) or "nothing"
                raise DataError(
                    f"{where}: no column {column!r}, which columns names for {field!r}; choose one of {has:.200}"
                )
            values[field] = row.get(column)
        if suffix_of(path) in TABLES:
            for field in ("answers", "metadata", "further_document_ids", "supersedes"):
                try:
                    values |= {field: parsed_cell(values[field])} if values.get(field) else {}
                except MalformedError as error:
                    raise DataError(f"{where}, field {field!r}: {error}") from None
        filled = {field: value for field, value in values.items() if value not in (None, "")}
        yield Record(where, f"{file}-{number}", filled, tuple(row))


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    suffix = suffix_of(path)
    if suffix in (".json", ".json.gz"):
        return paragraph_rows(path)
    if suffix is None and not str(path).startswith(HUB):
        raise DataError(f"{path} has an unknown ending; give a file that ends in {', '.join(SUFFIXES)}")
    rows = ((row.where, row.values) for row in read_rows(path))
    if suffix in TABLES:
        return ((where, {column: cell if cell.strip() else "" for column, cell in row.items()}) for where, row in rows)
    return rows


class OwnContents:
    """Collects and checks documents and questions.

    Args:
        unanswered: True to also take questions without answers.

    Attributes:
        documents: id -> document, in the order of the rows.
        questions: id -> question, in the order of the rows.
        id_of_text: sha256 of a text -> id of the first document with this text.
        unanswerable: number of questions that were left out because they are marked as impossible to answer, as in
            SQuAD 2.0.
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
            DataError: for a row that is not a document, and for an id that another document has.
        """
        document_id = _id(record, "id")
        if document_id is None:
            raise record.missing("id", "give each document a name")
        text = _text(record, "text", "every document has a text")
        named = ("id", "text", "contents")
        values = {key: record.values[key] for key in record.columns if key in record.values and key not in named}
        try:
            metadata = merged(values)
        except MalformedError as error:
            raise record.fault("metadata", str(error)) from None
        if document_id in self.documents:
            raise record.fault("id", f"{shown_id(document_id)} is the id of another document in an earlier row")
        self._put(record, Document(document_id, text, metadata))

    def add_row(self, record: Record, *, may_be_alone: bool = False) -> None:
        """Adds a question with the text of its document. Rows with the same text are about one document.

        Args:
            record: the row.
            may_be_alone: True for a file in SQuAD's layout, where a row without `question` is only a document.

        Raises:
            DataError: for a field that is missing or wrong, and for an id that means something else in an earlier row.
        """
        text = _text(
            record, "document", "give the text that answers the question, or put documents.jsonl beside questions.jsonl"
        )
        metadata = _mapping(record, "metadata")
        metadata |= {name: record.values[name] for name in ("title", "date") if name in record.values}
        key = hashlib.sha256(text.encode()).digest()
        document_id = _id(record, "document_id") or self.id_of_text.get(key) or f"doc-{key.hex()[:16]}"
        document = Document(document_id, text, metadata)
        known = self.documents.get(document_id)
        if known is None:
            self._put(record, document)
        elif known.text != text:
            raise record.fault("document_id", f"{shown_id(document_id)} is the id of another text in an earlier row")
        elif known.metadata != metadata:
            field = next(
                name for name in {**known.metadata, **metadata} if known.metadata.get(name) != metadata.get(name)
            )
            raise record.fault(
                field,
                f"document {shown_id(document_id)} has another one in an earlier row; give all its rows the same",
            )
        if "further_document_ids" in record.values:
            raise record.fault(
                "further_document_ids",
                "a row with the text of its document cannot name several documents; put the documents into "
                "documents.jsonl and the questions into questions.jsonl",
            )
        if "question" in record.columns or not may_be_alone:
            self._add_question(record, document_id)

    def add_question(self, record: Record) -> Question | None:
        """Adds a question. The documents that it names must have been added before.

        `document_id` names the document with the answer, `further_document_ids` the others that the answer needs.

        Returns:
            The question; None if it is left out.

        Raises:
            DataError: for a field that is missing or wrong, for an id of another question, for an unknown document, and
                for a row that holds the text of its document.
        """
        if "document" in record.values:
            raise record.fault(
                "document", "the documents are in a file of their own; name one by document_id, or remove that file"
            )
        document_id = _id(record, "document_id")
        further = _ids(record, "further_document_ids")
        for field, names in (("document_id", [document_id]), ("further_document_ids", further)):
            for name in names:
                if name is not None and name not in self.documents:
                    raise record.fault(field, f"there is no document {shown_id(name)}; add it, or name another")
        if further and document_id is None:
            raise record.missing(
                "document_id", "name the document with the answer there, and the others in further_document_ids"
            )
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
            raise record.fault("id", f"{shown_id(question_id)} is the id of another question in an earlier row")
        added = Question(question_id, question, answers, document_id, _as_of(record), further)
        self.questions[question_id] = added
        return added


def _has_none(record: Record) -> bool:
    """True for a question without answers that is not marked as impossible to answer."""
    return record.values.get("answers") in (None, []) and not _is_impossible(record)


def _is_impossible(record: Record) -> bool:
    """True for a question that is marked as impossible to answer."""
    value = record.values.get("is_impossible", False)
    marks = {"true": True, "1": True, "false": False, "0": False}
    if str(value).casefold() not in marks:
        raise record.fault("is_impossible", f"it must be true or false, got {value!r:.80}")
    return marks[str(value).casefold()]


def _answers(record: Record) -> tuple[str, ...] | None:
    """The accepted answers, the shortest first; None for a question that is marked as impossible to answer."""
    value = record.values.get("answers")
    if _is_impossible(record):
        return None
    if isinstance(value, Mapping):  # SQuAD on the Hub: a list of texts, and a list of their positions
        value = value.get("text")
        if value == []:
            return None
    if value is None or value == []:
        raise record.missing("answers", _NO_ANSWER)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise record.fault("answers", f"it must be a text or a list of texts, got {texts!r:.80}")
    # SQuAD's files: each answer is a text with its position.
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
    """The moment of a question, as its row has it; None if it has none."""
    value = record.values.get("as_of")
    if value is None:
        return None
    try:
        read_date(value)
    except DataError as error:
        raise record.fault("as_of", str(error)) from None
    return str(value)


def _id(record: Record, field: str) -> str | None:
    """An id, which is a text or a whole number; None if there is none."""
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

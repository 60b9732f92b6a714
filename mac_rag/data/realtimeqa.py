"""RealTimeQA (Kasai et al., 2022): questions of weekly news quizzes, with the search results of those weeks.

The public files have one week each. `<week>_qa.jsonl` holds the questions: `question_id`, `question_date`,
`question_sentence`, `choices`, `answer` (the numbers of the right choices) and `evidence`. `<week>_gcs.jsonl` and
`<week>_dpr.jsonl` hold the results of searches: `question_id`, `search_time` and `search_result`, a list of texts with
`publish_date`.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from mac_rag.data.characters import fault_of, is_blank
from mac_rag.data.readers import read_rows
from mac_rag.data.types import Document, QADataset, Question, shortest_first
from mac_rag.errors import DataError

SPLITS = ("test",)

_QUESTIONS = re.compile(r"\d{8}_qa\.jsonl")  # without other versions of the questions, such as _qa_nota
_SEARCHES = ("gcs", "dpr")
_DAY = re.compile(r"(\d{4})[/-](\d{2})[/-](\d{2})(?:/\d{2}:\d{2})?")
_TAG = re.compile(r"<[^<>]*>")


def read_realtimeqa(path: str | Path, split: str = "test") -> QADataset:
    """Reads all weeks in a folder, or one file of questions with the search results beside it.

    The stream consists of all search results, and of the evidence of each question, which the quiz shows after the
    answer, in the order of their dates. A search result counts from its `publish_date` on, or from the day of the
    search if it has none; evidence counts from the day of its question. A question has its own day as `as_of`, so
    documents that were published later have no influence on the dated answer.

    Choices are not shown: an answer is the text of a right choice. Questions without a right choice are left out, and
    so are questions with neither evidence nor search results.

    Args:
        path: a folder, of one year or of several, or a file `<week>_qa.jsonl`.
        split: `test`, the only one.

    Raises:
        DataError: for files that are missing, and for a malformed row; names file, row and field.
    """
    weeks = _weeks(Path(path))
    documents: dict[str, Document] = {}
    questions: dict[str, Question] = {}
    unanswered = unfounded = unsearched = 0
    for file in weeks:
        results = list(_search_results(file))
        unsearched += not results
        searched = {question_id for question_id, _ in results}
        for _, document in results:
            first = documents.get(document.id)
            if first is None or document.metadata["date"] < first.metadata["date"]:
                documents[document.id] = document
        for where, row in _rows(file):
            question_id, day = _text(row, "question_id", where), _day(row, "question_date", where)
            answers, evidence = _answers(row, where), _evidence(row, where)
            if not answers:
                unanswered += 1
                continue
            if evidence is None and question_id not in searched:
                unfounded += 1
                continue
            question = Question(question_id, _text(row, "question_sentence", where), answers, None, day)
            if (known := questions.get(question_id)) is not None:
                if (known.question, known.answers) == (question.question, question.answers):
                    continue  # some files repeat rows
                question = replace(question, id=f"{file.name[:8]}:{question_id}")  # some repeat an id of another week
                if question.id in questions:
                    raise DataError(f"{where}: {question_id!r:.200} is the id of another question in this file")
            if evidence is not None:
                gold = Document(f"{question.id}-evidence", evidence, {"date": day})
                documents[gold.id] = gold
                question = replace(question, document_id=gold.id)
            questions[question.id] = question
    notes = []
    if unanswered:
        notes.append(f"{unanswered:,} questions are left out, because they name no right choice")
    if unfounded:
        notes.append(f"{unfounded:,} questions are left out, because they have neither evidence nor search results")
    if unsearched:
        notes.append(
            f"{unsearched:,} of {len(weeks):,} weeks have no search results (_gcs.jsonl, _dpr.jsonl) beside their "
            "questions; the stream has only their evidence"
        )
    ordered = sorted(documents.values(), key=lambda document: str(document.metadata["date"]))
    return QADataset("realtimeqa", split, tuple(ordered), tuple(questions.values()), tuple(notes))


def _weeks(path: Path) -> list[Path]:
    """The files of questions, in the order of their weeks."""
    files = [path] if path.is_file() else [file for file in path.rglob("*.jsonl") if _QUESTIONS.fullmatch(file.name)]
    if not files or not all(_QUESTIONS.fullmatch(file.name) for file in files):
        raise DataError(
            f"{path} is neither a file <week>_qa.jsonl of RealTimeQA, such as 20230106_qa.jsonl, nor a folder that "
            "holds one; these files are in past/ and backnumber/ of https://github.com/realtimeqa/realtimeqa_public"
        )
    return sorted(files, key=lambda file: file.name)


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((row.where, row.values) for row in read_rows(file))


def _search_results(file: Path) -> Iterator[tuple[str, Document]]:
    """Yields the search results for the questions of a week, each after the id of its question."""
    for kind in _SEARCHES:
        results = file.with_name(file.name.replace("_qa.jsonl", f"_{kind}.jsonl"))
        if not results.is_file():
            continue
        for where, row in _rows(results):
            question_id, day = _text(row, "question_id", where), _day(row, "search_time", where)
            listed = row.get("search_result")
            if not isinstance(listed, list):
                raise DataError(f"{where}: search_result must be a list, got {listed!r:.80}")
            for number, item in enumerate(listed, 1):
                document = _document(item, day, f"{where}, search result {number}")
                if document is not None:
                    yield question_id, document


def _document(item: Any, searched: str, where: str) -> Document | None:
    """A search result as a document; None if its page had no text."""
    if not isinstance(item, Mapping):
        raise DataError(f"{where}: it must be an object, got {item!r:.80}")
    texts = [item.get(field) for field in ("title", "text")]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise DataError(f"{where}: title and text must be texts, got {texts!r:.80}")
    if not texts[1] or is_blank(texts[1]):
        return None
    text = "\n".join(text.strip() for text in texts if text)
    _check(text, where)
    place = item.get("url") or item.get("doc_id")
    if not isinstance(place, str):
        raise DataError(f"{where}: it has neither a url nor a doc_id; give one")
    _check(place, where)
    day = _day(item, "publish_date", where) if item.get("publish_date") else searched
    # A page changes from week to week, so each of its versions is a document.
    return Document(f"{place}#{hashlib.sha256(text.encode()).hexdigest()[:12]}", text, {"date": day})


def _answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    choices, right = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise DataError(f"{where}: choices must be a list of texts, got {choices!r:.80}")
    right = [right] if isinstance(right, str) else right  # one of the public files has a text
    if not isinstance(right, list) or not all(isinstance(number, str | int) for number in right):
        raise DataError(f"{where}: answer must be a list of numbers of choices, got {right!r:.80}")
    answers = []
    for number in map(str, right):
        if not number.isdecimal() or int(number[:9]) >= len(choices):
            raise DataError(f"{where}: answer names choice {number!r:.80}, but there are {len(choices)}, from 0 on")
        _check(choices[int(number)], where)
        answers.append(choices[int(number)])
    return shortest_first(answers)


def _evidence(row: Mapping[str, Any], where: str) -> str | None:
    """The evidence without the tags of its links; None if there is none."""
    evidence = row.get("evidence")
    if evidence is None:
        return None
    if not isinstance(evidence, str):
        raise DataError(f"{where}: evidence must be a text, got {evidence!r:.80}")
    text = html.unescape(_TAG.sub("", evidence)).strip()
    _check(text, where)
    return None if is_blank(text) else text


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or is_blank(value):
        raise DataError(f"{where}: {field} must be a text, got {value!r:.80}")
    _check(value, where)
    return value.strip()


def _day(row: Mapping[str, Any], field: str, where: str) -> str:
    """A day such as 2023/01/05, with or without a time, in ISO 8601."""
    value = row.get(field)
    match = _DAY.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if match is None:
            raise ValueError
        return date(*(int(part) for part in match.groups())).isoformat()
    except ValueError:
        raise DataError(f"{where}: {field} must be a day such as 2023/01/05, got {value!r:.80}") from None


def _check(text: str, where: str) -> None:
    fault = fault_of(text)
    if fault is not None:
        raise DataError(f"{where}: {fault}")

"""Time-Sensitive QA (Chen et al., 2021): paragraphs of Wikipedia's pages, and questions that each name a time.

The human-annotated files are lists of pages: `{"index", "type", "link", "questions", "paras"}`. A question is a text
with answers, each with the number of its paragraph, `para`. An answer without text means that the page has none.
"""

from __future__ import annotations

import calendar
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mac_rag.data.characters import check_text
from mac_rag.data.types import Document, QADataset, Question, shortest_first
from mac_rag.errors import DataError, DocumentError
from mac_rag.untrusted_files import parse_json, read_unpacked

SPLITS = ("train", "val", "test")

_FILES = {
    "train": "human_annotated_train.json",
    "val": "human_annotated_train.json",
    "test": "human_annotated_test.json",
}
_LARGEST = 256 << 20  # most bytes of a file; the official ones have less than 10 million
_VAL = 10  # one page of the training file in so many is the split val
_BEFORE_ALL = "0001-01-01"
_REMEDY = "the files are in dataset/ of https://github.com/wenhuchen/Time-Sensitive-QA"

# Numbers of four digits that may be years, but not as a part of a longer number, such as 1,250 or 1993.5.
_FIGURES, _END = r"1\d{3}|20[0-2]\d", r"(?!\d|[.,]\d)"
_YEAR = re.compile(rf"(?<![\d.,])(?:{_FIGURES}){_END}")
_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = "|".join(["sept", *(f"{name[:3]}(?:{name[3:]})?" for name in _MONTHS)])
_WORD = r"[a-z]{3,9}"  # "late", "early"
# A period; the groups are month and year of its end. The year may have fewer digits.
_PERIOD = re.compile(
    rf"\b(?:from|between)\s+(?:{_WORD}\.?\s+){{,2}}\d{{1,4}}\s+(?:to|and|until)\s+"
    rf"(?:(?:{_WORD}\s+)??(?P<month>{_MONTH})\.?\s+|{_WORD}\s+)?(?P<year>\d{{1,4}}){_END}",
    re.IGNORECASE,
)
_POINT = re.compile(rf"(?:\b(?P<month>{_MONTH})\.?\s+)?(?<![\d.,])(?P<year>{_FIGURES}){_END}", re.IGNORECASE)


def read_timeqa(path: str | Path, split: str) -> QADataset:
    """Reads one split. The paragraphs are the stream, each with its page's title in front.

    The date of a paragraph is the earliest year that it names, because its content can be known from then on: a
    paragraph about a career from 1996 to 2003 counts from 1996. A paragraph without a year has the date of the
    paragraph before it or, if there is none with a year before it, the earliest year of the page. A page without years
    always counts. Years before 1000 cannot be distinguished from other numbers.

    The `as_of` of a question is the last day of the time that it names: 2000-04-30 for "from 1999 to Apr 2000". It is
    None if the question names no time, or one before 1000. Questions without an answer on their page are left out.

    Args:
        path: folder with `human_annotated_train.json` and `human_annotated_test.json` (or `.json.gz`), or the file.
        split: one of `SPLITS`. `val` is one page of ten in the training file, drawn by a hash of its name; `train` has
            the others.

    Raises:
        DataError: for a file that is missing or has another layout; names the page and the question.
    """
    file = _find(Path(path), _FILES[split])
    documents: dict[str, Document] = {}
    questions: list[Question] = []
    unanswerable = 0
    for number, page in enumerate(_pages(file), 1):
        place = f"{file}, page {number}"
        name, paragraphs, listed = _fields(page, place)
        if split != "test" and _is_val(name) != (split == "val"):
            continue
        for document in _documents(name, paragraphs, place):
            if documents.setdefault(document.id, document) != document:
                raise DataError(f"{place}: paragraph {document.id!r:.200} has another text on an earlier page")
        for position, (text, answers) in enumerate(_questions(listed, paragraphs, place), 1):
            if not answers:
                unanswerable += 1
                continue
            accepted = shortest_first(answer for answer, _ in answers)
            gold = f"{name}#{answers[0][1]}"
            questions.append(Question(f"{page['index']}-{position}", text, accepted, gold, asked_as_of(text)))
    left_out = f"{file}: {unanswerable:,} questions are left out, because their pages do not answer them"
    notes = (left_out,) if unanswerable else ()
    return QADataset("timeqa", split, tuple(documents.values()), tuple(questions), notes)


def asked_as_of(question: str) -> str | None:
    """The last day of the time that a question names; None if it names none from the year 1000 on.

    If it names several times, the last period counts ("from 1976 to 1990"), or the last year if there is no period.

    Examples:
        >>> asked_as_of("Which club did Pluskal, born in 1930, play for from 1969 to Feb 1970?")
        '1970-02-28'
        >>> asked_as_of("Which title did Levitina get in 1976?")
        '1976-12-31'
    """
    matches = [*_PERIOD.finditer(question)] or [*_POINT.finditer(question)]
    if not matches or int(matches[-1]["year"]) < 1000:
        return None
    year = int(matches[-1]["year"])
    month_name = (matches[-1]["month"] or "december")[:3].lower()
    month = next(number for number, name in enumerate(_MONTHS, 1) if name.startswith(month_name))
    return f"{year}-{month:02d}-{calendar.monthrange(year, month)[1]}"


def paragraph_dates(paragraphs: Sequence[str]) -> list[str]:
    """The date of each paragraph of a page, see `read_timeqa`.

    Examples:
        >>> paragraph_dates(["A club.", "From 1996 to 2003 he played.", "He scored.", "It moved in 1990."])
        ['1990', '1996', '1996', '1990']
    """
    first = [min(years, default=None) for years in (_YEAR.findall(paragraph) for paragraph in paragraphs)]
    last = min((year for year in first if year is not None), default=_BEFORE_ALL)
    dates = []
    for year in first:
        last = last if year is None else year
        dates.append(last)
    return dates


def _documents(name: str, paragraphs: Sequence[str], place: str) -> Iterator[Document]:
    title = paragraphs[0].strip()
    for number, (paragraph, date) in enumerate(zip(paragraphs, paragraph_dates(paragraphs), strict=True)):
        text = f"{title}. {paragraph.strip()}" if number else title
        try:
            check_text(text)
        except DocumentError as error:
            raise DataError(f"{place}, paragraph {number}: {error}") from None
        yield Document(f"{name}#{number}", text, {"title": title, "date": date})


def _is_val(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _VAL == 0


def _pages(file: Path) -> list[Any]:
    try:
        pages = parse_json(read_unpacked(file, _LARGEST))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not a file of Time-Sensitive QA: {error}; {_REMEDY}") from None
    if not isinstance(pages, list):
        raise DataError(f"{file} is not a file of Time-Sensitive QA: it holds no list of pages; {_REMEDY}")
    return pages


def _fields(page: Any, place: str) -> tuple[str, list[str], list[Any]]:
    """The name, paragraphs and questions of a page."""
    if not isinstance(page, dict):
        raise DataError(f"{place} must be an object with index, link, questions and paras, got {page!r:.80}")
    for field in ("index", "link"):
        if not isinstance(page.get(field), str) or not page[field].strip():
            raise DataError(f"{place}: {field} must be a text, got {page.get(field)!r:.80}")
    paragraphs, questions = page.get("paras"), page.get("questions")
    if not isinstance(paragraphs, list) or not all(isinstance(text, str) for text in paragraphs):
        raise DataError(f"{place}: paras must be a list of texts, got {paragraphs!r:.80}")
    if not paragraphs or not paragraphs[0].strip():
        raise DataError(f"{place}: the first paragraph must be the page's title")
    if not isinstance(questions, list):
        raise DataError(f"{place}: questions must be a list, got {questions!r:.80}")
    return page["link"].removeprefix("/wiki/"), paragraphs, questions


def _questions(
    listed: Sequence[Any], paragraphs: Sequence[str], place: str
) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yields each question with its answers and the numbers of their paragraphs; no answers if the page has none."""
    for number, item in enumerate(listed, 1):
        where = f"{place}, question {number}"
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], list)):
            raise DataError(f"{where}: it must be a text and a list of answers, got {item!r:.80}")
        text, answers = item
        numbered = []
        for answer in answers:
            if not isinstance(answer, dict) or not isinstance(answer.get("answer"), str):
                raise DataError(f"{where}: an answer must be an object with a text 'answer', got {answer!r:.80}")
            paragraph = answer.get("para")
            if type(paragraph) is not int or not 0 <= paragraph < len(paragraphs):
                raise DataError(
                    f"{where}: para must be the number of one of {len(paragraphs):,} paragraphs, got {paragraph!r:.80}"
                )
            if answer["answer"].strip():
                numbered.append((answer["answer"], paragraph))
        try:
            check_text(text)
            for answer_text, _ in numbered:
                check_text(answer_text)
        except DocumentError as error:
            raise DataError(f"{where}: {error}") from None
        yield text.strip(), numbered


def _find(path: Path, name: str) -> Path:
    candidates = [path / name, path / f"{name}.gz"] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file():
            return file
    raise DataError(f"there is no {' or '.join(map(str, candidates))}; {_REMEDY}")

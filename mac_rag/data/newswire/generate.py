"""Newswire: a generator of dated news paragraphs with questions, for work without a licensed corpus.

Each document tells four facts about a subject of its own. Names are built from syllables and belong to one split, so
the test stream has thousands of names that training never shows. A share of the stories is followed by a later document
in which every fact has changed; questions about both name the year, and some about the later one say `now`. The
generator is seeded: equal arguments give equal documents on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mac_rag.data.newswire.beats import BEATS, Beat, Fact
from mac_rag.data.newswire.world import MONTHS, SPLITS, YEARS, World
from mac_rag.data.types import Document, QADataset, Question

STREAM_LENGTH = 1665  # number of documents in the paper's evaluation stream


@dataclass(frozen=True)
class Report:
    """The facts of one document, from which its text and questions are written.

    Attributes:
        beat: kind of the story.
        subject: subject of the story.
        values: the value of each fact of the beat.
        year: year of the document.
        updates: position of the earlier report that this one supersedes; None if it supersedes none.
        superseded: True if a later report supersedes this one.
    """

    beat: Beat
    subject: str
    values: tuple[str, ...]
    year: int
    updates: int | None
    superseded: bool


def generate(
    split: str = "test",
    documents: int = STREAM_LENGTH,
    *,
    seed: int = 0,
    questions_per_document: int = 1,
    update_rate: float = 0.04,
) -> QADataset:
    """Writes a stream of news documents with questions.

    Args:
        split: `train`, `val` or `test`; splits share no surname and no town.
        documents: number of documents.
        seed: random seed; equal seeds give equal streams.
        questions_per_document: number of questions per document, 1 to 4, each about another fact.
        update_rate: share of the stories that are followed by a later document with changed facts, from 0 to 1.

    Raises:
        ValueError: for an unknown split, or an argument outside its range.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown newswire split {split!r}; choose one of {', '.join(SPLITS)}")
    if documents < 1:
        raise ValueError(f"documents must be at least 1, got {documents}")
    if not 1 <= questions_per_document <= 4:
        raise ValueError(f"questions_per_document must be 1 to 4, got {questions_per_document}")
    if not 0.0 <= update_rate <= 1.0:
        raise ValueError(f"update_rate must lie in [0, 1], got {update_rate}")
    rng = random.Random(f"newswire/{split}/{seed}")
    reports = _draw_reports(World(split, rng), rng, documents, update_rate)
    news: list[Document] = []
    questions: list[Question] = []
    for index, report in enumerate(reports):
        document_id = f"{split}-{seed}-{index:06d}"
        metadata = {"title": f"{report.subject}: {report.beat.name}", "date": _draw_date(rng, report.year)}
        if report.updates is not None:
            metadata["updates"] = f"{split}-{seed}-{report.updates:06d}"
        news.append(Document(document_id, _written(report, metadata["date"], rng), metadata))
        for slot in sorted(rng.sample(range(len(report.values)), questions_per_document)):
            question = _asked(report, report.beat.facts[slot], rng)
            questions.append(Question(f"{document_id}-{slot}", question, (report.values[slot],), document_id))
    return QADataset("newswire", split, tuple(news), tuple(questions))


def _draw_reports(world: World, rng: random.Random, documents: int, update_rate: float) -> list[Report]:
    """Draws the stories of a stream. An update comes up to 200 documents after the report that it supersedes."""
    reports: list[Report] = []
    due: dict[int, int] = {}  # stream position -> position of the report that is updated there
    while len(reports) < documents:
        index = len(reports)
        if index in due:
            earlier = reports[due[index]]
            year = rng.choice(range(earlier.year + 1, YEARS[-1] + 1))
            values = tuple(_changed(world, rng, fact, old) for fact, old in zip(earlier.beat.facts, earlier.values))
            reports.append(Report(earlier.beat, earlier.subject, values, year, due[index], False))
            continue
        beat = rng.choice(BEATS)
        year = rng.choice(YEARS[:-1])
        later = index + rng.randint(1, 200)
        superseded = rng.random() < update_rate and later < documents and later not in due
        if superseded:
            due[later] = index
        values = tuple(_draw(world, rng, fact) for fact in beat.facts)
        reports.append(Report(beat, world.unique(beat.subject), values, year, None, superseded))
    return reports


def _draw(world: World, rng: random.Random, fact: Fact) -> str:
    if isinstance(fact.draw, tuple):
        return rng.choice(fact.draw)
    value: str = getattr(world, fact.draw)()
    return value


def _changed(world: World, rng: random.Random, fact: Fact, old: str) -> str:
    while (value := _draw(world, rng, fact)) == old:
        pass
    return value


def _draw_date(rng: random.Random, year: int) -> str:
    return f"{year}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _written(report: Report, date: str, rng: random.Random) -> str:
    """The paragraph: a dateline, the first fact, then the other facts in random order."""
    month, day = MONTHS[int(date[5:7]) - 1], int(date[8:])
    lead, *rest = [
        rng.choice(fact.statements).format(s=report.subject, a=value)
        for fact, value in zip(report.beat.facts, report.values)
    ]
    rng.shuffle(rest)
    return " ".join((f"{month} {day}, {report.year}.", lead, *rest))


def _asked(report: Report, fact: Fact, rng: random.Random) -> str:
    """One phrasing of the question; if the facts changed over time it names the time."""
    question = rng.choice(fact.questions).format(s=report.subject)
    if report.updates is not None and rng.random() < 0.5:
        return f"Now: {question}"
    if report.updates is not None or report.superseded or rng.random() < 0.15:
        return f"In {report.year}: {question}"
    return question

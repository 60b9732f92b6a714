"""Newswire: a generator of dated news paragraphs with questions, for work without a licensed corpus.

Each document tells four facts about a subject of its own. Names are built from syllables and belong to one split, so
the test stream has thousands of names that training never shows. For a share of the stories, a later document changes
every fact. Questions about such a pair name the year, and some questions about the later document say `now`. The
generator is seeded: equal arguments give equal documents on every machine.

There are more than a hundred thousand surnames and towns. A checksum of its letters assigns each of them to one split.
What the stories say stands in `beats.toml`.
"""

from __future__ import annotations

import random
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path

from mac_rag.data.types import Document, QADataset, Question

STREAM_LENGTH = 1665  # number of documents in the paper's evaluation stream
SPLITS = ("train", "val", "test")

_ONSETS = "b bl br c cl cr d dr f fl g gl gr h j k kl kr l m n p pl pr qu r s sk sl st str t th tr v w z".split()
_NUCLEI = "a e i o u ai ea ei ie oa ou".split()
_CODAS = "b ck d g l ld ll lm m n nd ng nk nn p r rd rk rn rt s sk ss st t th x".split()
_SURNAME_ENDS = "a ard as en er ez in ler ley man o off ova sen ski son ton well y".split()
_TOWN_ENDS = "berg bridge burn bury dale field ford gate ham haven hurst mouth port ton vale ville wick wood".split()

FIRST_NAMES = (
    "Ada Adam Agnes Alan Alice Amelia Amos Anita Anna Arthur Astrid Barbara Beatrice Bella Bernard Boris Brian "
    "Bruno Carla Carlos Cecil Celia Chloe Clara Colin Cora Cyril Dalia Daniel Daphne David Diana Diego Doris Dylan "
    "Edgar Edith Elena Elias Ella Emil Emma Enid Eric Esther Ethan Eva Felix Fiona Flora Frank Freda Gavin George "
    "Gilda Grace Greta Gustav Hanna Harold Hassan Hazel Hector Helen Henry Hilda Hugo Ian Ibrahim Ida Igor Ines "
    "Ingrid Irene Isaac Ivan Jack Jana Jasper Joan Jonas Judith Julia Karl Kate Keiko Kenji Lars Laura Leila Leo "
    "Liam Lionel Lisa Louis Lucia Lydia Mabel Magda Marco Maria Mark Martha Matteo Maya Milan Miles Miriam Mona "
    "Nadia Naomi Nelson Nina Noah Nora Olaf Olga Oliver Omar Oscar Otto Pablo Paula Pedro Petra Philip Piers Priya "
    "Quentin Rachel Ralph Ramon Raul Rita Robert Rosa Rupert Ruth Sam Sara Selma Silas Simon Sofia Stella Sven "
    "Tanya Tara Tessa Theo Thomas Tobias Ulla Uma Ursula Vera Victor Viola Walter Wanda Wilma Xavier Yara Yusuf "
    "Zara Zoe"
).split()

SECTORS = (
    "Airways Bank Breweries Cement Chemicals Dairies Electric Foods Freight Glass Hotels Insurance Mining Motors "
    "Outfitters Paper Petroleum Plastics Press Rail Robotics Shipping Software Steel Telecom Textiles Timber Tobacco "
    "Tools Water"
).split()
INSTITUTES = ("University", "Institute", "College", "Observatory", "Laboratory", "Academy")
CLUBS = ("Rovers", "United", "Athletic", "Wanderers", "City", "Rangers", "Albion", "Harriers")
MONTHS = "January February March April May June July August September October November December".split()
YEARS = range(1987, 2008)


@dataclass(frozen=True)
class Fact:
    """One fact about a subject.

    Attributes:
        draw: name of the `World` method that draws the value, or the values to choose from.
        statements: phrasings of the statement.
        questions: phrasings of the question.
    """

    draw: str | tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Beat:
    """One kind of story.

    Attributes:
        name: name of the kind.
        subject: name of the `World` method that draws the subject.
        facts: the facts that a story tells.
    """

    name: str
    subject: str
    facts: tuple[Fact, ...]


def _beats() -> tuple[Beat, ...]:
    """The kinds of stories, from `beats.toml`."""
    beats = tomllib.loads(Path(__file__).with_name("beats.toml").read_text())["beat"]
    return tuple(
        Beat(
            beat["name"],
            beat["subject"],
            tuple(
                Fact(
                    tuple(fact["draw"]) if isinstance(fact["draw"], list) else fact["draw"],
                    tuple(fact["statements"]),
                    tuple(fact["questions"]),
                )
                for fact in beat["fact"]
            ),
        )
        for beat in beats
    )


BEATS = _beats()


@dataclass(frozen=True)
class Report:
    """The facts of one document, from which its text and questions are written.

    Attributes:
        values: the value of each fact of the beat.
        updates: index of the earlier report that this one supersedes; None if it supersedes none.
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
        questions_per_document: number of questions per document, 1 to 4, each about a different fact.
        update_rate: share of the stories with a later document that changes all facts, from 0 to 1.

    Raises:
        ValueError: for an unknown split, or an argument outside its range.
    """
    if documents < 1:
        raise ValueError(f"documents must be at least 1, got {documents}")
    if not 1 <= questions_per_document <= 4:
        raise ValueError(f"questions_per_document must be 1 to 4, got {questions_per_document}")
    if not 0.0 <= update_rate <= 1.0:
        raise ValueError(f"update_rate must lie in [0, 1], got {update_rate}")
    rng = random.Random(f"newswire/{split}/{seed}")
    reports = draw_reports(World(split, rng), rng, documents, update_rate)
    news: list[Document] = []
    questions: list[Question] = []
    for index, report in enumerate(reports):
        document_id = f"{split}-{seed}-{index:06d}"
        metadata = {"title": f"{report.subject}: {report.beat.name}", "date": draw_date(rng, report.year)}
        if report.updates is not None:
            metadata["updates"] = f"{split}-{seed}-{report.updates:06d}"
        news.append(Document(document_id, written(report, metadata["date"], rng), metadata))
        for slot in sorted(rng.sample(range(len(report.values)), questions_per_document)):
            question = _question_about(report, report.beat.facts[slot], rng)
            questions.append(Question(f"{document_id}-{slot}", question, (report.values[slot],), document_id))
    return QADataset("newswire", split, tuple(news), tuple(questions))


def draw_reports(world: World, rng: random.Random, documents: int, update_rate: float) -> list[Report]:
    """Draws the stories of a stream. An update comes up to 200 documents after the report that it supersedes."""
    reports: list[Report] = []
    due: dict[int, int] = {}  # index of an update -> index of the report that it supersedes
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


def draw_date(rng: random.Random, year: int) -> str:
    return f"{year}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def written(report: Report, date: str, rng: random.Random) -> str:
    """Writes a report as a paragraph: a dateline, the first fact, then the other facts in random order."""
    month, day = MONTHS[int(date[5:7]) - 1], int(date[8:])
    lead, *rest = [
        rng.choice(fact.statements).format(s=report.subject, a=value)
        for fact, value in zip(report.beat.facts, report.values)
    ]
    rng.shuffle(rest)
    return " ".join((f"{month} {day}, {report.year}.", lead, *rest))


def _question_about(report: Report, fact: Fact, rng: random.Random) -> str:
    """One phrasing of the question about a fact. If the facts changed over time, it names the time."""
    question = rng.choice(fact.questions).format(s=report.subject)
    if report.updates is not None and rng.random() < 0.5:
        return f"Now: {question}"
    if report.updates is not None or report.superseded or rng.random() < 0.15:
        return f"In {report.year}: {question}"
    return question


class World:
    """Draws names and figures for one split. `unique` draws names that identify a story.

    Args:
        split: the split to which all surnames and towns belong.
        rng: source of randomness.

    Raises:
        ValueError: for an unknown split.
    """

    def __init__(self, split: str, rng: random.Random) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown newswire split {split!r}; choose one of {', '.join(SPLITS)}")
        self.split = split
        self.rng = rng
        self._used_names: set[str] = set()

    def _stem(self, ends: list[str]) -> str:
        """A capitalized name of this split, of two or three syllables."""
        choice = self.rng.choice
        while True:
            first = choice(_ONSETS) + choice(_NUCLEI) + choice(_CODAS)
            name = (first + choice(ends)).capitalize()
            if split_of(name) == self.split:
                return name

    def surname(self) -> str:
        return self._stem(_SURNAME_ENDS)

    def town(self) -> str:
        return self._stem(_TOWN_ENDS)

    def person(self) -> str:
        return f"{self.rng.choice(FIRST_NAMES)} {self.surname()}"

    def company(self) -> str:
        return f"{self.surname()} {self.rng.choice(SECTORS)}"

    def institute(self) -> str:
        return f"{self.town()} {self.rng.choice(INSTITUTES)}"

    def club(self) -> str:
        return f"{self.town()} {self.rng.choice(CLUBS)}"

    def title(self) -> str:
        pattern = self.rng.choice(
            ("The {0} of {1}", "Return to {1}", "{0} and {2}", "The Last {0}", "Letters from {1}")
        )
        nouns = "Gardener Lighthouse Orchard Promise River Bridge Winter Sailor Mirror Clock".split()
        return pattern.format(self.rng.choice(nouns), self.town(), self.surname())

    def unique(self, draw: str) -> str:
        """Calls the method of this name until its result is new."""
        while True:
            name: str = getattr(self, draw)()
            if name not in self._used_names:
                self._used_names.add(name)
                return name

    def count(self) -> str:
        """A head count such as `85`, `340` or `2,600`."""
        value = self.rng.randint(11, 99) * self.rng.choice((1, 10, 100))
        return f"{value:,}"

    def millions(self) -> str:
        return f"${self.rng.randint(11, 989)} million"

    def thousands(self) -> str:
        return f"${self.rng.randint(11, 989)},000"

    def percent(self) -> str:
        return f"{self.rng.randint(41, 79)} percent"

    def score(self) -> str:
        high = self.rng.randint(1, 6)
        return f"{high}-{self.rng.randint(0, high - 1)}"


def split_of(name: str) -> str:
    """The split to which a name belongs: test for 8 % of all names, val for 4 %, train for the others."""
    bucket = zlib.crc32(name.lower().encode()) % 25
    return "test" if bucket < 2 else "val" if bucket == 2 else "train"

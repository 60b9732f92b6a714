"""Newswire: a generator of dated news paragraphs with questions, for work without a licensed corpus.

Each document tells four facts about a subject of its own. Names are built from syllables and belong to one split, so
the test stream has thousands of names that training never shows. For a share of the stories, a later document changes
every fact. Questions about such a pair name the year, and some questions about the later document say `now`. The
generator is seeded: equal arguments give equal documents on every machine.

There are more than a hundred thousand surnames and towns. A checksum of its letters assigns each of them to one split.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

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

ROLES = (
    "chief executive",
    "chairman",
    "finance director",
    "head of research",
    "treasurer",
    "general counsel",
    "president",
    "sales director",
    "chief engineer",
    "head of exports",
)
FACILITIES = (
    "warehouse", "factory", "refinery", "laboratory", "call centre", "shipyard", "training centre", "power station",
    "sawmill", "assembly plant",
)  # fmt: skip
FINDINGS = (
    "frog", "beetle", "orchid", "comet", "mineral", "fossil", "moss", "fish", "spider", "enzyme", "bat", "fungus",
)  # fmt: skip
CAUSES = (
    "flood", "storm", "fire", "landslide", "mudslide", "hailstorm", "tornado", "train crash", "gas leak", "blizzard",
)  # fmt: skip
CHARGES = (
    "fraud", "bribery", "tax evasion", "forgery", "arson", "smuggling", "perjury", "libel", "theft", "embezzlement",
)  # fmt: skip
GENRES = ("novel", "play", "opera", "film", "symphony", "poem", "memoir", "ballet")


@dataclass(frozen=True)
class Report:
    """The facts of one document, from which its text and questions are written.

    Attributes:
        beat: kind of the story.
        subject: subject of the story.
        values: the value of each fact of the beat.
        year: year of the document.
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
    if split not in SPLITS:
        raise ValueError(f"unknown newswire split {split!r}; choose one of {', '.join(SPLITS)}")
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
        nouns = (
            "Gardener",
            "Lighthouse",
            "Orchard",
            "Promise",
            "River",
            "Bridge",
            "Winter",
            "Sailor",
            "Mirror",
            "Clock",
        )
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


# `{s}` is the subject of the story, a name that no other story has; `{a}` is the value of the fact. A question names
# the subject and asks for one value. The first fact of a beat opens the story, so its statements name the subject.
BEATS = (
    Beat(
        "appointment",
        "company",
        (
            Fact(
                "person",
                (
                    "{s} has named {a} to its board.",
                    "{a} will join the board of {s}.",
                    "The board of {s} has a new member, {a}.",
                ),
                (
                    "Who joined the board of {s}?",
                    "Whom did {s} name to its board?",
                    "Who is the new board member of {s}?",
                ),
            ),
            Fact(
                ROLES,
                ("The newcomer starts as {a}.", "The post of {a} comes with the seat.", "The job is that of {a}."),
                ("What post was filled at {s}?", "As what does the newcomer at {s} start?"),
            ),
            Fact(
                "person",
                (
                    "The seat was held by {a} until now.",
                    "{a}, who held the seat before, retires.",
                    "The move follows the exit of {a}.",
                ),
                ("Who left the board of {s}?", "Who held the seat at {s} before?", "Whose exit did {s} announce?"),
            ),
            Fact(
                "count",
                ("The company employs {a} people.", "It has {a} workers.", "Its staff now numbers {a}."),
                ("How many people does {s} employ?", "How many workers does {s} have?"),
            ),
        ),
    ),
    Beat(
        "takeover",
        "company",
        (
            Fact(
                "company",
                (
                    "{s} has agreed to buy {a}.",
                    "{a} is to be taken over by {s}.",
                    "{s} said it would acquire {a}.",
                ),
                ("Which company did {s} buy?", "What did {s} agree to acquire?", "Which firm was taken over by {s}?"),
            ),
            Fact(
                "millions",
                ("The price is {a}.", "The deal is worth {a}.", "Shareholders will receive {a}."),
                ("How much did {s} pay in the takeover?", "What is the deal of {s} worth?"),
            ),
            Fact(
                "person",
                (
                    "{a} led the talks.",
                    "The deal was arranged by {a}.",
                    "The banker {a} advised the buyer.",
                ),
                ("Who arranged the deal for {s}?", "Who led the takeover talks of {s}?"),
            ),
            Fact(
                "town",
                (
                    "The joint head office will be in {a}.",
                    "Both firms will move to {a}.",
                    "Headquarters will be moved to {a}.",
                ),
                ("Where will the head office of {s} be?", "To which town will {s} move?"),
            ),
        ),
    ),
    Beat(
        "plant",
        "company",
        (
            Fact(
                "town",
                (
                    "{s} is building a new site in {a}.",
                    "{a} was chosen by {s} for its new site.",
                    "{s} breaks ground in {a}.",
                ),
                ("Where is {s} building its new site?", "Which town did {s} choose?", "In which town does {s} build?"),
            ),
            Fact(
                FACILITIES,
                ("It will be a {a}.", "Plans show a {a}.", "The project is a {a}."),
                ("What is {s} building?", "What kind of site does {s} plan?"),
            ),
            Fact(
                "count",
                ("The site will bring {a} jobs.", "Some {a} jobs are promised.", "It is to hire {a} people."),
                ("How many jobs will {s} bring?", "How many people will the new site of {s} hire?"),
            ),
            Fact(
                "millions",
                ("Construction costs {a}.", "The budget is {a}.", "The firm will spend {a}."),
                ("How much will {s} spend on its site?", "What is the budget of the site of {s}?"),
            ),
        ),
    ),
    Beat(
        "election",
        "town",
        (
            Fact(
                "person",
                ("{a} was elected mayor of {s}.", "Voters in {s} chose {a} as mayor.", "The new mayor of {s} is {a}."),
                ("Who was elected mayor of {s}?", "Who is the mayor of {s}?", "Whom did voters in {s} choose?"),
            ),
            Fact(
                "percent",
                ("The winner took {a} of the vote.", "The result was {a}.", "The final tally gave the winner {a}."),
                ("What share of the vote did the winner in {s} take?", "How large was the vote for the mayor of {s}?"),
            ),
            Fact(
                "person",
                ("{a} came second.", "The defeated rival was {a}.", "{a} conceded late at night."),
                ("Who lost the election in {s}?", "Who was the defeated rival in {s}?"),
            ),
            Fact(
                "count",
                ("In all, {a} ballots were cast.", "Turnout was {a} voters.", "Officials counted {a} votes."),
                ("How many ballots were cast in {s}?", "How many votes were counted in {s}?"),
            ),
        ),
    ),
    Beat(
        "match",
        "club",
        (
            Fact(
                "club",
                ("{s} beat {a} in the cup.", "{a} lost to {s}.", "{s} knocked out {a}."),
                ("Whom did {s} beat?", "Which club lost to {s}?", "Which club did {s} knock out?"),
            ),
            Fact(
                "score",
                ("The score was {a}.", "It ended {a}.", "The final whistle came at {a}."),
                ("What was the score of {s}?", "How did the match of {s} end?"),
            ),
            Fact(
                "person",
                ("{a} scored first.", "The opening goal came from {a}.", "{a} struck the first goal."),
                ("Who scored first for {s}?", "Who struck the opening goal for {s}?"),
            ),
            Fact(
                "count",
                ("A crowd of {a} watched.", "There were {a} spectators.", "Attendance was {a}."),
                ("How many spectators watched {s}?", "How large was the crowd at the match of {s}?"),
            ),
        ),
    ),
    Beat(
        "discovery",
        "institute",
        (
            Fact(
                "person",
                (
                    "{a} of {s} reports a discovery.",
                    "A team at {s} led by {a} has made a discovery.",
                    "{s} credits {a} with a discovery.",
                ),
                ("Who made the discovery at {s}?", "Who led the team at {s}?", "Whom does {s} credit?"),
            ),
            Fact(
                FINDINGS,
                ("The find is an unknown {a}.", "It is a new kind of {a}.", "The team describes a rare {a}."),
                ("What did the team at {s} discover?", "What kind of find does {s} report?"),
            ),
            Fact(
                "town",
                ("It was found near {a}.", "The trail began outside {a}.", "Samples came from {a}."),
                ("Where did the find of {s} come from?", "Near which town did {s} find it?"),
            ),
            Fact(
                "company",
                ("The work was paid for by {a}.", "{a} funded the study.", "Money came from {a}."),
                ("Who funded the study at {s}?", "Which company paid for the work at {s}?"),
            ),
        ),
    ),
    Beat(
        "prize",
        "person",
        (
            Fact(
                "title",
                ("{s} won a prize for {a}.", "The prize went to {s} for {a}.", "{a} has won {s} a prize."),
                ("For which work did {s} win a prize?", "What is the title of the work by {s}?"),
            ),
            Fact(
                GENRES,
                ("The jury praised the {a}.", "The {a} took years to finish.", "Critics had called the {a} bold."),
                ("What kind of work did {s} make?", "What did the jury of {s} praise?"),
            ),
            Fact(
                "thousands",
                ("The award comes with {a}.", "The purse is {a}.", "It is worth {a}."),
                ("How much money did {s} win?", "What is the award of {s} worth?"),
            ),
            Fact(
                "town",
                ("The ceremony was held in {a}.", "Guests gathered in {a}.", "It was handed over in {a}."),
                ("Where was the prize given to {s}?", "In which town was {s} honoured?"),
            ),
        ),
    ),
    Beat(
        "disaster",
        "town",
        (
            Fact(
                CAUSES,
                ("A {a} has hit {s}.", "{s} was struck by a {a}.", "People fled {s} after a {a}."),
                ("What hit {s}?", "What struck {s}?", "Why did people flee {s}?"),
            ),
            Fact(
                "count",
                ("At least {a} people were hurt.", "Doctors treated {a} people.", "The injured number {a}."),
                ("How many people were hurt in {s}?", "How many injured were there in {s}?"),
            ),
            Fact(
                "person",
                ("{a} leads the rescue.", "The rescue chief is {a}.", "Crews are directed by {a}."),
                ("Who leads the rescue in {s}?", "Who is the rescue chief in {s}?"),
            ),
            Fact(
                "millions",
                ("Damage is put at {a}.", "Losses may reach {a}.", "Insurers expect to pay {a}."),
                ("How large is the damage in {s}?", "What losses are expected in {s}?"),
            ),
        ),
    ),
    Beat(
        "trial",
        "person",
        (
            Fact(
                CHARGES,
                ("{s} was convicted of {a}.", "A court found {s} guilty of {a}.", "{s} must answer for {a}."),
                ("Of what was {s} convicted?", "What was the crime of {s}?", "What was {s} found guilty of?"),
            ),
            Fact(
                "person",
                ("{a} was the judge.", "The ruling came from judge {a}.", "Judge {a} read the verdict."),
                ("Who was the judge of {s}?", "Who read the verdict on {s}?"),
            ),
            Fact(
                "thousands",
                ("The fine is {a}.", "A fine of {a} was set.", "The court asked for {a}."),
                ("How large is the fine of {s}?", "What must {s} pay?"),
            ),
            Fact(
                "company",
                ("The case began with a complaint by {a}.", "The victim was {a}.", "{a} had brought the charges."),
                ("Who brought the charges against {s}?", "Which company was the victim of {s}?"),
            ),
        ),
    ),
    Beat(
        "results",
        "company",
        (
            Fact(
                "millions",
                ("{s} posted a profit of {a}.", "Profit at {s} came to {a}.", "{s} earned {a} in the year."),
                ("How much profit did {s} post?", "What did {s} earn?", "What was the profit of {s}?"),
            ),
            Fact(
                "person",
                (
                    "{a} presented the figures.",
                    "The results were read out by {a}.",
                    "Analyst {a} called it a surprise.",
                ),
                ("Who commented on the results of {s}?", "Who spoke about the figures of {s}?"),
            ),
            Fact(
                "town",
                ("Sales were best in {a}.", "The branch in {a} did best.", "Demand rose most in {a}."),
                ("Where did {s} sell most?", "Which branch of {s} did best?"),
            ),
            Fact(
                "percent",
                ("Its shares gained {a}.", "The stock rose {a}.", "Shares closed up {a}."),
                ("How much did the shares of {s} gain?", "By how much did the stock of {s} rise?"),
            ),
        ),
    ),
)

"""Questions about newswire that no single document answers: two-hop, comparison and counting questions.

Two-hop questions describe a company by a fact from another story: "Who left the board of the company that Bell Press
bought?". Comparisons ask which of two subjects has the larger figure. Counting questions ask how many of three or four
subjects exceed a given figure. Each question needs all of its documents, so with one retrieved document in front of it,
it can only be guessed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mac_rag.data.newswire.generate import Fact, Report, World, draw_date, draw_reports, written
from mac_rag.data.types import Document, QADataset, Question

KINDS = ("two-hop", "comparison", "counting")
_MOST_COMPARED = 4  # most subjects of a counting question

# Beat -> a description, for questions, of the company that a story of this beat names.
_DESCRIPTIONS = {
    "takeover": "the company that {s} bought",
    "discovery": "the company that funded the study at {s}",
    "trial": "the company that brought the charges against {s}",
}
# Beat and kind of its figure -> a question that compares two subjects, and one that counts some.
_COMPARED: dict[tuple[str, str], tuple[str, str]] = {
    ("appointment", "count"): (
        "Which company employs more people, {a} or {b}?",
        "How many of the companies {names} employ more than {n} people?",
    ),
    ("takeover", "millions"): (
        "Which company pays more for its takeover, {a} or {b}?",
        "How many of the companies {names} pay more than {n} for a takeover?",
    ),
    ("plant", "count"): (
        "Whose new site brings more jobs, that of {a} or that of {b}?",
        "How many of the companies {names} bring more than {n} jobs?",
    ),
    ("election", "count"): (
        "Where were more ballots cast, in {a} or in {b}?",
        "In how many of the towns {names} were more than {n} ballots cast?",
    ),
    ("match", "count"): (
        "Whose match had more spectators, that of {a} or that of {b}?",
        "How many of the clubs {names} had more than {n} spectators?",
    ),
    ("disaster", "count"): (
        "Where were more people hurt, in {a} or in {b}?",
        "In how many of the towns {names} were more than {n} people hurt?",
    ),
    ("results", "millions"): (
        "Which company earned more, {a} or {b}?",
        "How many of the companies {names} earned more than {n}?",
    ),
}
_WORDS = ("zero", "one", "two", "three", "four")


def generate_multi_document(
    split: str = "test", documents: int = 300, *, seed: int = 0, questions_per_kind: int = 100
) -> QADataset:
    """Writes a stream of news documents, in which companies occur in several stories, with questions of all kinds.

    The ids of questions begin with their kind. Each names the last of the two to four documents that it needs, and has
    the others as `further_ids`.

    Args:
        split: `train`, `val` or `test`; splits share no surname and no town.
        documents: number of documents; few documents allow fewer questions.
        seed: random seed; equal seeds give equal streams.
        questions_per_kind: most questions of each kind.

    Raises:
        ValueError: for an unknown split, or a number below 1.

    Examples:
        >>> stream = generate_multi_document("test", 60, questions_per_kind=1)
        >>> [(question.id, 1 + len(question.further_ids)) for question in stream.questions]
        [('two-hop-00000', 2), ('comparison-00000', 2), ('counting-00000', 3)]
    """
    if documents < 1 or questions_per_kind < 1:
        raise ValueError(f"documents and questions_per_kind must be at least 1, got {documents}, {questions_per_kind}")
    rng = random.Random(f"newswire/multi-document/{split}/{seed}")
    reports = draw_reports(World(split, rng), rng, documents, update_rate=0.0)
    links = _link(reports, rng)
    ids = [f"{split}-{seed}-{index:06d}" for index in range(documents)]
    news = []
    for document_id, report in zip(ids, reports, strict=True):
        metadata = {"title": f"{report.subject}: {report.beat.name}", "date": draw_date(rng, report.year)}
        news.append(Document(document_id, written(report, metadata["date"], rng), metadata))
    questions: list[Question] = []
    makers: dict[str, Callable[[], Iterator[_Draft]]] = {
        "two-hop": lambda: _two_hop(reports, links, rng),
        "comparison": lambda: _comparisons(reports, rng),
        "counting": lambda: _counts(reports, rng),
    }
    for kind in KINDS:
        drafts = list(makers[kind]())
        chosen = rng.sample(drafts, min(questions_per_kind, len(drafts)))
        for number, draft in enumerate(chosen):
            *others, last = (ids[place] for place in draft.reports)
            name = f"{kind}-{number:05d}"
            questions.append(Question(name, draft.question, draft.answers, last, further_ids=tuple(others)))
    return QADataset("newswire", split, tuple(news), tuple(questions))


@dataclass(frozen=True)
class _Draft:
    """A question with its accepted answers, and the indices of the reports that it needs."""

    question: str
    answers: tuple[str, ...]
    reports: tuple[int, ...]


def _link(reports: list[Report], rng: random.Random) -> dict[int, int]:
    """Replaces companies in stories by companies that have stories of their own; changes the stories in place.

    Returns index of a story -> index of the story of the company that it names. No two stories name the same company.
    """
    companies = [place for place, report in enumerate(reports) if report.beat.subject == "company"]
    rng.shuffle(companies)
    links: dict[int, int] = {}
    for place, report in enumerate(reports):
        target = next((company for company in companies if company != place), None)
        if report.beat.name not in _DESCRIPTIONS or target is None:
            continue
        companies.remove(target)
        slot = _slot(report, "company")
        values = (*report.values[:slot], reports[target].subject, *report.values[slot + 1 :])
        reports[place], links[place] = replace(report, values=values), target
    return links


def _slot(report: Report, draw: str) -> int:
    """The index of the fact of a kind among a story's facts."""
    return [fact.draw for fact in report.beat.facts].index(draw)


def _two_hop(reports: Sequence[Report], links: Mapping[int, int], rng: random.Random) -> Iterator[_Draft]:
    """Yields a question about each company that another story names, described by that story."""
    for place, target in links.items():
        description = _DESCRIPTIONS[reports[place].beat.name].format(s=reports[place].subject)
        facts: list[tuple[Fact, str]] = list(zip(reports[target].beat.facts, reports[target].values, strict=True))
        fact, value = rng.choice(facts)
        yield _Draft(rng.choice(fact.questions).format(s=description), (value,), (place, target))


def _comparisons(reports: Sequence[Report], rng: random.Random) -> Iterator[_Draft]:
    """Yields comparisons of neighbours in a random order of the stories, for each kind of figure."""
    for (beat, draw), (template, _) in _COMPARED.items():
        places = _places(reports, beat, rng)
        for first, second in zip(places[::2], places[1::2], strict=False):
            figures = [_figure(reports[place], draw) for place in (first, second)]
            if figures[0] == figures[1]:
                continue
            larger = reports[first if figures[0] > figures[1] else second].subject
            question = template.format(a=reports[first].subject, b=reports[second].subject)
            yield _Draft(question, (larger,), (first, second))


def _counts(reports: Sequence[Report], rng: random.Random) -> Iterator[_Draft]:
    """Yields counts among three or four stories, for each kind of figure. All counts are equally likely, also 0."""
    for (beat, draw), (_, template) in _COMPARED.items():
        places = _places(reports, beat, rng)
        while len(places) >= 3:
            some = places[: rng.randint(3, _MOST_COMPARED)]
            places = places[len(some) :]
            figures = sorted((_figure(reports[place], draw) for place in some), reverse=True)
            count = rng.randint(0, len(figures))
            # The limit lies between the smallest figure that counts and the largest that does not.
            above = figures[count - 1] if count else 2 * figures[0]
            below = figures[count] if count < len(figures) else 0
            limit = (above + below) // 2
            if above == below or sum(figure > limit for figure in figures) != count:
                continue
            *names, last = (reports[place].subject for place in some)
            shown = f"{limit:,}" if draw == "count" else f"${limit} million"
            question = template.format(names=f"{', '.join(names)} and {last}", n=shown)
            yield _Draft(question, (str(count), _WORDS[count]), tuple(some))


def _places(reports: Sequence[Report], beat: str, rng: random.Random) -> list[int]:
    """The indices of the stories of a beat, in random order."""
    places = [place for place, report in enumerate(reports) if report.beat.name == beat]
    rng.shuffle(places)
    return places


def _figure(report: Report, draw: str) -> int:
    """The figure of a kind in a story, as a number."""
    return int(re.sub(r"\D", "", report.values[_slot(report, draw)]))

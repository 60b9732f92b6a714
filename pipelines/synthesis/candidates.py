"""Subjects of questions about a passage: answers chosen from it by rules, and kinds of questions that need none."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mac_rag.data.metrics import normalize
from mac_rag.lm.text_tokenizer import Span
from pipelines.corpora.salient_spans import dates, names, numbers

# The answer is chosen from the passage; the LM writes the question.
SPAN_KINDS = ("name", "date", "number", "phrase")
# The LM writes question and answer.
OPEN_KINDS = ("definition", "reason", "overview")
KINDS = SPAN_KINDS + OPEN_KINDS

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'“‘(]?[A-Z0-9])|\n+")
_YEAR = re.compile(r"1\d{3}|20\d\d")
_OPENINGS = {"date": "When", "number": "How", "phrase": "What"}
# Two or three words after an article, up to a word or a sign that ends a noun phrase.
_PHRASE = re.compile(
    r"\b(?:[Tt]he|[Aa]n?) ([a-z][a-z'-]{2,}(?: [a-z][a-z'-]{2,}){1,2})"
    r"(?=[.,;:)]|$| (?:of|in|on|at|and|or|is|was|are|were|has|had|to|for|by|with|from|that|which|who|as)\b)"
)
_EMPTY_NOUNS = frozenset(
    "same other first last next one two three most best rest time way number part case use end fact result year years "
    "day century people thing kind type form beginning".split()
)
_MOST_WORDS = 6  # of a chosen answer


@dataclass(frozen=True)
class Candidate:
    """A question to be written.

    Attributes:
        kind: one of `KINDS`.
        answer: the answer that was chosen from the passage; None for a kind of `OPEN_KINDS`.
        sentence: the sentence of the passage that holds it; empty without an answer.
    """

    kind: str
    answer: str | None = None
    sentence: str = ""

    @property
    def opening(self) -> str:
        """The word that the question begins with; empty if it may be any. A name may be anything's."""
        return _OPENINGS.get(self.kind, "")


def choose_candidates(passage: str, count: int, rng: random.Random) -> list[Candidate]:
    """Draws what to ask about a passage, of all kinds in turn, until there are as many as wanted or no more.

    No answer is chosen twice. Of the kinds whose answers are not chosen, each comes once.

    Args:
        passage: the passage, in English; of texts in other languages the rules find numbers, and names in capitals.
        count: largest number of candidates.
        rng: draws kinds and answers.

    Examples:
        >>> passage = "The mill at Ulvby was built by Karl Ek in 1862."
        >>> drawn = choose_candidates(passage, 9, random.Random(0))
        >>> sorted((each.kind, each.answer) for each in drawn if each.answer is not None)
        [('date', '1862'), ('name', 'Karl Ek'), ('name', 'Ulvby')]
    """
    left: dict[str, list[Candidate]] = {kind: [Candidate(kind)] for kind in OPEN_KINDS}
    whole = f" {normalize(passage)} "
    for kind, spans in _spans(passage).items():
        by_answer = {normalize(passage[first:end]): (first, end) for first, end in reversed(spans)}
        left[kind] = [
            Candidate(kind, passage[first:end], sentence_of(passage, first))
            for words, (first, end) in sorted(by_answer.items(), key=lambda item: item[1])
            if f" {words} " in whole and words and len(words.split()) <= _MOST_WORDS  # not a part of a word: 1950s
        ]
    chosen: list[Candidate] = []
    order = list(KINDS)
    rng.shuffle(order)
    taken: set[str] = set()
    while len(chosen) < count and any(left.values()):
        for kind in order:
            if not left[kind] or len(chosen) == count:
                continue
            candidate = left[kind].pop(rng.randrange(len(left[kind])))
            words = normalize(candidate.answer or "")
            if words not in taken:
                chosen.append(candidate)
            taken |= {words} - {""}
    return chosen


def sentence_of(passage: str, place: int) -> str:
    """The sentence of a passage that holds a character."""
    first = 0
    for match in _SENTENCE.finditer(passage):
        if match.start() > place:
            return passage[first : match.start()].strip()
        first = match.end()
    return passage[first:].strip()


def _spans(passage: str) -> Mapping[str, Sequence[Span]]:
    """The places of possible answers by their kind; none overlaps one of an earlier kind."""
    # Ordinals, and conversions in brackets, are no answers to "How many".
    in_digits = [(first, end) for first, end in numbers(passage) if not passage[:first].endswith("(")]
    in_digits = [(first, end) for first, end in in_digits if passage[end - 1] in "0123456789%"]
    years = [span for span in in_digits if _YEAR.fullmatch(passage[slice(*span)])]
    phrases = [match.span(1) for match in _PHRASE.finditer(passage) if not _EMPTY_NOUNS & {*match[1].split()}]
    known = list(_apart(dates(passage), ()))
    found = {"date": known + list(_apart(years, known))}
    taken = list(found["date"])
    called = [
        (first, end)
        for first, end in names(passage)
        if passage[first].isupper() and not passage[first:end].endswith(("'s", "’s"))
    ]
    for kind, spans in (("number", in_digits), ("name", called), ("phrase", phrases)):
        found[kind] = list(_apart(spans, taken))
        taken += found[kind]
    return found


def _apart(spans: Sequence[Span], taken: Sequence[Span]) -> Iterator[Span]:
    """The spans that overlap none of those that are taken."""
    for first, end in spans:
        if all(end <= other_first or first >= other_end for other_first, other_end in taken):
            yield first, end

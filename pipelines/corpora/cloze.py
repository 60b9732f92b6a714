"""Cloze questions: made from a sentence by leaving out one of its names, numbers or phrases."""

from __future__ import annotations

import random
import re

from mac_rag.data.types import Document, Question

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_NUMBER = re.compile(r"\b\d[\d,.]*\d\b|\b\d\b")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][\w'-]+(?: (?:of |de |the )?[A-Z][\w'-]+)*")
_PHRASE = re.compile(r"(?:(?<=\bthe )|(?<=\bof )|(?<=\ban )|(?<=\ba ))[a-z]{4,}(?: [a-z]{4,})?\b")
_KINDS = (_NUMBER, _NAME, _NAME, _PHRASE)
_PLACE = re.compile(r"\b(?:in|at|from|near) $")
_COMMON = frozenset("a an the of to in on at by for with and or as that which from its his her their it he she".split())

SENTENCE_WORDS = range(7, 41)
PARAGRAPH_WORDS = range(40, 201)


def is_paragraph(text: str) -> bool:
    """True if a line of a text is long enough to ask about and short enough to read at once."""
    return len(text.split()) in PARAGRAPH_WORDS


def cloze_questions(document: Document, count: int, rng: random.Random) -> list[Question]:
    """Questions that ask for what was left out of a sentence, each of another sentence.

    The question word stands in the place of the answer; or, as people ask, in front of the words that followed the
    answer and then those that preceded it. Some other words are left out, so that finding the sentence takes more than
    finding the same run of words. Such questions need no annotation (Lewis et al., 2019, "Unsupervised Question
    Answering by Cloze Translation").

    Args:
        document: the text to ask about.
        count: largest number of questions.
        rng: draws sentences, answers and wording.
    """
    sentences = _SENTENCE.split(document.text)
    rng.shuffle(sentences)
    questions: list[Question] = []
    for sentence in sentences:
        pair = _question(sentence, rng) if len(sentence.split()) in SENTENCE_WORDS else None
        if pair is not None:
            name = f"{document.id}/cloze-{len(questions)}"
            questions.append(Question(name, pair[0], (pair[1],), document.id))
        if len(questions) == count:
            break
    return questions


def _question(sentence: str, rng: random.Random) -> tuple[str, str] | None:
    """A question on a sentence and its answer, or None if the sentence holds nothing to ask for."""
    kinds = {pattern: [m for m in pattern.finditer(sentence) if not _cuts_name(m)] for pattern in _KINDS}
    pattern = rng.choice(_KINDS)
    if not kinds[pattern]:
        return None
    match = rng.choice(kinds[pattern])
    answer, before, after = match[0], sentence[: match.start()], sentence[match.end() :].rstrip(".!? ")
    word = _question_word(pattern, answer, before, rng)
    left, right = _thinned(before, rng), _thinned(after, rng)
    if rng.random() < 0.7:
        return " ".join([word[0].upper() + word[1:], *right, *left]) + "?", answer
    return " ".join([*left, word, *right]) + "?", answer


def _cuts_name(match: re.Match[str]) -> bool:
    """True if the word before a name is capitalised as well, as where a name opens a sentence."""
    before = match.string[: match.start()].split()
    return match.re is _NAME and bool(before) and before[-1].strip("\"'(")[:1].isupper()


def _question_word(pattern: re.Pattern[str], answer: str, before: str, rng: random.Random) -> str:
    if pattern is _NUMBER:
        if re.fullmatch(r"1\d{3}|20\d\d", answer):
            return rng.choice(("when", "what year", "in what year"))
        return rng.choice(("how many", "what number"))
    if pattern is _NAME:
        return "where" if _PLACE.search(before) and rng.random() < 0.7 else rng.choice(("who", "what", "which"))
    return "what"


def _thinned(text: str, rng: random.Random) -> list[str]:
    """At most twelve words, without punctuation around them; some are left out, common ones more often."""
    words = (word.strip(',;:()"') for word in text.split())
    return [word for word in words if word and rng.random() > (0.5 if word.lower() in _COMMON else 0.2)][:12]

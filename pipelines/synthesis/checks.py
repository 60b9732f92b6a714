"""The checks of self-study, by which faulty pairs of a question and its answer are dropped."""

from __future__ import annotations

import re

import Stemmer

from mac_rag.data.metrics import f1, normalize
from pipelines.synthesis.candidates import SPAN_KINDS
from pipelines.synthesis.prompts import EXAMPLE_NAMES, Written

# The checks in their order, and their findings. A pair counts for the first check that it fails.
CHECKS = {
    "malformed": "no question, or no answer, was written",
    "outside": "the question refers to the passage, or to “he” without a name",
    "given away": "the question holds its answer",
    "unsupported": "the answer does not follow from the document",
    "round trip": "the LM itself answers otherwise",
    "duplicate": "another question is the same, or nearly so",
}
AGREEMENT = 0.5  # least F1 of the LM's own answer on the answer
_SUPPORTED = 0.8  # least share of an answer's words that the document holds
_NEW = 0.5  # least share of an answer's words that its question lacks; small LMs like to repeat the question
_NEAR = 0.8  # share of common words from which two questions are nearly the same

_THE_TEXT = re.compile(
    r"\b(?:this|the|that|these|given|above|following|provided) (?:given |above |following |provided )?"
    r"(?:passage|text|document|paragraph|excerpt|article|sentence|context|answer|question)s?\b"
    r"|\b(?:mentioned|described|stated|listed) (?:here|above|below)\b|\bof the following\b",
    re.IGNORECASE,
)
_PRONOUN = re.compile(r"\b(?:he|him|his|she|her|hers|it|its|they|them|their|theirs|this|these|those)\b", re.IGNORECASE)
_NAMES_SOMETHING = re.compile(r"(?<=\s)[\"'“‘(]?(?:[^\W\d_a-zß-öø-ÿ]|\d)")
_COMMON = frozenset(
    "a an the and or of to in on at by for from with as that which who whom whose what when where why how is are was "
    "were be been being has have had do does did not no it its they them their he him his she her this these those "
    "there than then so because since also into over under between after before during about such can could will "
    "would may might must should if but one some any all more most other".split()
)
_stem = Stemmer.Stemmer("english").stemWords


def fault_of_question(question: str, passage: str) -> str | None:
    """The check that a question fails, whatever its answer; None if it fails none.

    A question with a pronoun passes if it names something in capitals or digits. A question that names the subject of
    an example of the prompt fails, unless the passage names it, too.

    Examples:
        >>> [fault_of_question(asked, "A mill.") for asked in ("What does the passage say?", "When did he leave?")]
        ['outside', 'outside']
        >>> fault_of_question("When did Karl Ek leave his mill?", "A mill.") is None
        True
    """
    from_examples = EXAMPLE_NAMES.intersection(normalize(question).split()) - {*normalize(passage).split()}
    if from_examples or _THE_TEXT.search(question):
        return "outside"
    return "outside" if _PRONOUN.search(question) and not _NAMES_SOMETHING.search(question) else None


def fault_of_answer(kind: str, pair: Written, passage: str) -> str | None:
    """The check that an answer fails beside its question and its passage; None if it fails none.

    A chosen answer must stand in the passage, and an answer that the LM wrote must follow from it (see `follows`) and
    say something: half of its words must be others than the question's.

    Examples:
        >>> fault_of_answer("name", Written("Who was Ada Berg?", "Ada Berg"), "Ada Berg left.")
        'given away'
        >>> fault_of_answer("reason", Written("Why did it close?", "because of 3 fires"), "It closed because of fire.")
        'unsupported'
    """
    if stands_in(pair.answer, pair.question):
        return "given away"
    words = _content(pair.answer)
    new = words - _content(pair.question)
    if words and (not new or (kind not in SPAN_KINDS and len(new) < _NEW * len(words))):
        return "given away"
    supported = stands_in(pair.answer, passage) or (kind not in SPAN_KINDS and follows(pair.answer, passage))
    return None if supported else "unsupported"


def agrees(answer: str | None, expected: str) -> bool:
    """True if the LM's own answer agrees with the expected one: it holds it, or has an F1 of at least one half.

    Many LMs answer in whole sentences.

    Examples:
        >>> agrees("It was built in 1862.", "1862"), agrees("In spring", "1862")
        (True, False)
    """
    return answer is not None and (f1(answer, expected) >= AGREEMENT or stands_in(expected, answer))


def stands_in(answer: str, text: str) -> bool:
    """True if an answer stands in a text, without regard to case, punctuation and articles, as SQuAD compares them."""
    words = normalize(answer)
    return bool(words) and f" {words} " in f" {normalize(text)} "


def follows(answer: str, passage: str) -> bool:
    """True if the passage holds four fifths of the answer's words, by their stems, and all of its numbers.

    Words such as articles and pronouns do not count.

    Examples:
        >>> follows("its cables were rusting", "It closed, because the cables had rusted.")
        True
    """
    words, known = _content(answer), _content(passage)
    if not words or any(any(map(str.isdigit, word)) for word in words - known):
        return False
    return len(words & known) >= _SUPPORTED * len(words)


class Duplicates:
    """Questions that came before.

    Examples:
        >>> known = Duplicates()
        >>> [known.add("a", "When was the mill at Ulvby built?", "1862") for _ in range(2)]
        [False, True]
        >>> known.add("a", "When was the mill built at Ulvby?", "In 1862"), known.add("b", "Who built it?", "Karl Ek")
        (True, False)
    """

    def __init__(self) -> None:
        self._equal: set[str] = set()
        self._near: dict[tuple[str, str], list[frozenset[str]]] = {}

    def add(self, document_id: str, question: str, answer: str) -> bool:
        """Adds a question, and says whether it is a duplicate, which is not added.

        A duplicate has the words of another question, whatever its document, or four fifths of the words of one about
        the same document that has the same answer.
        """
        written = normalize(question)
        words = frozenset(written.split())
        others = self._near.setdefault((document_id, " ".join(sorted(_content(answer)))), [])
        near = any(len(words & other) >= _NEAR * len(words | other) for other in others)
        if near or written in self._equal:
            return True
        others.append(words)
        self._equal.add(written)
        return False


def _content(text: str) -> set[str]:
    """The stems of a text's words that are not common ones."""
    return set(_stem([word for word in normalize(text).split() if word not in _COMMON]))

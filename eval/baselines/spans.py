"""Salient spans of a text: named entities by spaCy, or names, dates and numbers by rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from eval.baselines.weighting import SalientSpanWeights
from mac_rag.lm.text_tokenizer import Span

if TYPE_CHECKING:
    from spacy.language import Language

RULES = "rules for names, dates and numbers"
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = re.compile(
    rf"\b(?:(?:\d{{1,2}} )?(?:{_MONTHS})(?: \d{{1,2}})?(?:,? \d{{4}})?|\d{{4}}-\d{{2}}-\d{{2}}|"
    r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)\b"
)
_NUMBER = re.compile(r"[$€£]?\b\d[\d,.]*\d(?:st|nd|rd|th|%)?|[$€£]?\b\d(?:st|nd|rd|th|%)?")
# Consecutive capitalised words, also joined by a lower-case particle or an ampersand.
_WORD = r"[^\W\d_a-zß-öø-ÿ][\w'’.-]*\w|[^\W\d_a-zß-öø-ÿ]"
_NAME = re.compile(rf"(?<!\w)(?:{_WORD})(?:(?: | of | de | van | von | & )(?:{_WORD}))*")
_SENTENCE = re.compile(r"(?:^|[.!?:]['\"”’)]*\s+|\n)['\"“‘(]*$")
# Words that begin sentences far more often than names.
_COMMON = frozenset(
    "a after all also although an and another as at before both but by during each every few for from he her here his "
    "how i if in it its last many more most much my new next no not now of on one only or other our several she since "
    "so some such that the their then there these they this those though three through to two under until we what when "
    "where which while who why with yet you your".split()
)


def rule_spans(text: str) -> list[Span]:
    """Names, dates and numbers, recognized by capitals and digits.

    A single capitalised word at the beginning of a sentence is taken for an ordinary word.
    """
    spans = [match.span() for pattern in (_DATE, _NUMBER) for match in pattern.finditer(text)]
    for match in _NAME.finditer(text):
        first, end = match.span()
        at_start = _SENTENCE.search(text, 0, first) is not None
        head = text[first:end].split(" ", 1)
        if head[0].lower() in _COMMON:
            if len(head) == 1:
                continue
            first += len(head[0]) + 1
        elif len(head) == 1 and at_start:
            continue
        spans.append((first, end))
    return sorted(set(spans))


def spacy_spans(pipeline: Language) -> Callable[[str], Sequence[Span]]:
    """A function that finds the named entities of a text by a spaCy pipeline."""
    return lambda text: [(entity.start_char, entity.end_char) for entity in pipeline(text).ents]


def salient_spans() -> SalientSpanWeights:
    """Weights by an installed English spaCy pipeline, or else by the rules; the setting `spans` names the finder."""
    name = _pipeline()
    if name is None:
        return SalientSpanWeights(rule_spans, RULES)
    import spacy

    return SalientSpanWeights(spacy_spans(spacy.load(name)), f"spaCy {name}")


def _pipeline() -> str | None:
    """The name of an installed English pipeline: the published small one if it is there; None without any."""
    english = sorted(point.name for point in entry_points(group="spacy_models") if point.name.startswith("en_"))
    return "en_core_web_sm" if "en_core_web_sm" in english else next(iter(english), None)

"""Names, dates and numbers of an English text, found by rules: by capitals, digits and the names of months."""

from __future__ import annotations

import re

from mac_rag.lm.text_tokenizer import Span

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


def dates(text: str) -> list[Span]:
    """Dates: with the name of a month or of a weekday, or in digits as ISO 8601 writes them."""
    return [match.span() for match in _DATE.finditer(text)]


def numbers(text: str) -> list[Span]:
    """Numbers in digits, with a currency sign before them, and an ordinal's ending or a percent sign after them."""
    return [match.span() for match in _NUMBER.finditer(text)]


def names(text: str) -> list[Span]:
    """Names: capitalised words that follow each other.

    A single capitalised word at the beginning of a sentence is taken for an ordinary word.
    """
    spans = []
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
    return spans


def rule_spans(text: str) -> list[Span]:
    """Names, dates and numbers of a text; they may overlap."""
    return sorted({*dates(text), *numbers(text), *names(text)})

"""Which documents an answer rests on, and which sentence of them.

A document is a candidate if the LM read it in front of the question, or if it is among the `LOOKED_AT` documents to
which memory attends most. Candidates are ordered by

1. the share of the answer's words that their best sentence holds, because an answer that a text does not hold came from
   elsewhere;
2. the sum of the document's share of the attention and the sentence's share of the question's words;
3. the retriever's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mac_rag.bank.base_reader import DocumentMass, Reader
from mac_rag.data.characters import as_written, find_words, word_forms, words
from mac_rag.data.dates import date_in, moment_of, written
from mac_rag.data.types import Source
from mac_rag.errors import DataError
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.retrieval.base import Hit

# Abbreviations at which the segmenter would cut: in front of a number, and in front of a small letter.
_BEFORE_NUMBER = re.compile(
    r"\b(?:approx|appr|ca|circa|est|max|min|avg|vols?|nos?|nrs?|pp?|pts?|chs?|chap|secs?|arts?|paras?|eds?|figs?|eqs?|refs?"
    r"|abs|bd|tel|ext|ver|rev|bldg|apt|rm|temp|alt|lat|long|op|bk|col|ll?|vv?)\.\s*\Z",
    re.IGNORECASE,
)
_SHORT = re.compile(r"\b[^\W\d_]{1,5}\.\s*\Z")
_BREAK = re.compile(r"\s*\n\s*")
_GAP = re.compile(r"\n\s*\n")
_SPACE = re.compile(r"[^\S\n]")  # of any kind, each of which becomes a plain space for the segmenter
_LONGEST = 1 << 16  # characters that the segmenter reads at once
_LEAST_SHARE = 0.5  # a sentence counts if it holds at least this share of the answer's words
# Documents with most attention that are candidates, even if fewer sources are asked for: the document that holds the
# answer may not be the one with most attention.
LOOKED_AT = 8


def find_sources(
    questions: Sequence[str],
    answers: Sequence[str | None],
    read: Sequence[Mapping[str, str]],
    masses: DocumentMass | None,
    reader: Reader,
    most: int,
) -> list[tuple[Source, ...]]:
    """The documents that each answer rests on.

    Args:
        questions: B questions.
        answers: B answers; None for an answer that is not known.
        read: for each question, document id -> text that the LM read, the best first.
        masses: the attention mass of the documents in memory; None without memory.
        reader: reads the bank, which knows their metadata and may hold their texts.
        most: most sources of an answer.

    Returns:
        For each answer at most `most` sources, the most important one first.
    """
    sources = []
    for row, (question, answer, texts) in enumerate(zip(questions, answers, read, strict=True)):
        shares: dict[str, float] = {}
        if masses is not None:
            found = masses.highest(row, max(most, LOOKED_AT))
            shares = {name: value for name, value in found.items() if value > 0 or not reader.sees_some}
            shares |= masses.of(row, [name for name in texts if name not in shares])
        candidates = [
            _source(name, shares.get(name), texts.get(name), question, answer, reader)
            for name in dict.fromkeys([*texts, *shares])
        ]
        candidates.sort(key=_rank, reverse=True)  # stable, so equals keep the retriever's order
        sources.append(tuple(source for source, _ in candidates[:most]))
    return sources


def texts_read(hits: Sequence[Hit], prompt: FittedPrompt) -> dict[str, str]:
    """Document id -> the text that the LM reads of it, for each retrieved document, from its prompt or from the bank.

    Blank documents, documents left out to fit the window, and texts that were not retrieved are not included.

    Args:
        hits: the retrieved documents, the best first.
        prompt: the prompt with them. Its `contexts` are the texts of the first ones, the last one possibly truncated.

    Examples:
        >>> hits = [Hit("bridge", "It opened.", 3.0), Hit("river", "A ferry.", 2.0), Hit("museum", "It closed.", 1.0)]
        >>> texts_read(hits, FittedPrompt("What opened?", (), ("It opened.", "A fe"), truncated=True))
        {'bridge': 'It opened.', 'river': 'A fe'}
    """
    from_bank = set(prompt.read)
    contexts = iter([text for text in prompt.contexts if text.strip()])
    known = [hit for hit in hits if hit.document_id and hit.text.strip()]
    texts = {hit.document_id: hit.text if hit.document_id in from_bank else next(contexts, "") for hit in known}
    return {name: text for name, text in texts.items() if text}


def in_letters_of(answer: str, sources: Sequence[Source], texts: Sequence[str] = ()) -> str | None:
    """An answer with the letters and spaces of the first document in which it stands, first in its sentence.

    Args:
        answer: the answer.
        sources: the documents that it rests on, the most important one first.
        texts: further texts that the LM has read.

    Returns:
        None if it stands in none of them.

    Examples:
        >>> in_letters_of("zoe o ' brien", [Source("press", text="It is run by Zo\u00eb O'Brien.")])
        "Zo\u00eb O'Brien"
    """
    whole = [text for text in (*(source.text for source in sources), *texts) if text]
    sentences = [source.sentence for source in sources if source.sentence]
    found = next(filter(None, (as_written(text, answer) for text in (*sentences, *whole))), None)
    return None if found is None else _BREAK.sub(" ", found)


def source_record(source: Source, answer: str | None = None) -> dict[str, Any]:
    """A source as values that JSON can hold, without its whole text.

    `attention` is its share, and the date is in ISO 8601. `span` is the position of the sentence in the text, and
    `highlights` are the positions of the answer in the sentence: start and end in characters (code points).

    Examples:
        >>> record = source_record(Source("press", share=0.5, text="It moved. It employs 180.", span=(10, 25)), "180")
        >>> record["document_id"], record["attention"], record["sentence"], record["highlights"]
        ('press', 0.5, 'It employs 180.', [(11, 14)])
    """
    sentence = source.sentence
    return {
        "document_id": source.document_id,
        "attention": source.share,
        "retrieved": source.retrieved,
        "date": None if source.date is None else written(moment_of(source.date)),
        "sentence": sentence,
        "span": source.span,
        "highlights": [] if sentence is None or answer is None else highlights(sentence, answer),
        "metadata": dict(source.metadata),
    }


def highlights(text: str, answer: str) -> list[tuple[int, int]]:
    """Where an answer occurs in a text: start and end of the first place with all of its words in sequence.

    If there is no such place: start and end of each word that is one of the answer's.

    Examples:
        >>> highlights("Of the people, it employs 180 people.", "180 people")
        [(26, 36)]
        >>> highlights("It employs 180 young people.", "180 people")
        [(11, 14), (21, 27)]
    """
    sought = word_forms(answer)
    found = words(text)
    whole = find_words(found, sought)
    return [whole] if whole else [(word.start, word.end) for word in found if word.form in sought]


def _source(
    name: str, share: float | None, read: str | None, question: str, answer: str | None, reader: Reader
) -> tuple[Source, Support | None]:
    """A document as a source, and its sentence that says the answer."""
    metadata: Mapping[str, object] = {}
    text, date = read, None
    if name in reader.bank:
        entry = reader.bank[name]
        metadata = entry.members[entry.place(name)].metadata
        with suppress(DataError):  # a bank from elsewhere may hold something other than a date there
            date = date_in(metadata)
        if text is None:
            text = reader.text_of(name)
    support = None if text is None or answer is None else support_of(text, answer, question)
    span = None if support is None else support.span
    return Source(name, share, read is not None, date, metadata, text, span), support


def _rank(candidate: tuple[Source, Support | None]) -> tuple[float, float]:
    source, support = candidate
    share = source.share or 0.0
    return (0.0, share) if support is None else (support.coverage, share + support.overlap)


@dataclass(frozen=True)
class Support:
    """The sentence of a text that says an answer.

    Attributes:
        span: its start and end in the text.
        coverage, overlap: the shares of the answer's and of the question's words that it holds.
    """

    span: tuple[int, int]
    coverage: float
    overlap: float


def support_of(text: str, answer: str, question: str) -> Support | None:
    """The sentence of a text that holds the most words of an answer and, among equals, the most of the question.

    Returns:
        The first such sentence; None if no sentence holds at least half of the answer's words.

    Examples:
        >>> text = "Rainga Press moved. It employs 180 people. Of them, 180 strike."
        >>> support = support_of(text, "180", "How many people does it employ?")
        >>> text[slice(*support.span)], support.coverage, round(support.overlap, 2)
        ('It employs 180 people.', 1.0, 0.33)
    """
    answer_words, question_words = set(word_forms(answer)), set(word_forms(question))
    best, best_score = None, (_LEAST_SHARE, -1.0)
    for span in sentence_spans(text) if answer_words else ():
        held = set(word_forms(text[slice(*span)]))
        coverage = len(answer_words & held) / len(answer_words)
        score = (coverage, len(question_words & held) / max(1, len(question_words)))
        if score > best_score:
            best, best_score = Support(span, *score), score
    return best


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Start and end of each sentence of a text, without the white space around it.

    Examples:
        >>> text = "Dr. J. Berg came.  She left!"
        >>> [text[start:end] for start, end in sentence_spans(text)]
        ['Dr. J. Berg came.', 'She left!']
    """
    spans: list[tuple[int, int]] = []
    for start, end in _paragraphs(text):
        cut = start
        for following in _cuts(text[start:end]):
            piece = text[cut : start + following]
            left, right = cut + len(piece) - len(piece.lstrip()), cut + len(piece.rstrip())
            if left < right:
                spans.append((left, right))
            cut = start + following
    return spans


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    """Parts of a text between empty lines, and of at most `_LONGEST` characters."""
    for start, end in pairwise([0, *(match.end() for match in _GAP.finditer(text)), len(text)]):
        while end - start > _LONGEST:
            space = max(text.rfind(" ", start, start + _LONGEST), text.rfind("\n", start, start + _LONGEST))
            cut = space + 1 if space >= start else start + _LONGEST
            yield start, cut
            start = cut
        yield start, end


def _cuts(text: str) -> Iterator[int]:
    """Where each sentence of a paragraph ends."""
    from sentencex import get_sentence_boundaries

    found = [sentence["end_index"] for sentence in get_sentence_boundaries("en", _SPACE.sub(" ", text))]
    for cut in found[:-1]:
        first = text[cut : cut + 1]
        goes_on = _BEFORE_NUMBER if first.isdigit() else _SHORT if first.islower() else None
        if goes_on is None or not goes_on.search(text, max(0, cut - 16), cut):
            yield cut
    yield len(text)

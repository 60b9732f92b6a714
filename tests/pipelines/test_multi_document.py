"""Questions about newswire that no single document answers."""

from __future__ import annotations

import re

import pytest

from pipelines.corpora.multi_document import KINDS, generate_multi_document

STREAM = generate_multi_document("test", 200, questions_per_kind=60)
TEXTS = {document.id: document.text for document in STREAM.documents}


def of_kind(kind: str) -> list[tuple[str, tuple[str, ...], list[str]]]:
    """Question, answers and the texts that it needs."""
    return [
        (question.question, question.answers, [TEXTS[name] for name in (*question.further_ids, question.gold)])
        for question in STREAM.questions
        if question.id.startswith(kind)
    ]


def figure(text: str, example: str) -> int:
    """The figure of a text: millions of dollars if the question is about them, else the number of its count."""
    if "earned" in example or "pay" in example:
        [found] = re.findall(r"\$(\d+) million", text)
        return int(found)
    numbers = re.findall(r"(?<![\d$-])(\d[\d,]*)(?![\d,-]| percent| million|\.\s[A-Z]\w+ (?:beat|lost))", text)
    dateline = re.match(r"\w+ (\d+), (\d{4})\.", text)
    assert dateline is not None
    rest = [int(number.replace(",", "")) for number in numbers]
    for part in dateline.groups():
        rest.remove(int(part))
    assert len(rest) == 1, (rest, text)
    return rest[0]


def test_each_kind_has_questions_of_two_to_four_documents() -> None:
    for kind in KINDS:
        assert len(of_kind(kind)) >= 20
    for question in STREAM.questions:
        needed = (*question.further_ids, question.gold)
        assert 2 <= len(set(needed)) == len(needed) <= 4
    assert len({question.id for question in STREAM.questions}) == len(STREAM.questions)


def test_two_hop_answers_stand_in_the_second_document_which_the_first_one_names() -> None:
    for question, answers, (first, second) in of_kind("two-hop"):
        assert answers[0] in second
        [title] = [document.metadata["title"] for document in STREAM.documents if document.text == second]
        company = title.rsplit(": ", 1)[0]
        assert company in first
        assert company in second
        assert company not in question
        assert answers[0] not in question


def test_comparisons_name_the_larger_of_two() -> None:
    for question, answers, texts in of_kind("comparison"):
        figures = [figure(text, question) for text in texts]
        larger, smaller = texts if figures[0] > figures[1] else reversed(texts)
        assert answers[0] in larger
        assert answers[0] in question
        assert answers[0] not in smaller


def test_counts_are_those_of_the_figures_above_the_limit() -> None:
    counts = set()
    for question, answers, texts in of_kind("counting"):
        limit = int(re.sub(r"\D", "", re.findall(r"\d[\d,]*", question.partition("more than ")[2])[0]))
        count = sum(figure(text, question) > limit for text in texts)
        assert answers == (str(count), ("zero", "one", "two", "three", "four")[count])
        counts.add(count)
    assert counts >= {0, 1, 2, 3}


def test_streams_are_seeded_and_refuse_what_they_cannot_make() -> None:
    assert generate_multi_document("val", 40, seed=2) == generate_multi_document("val", 40, seed=2)
    assert generate_multi_document("val", 40, seed=2) != generate_multi_document("val", 40, seed=3)
    assert not generate_multi_document("val", 1).questions
    for split, documents in (("dev", 10), ("test", 0)):
        with pytest.raises(ValueError, match=r"dev|at least 1"):
            generate_multi_document(split, documents)

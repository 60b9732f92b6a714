"""Texts are compared in one normal form, and shown in their own letters."""

from __future__ import annotations

import itertools
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data.characters import as_written, normal_form, word_forms, words
from mac_rag.data.metrics import comparable
from mac_rag.data.types import Document
from mac_rag.retrieval import BM25Retriever
from mac_rag.sources import highlights, support_of

SIGNS = "aAé\u0301\u00ad-\n 1²½ßﬁİıΣςй\u0306ё\u0308がﾞ\u200d’\ufffe김ﾊ"
TEXTS = st.text(st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from(SIGNS)), max_size=30)

# What stands in a document, and how somebody asks for it.
SAME = [
    ("o\ufb03ce", "office"),
    ("di\ufb00erent", "different"),
    ("José Álvarez", "jose alvarez"),
    (unicodedata.normalize("NFD", "José Álvarez"), "José Álvarez"),
    ("Łukasz", "lukasz"),
    ("Ørbæk", "Orbaek"),
    ("Straße", "STRASSE"),
    ("foun-\ndation", "foundation"),
    ("foun\u00addation", "foundation"),
    ("foun\ufffe\r\ndation", "foundation"),
    ("ＡＢＣ１２", "abc12"),
    ("ﾊﾞﾅﾅ", "バナナ"),
    ("ΟΔΥΣΣΕΥΣ", "οδυσσευς"),
    ("İstanbul", "istanbul"),
    ("ёлка", "елка"),
    ("מַיִם", "מים"),
    ("كِتَاب", "كتاب"),
    ("O’Brien", "O'Brien"),
    ("zero\u200bwidth", "zerowidth"),
    (unicodedata.normalize("NFD", "김철수"), "김철수"),
]
DIFFERENT = [
    ("10²", "102"),
    ("180¹²", "18012"),
    ("1½", "112"),
    ("й", "и"),
    ("が", "か"),
    ("हिन्दी", "हनद"),
    ("well-known", "wellknown"),
    ("e-\nMail", "email"),
]


@pytest.mark.parametrize(("written", "asked"), SAME)
def test_what_readers_take_for_the_same_is_the_same_everywhere(written: str, asked: str) -> None:
    assert normal_form(written) == normal_form(asked)
    assert comparable(written) == comparable(asked)
    retriever = BM25Retriever()
    retriever.add([Document("other", "Somewhere else."), Document("it", f"It is {written} there.")])
    for question in (written, asked):
        [hits] = retriever.retrieve([question], 1)
        assert [hit.document_id for hit in hits] == ["it"]
    text = f"It was cold. {written} is here."
    support = support_of(text, asked, "Which?")
    assert support is not None
    assert written in text[slice(*support.span)]
    assert highlights(text, asked) == [(13, 13 + len(written))]
    assert as_written(text, asked) == written


@pytest.mark.parametrize(("written", "other"), DIFFERENT)
def test_what_is_not_the_same_stays_apart(written: str, other: str) -> None:
    assert normal_form(written) != normal_form(other)
    assert word_forms(written) != word_forms(other)


@given(TEXTS)
def test_a_normal_form_is_its_own(text: str) -> None:
    assert normal_form(normal_form(text)) == normal_form(text)
    assert normal_form(unicodedata.normalize("NFD", text)) == normal_form(unicodedata.normalize("NFC", text))


@pytest.mark.parametrize(
    "text",
    ["a-" + "\n" * 10_000 + "A", "a-\n" * 9_000, "e" + "\u0301" * 20_000, "а" + "\u0301" * 20_000, "1²" * 9_000],
    ids=["lines", "hyphens", "accents", "stresses", "numbers"],
)
def test_the_time_grows_with_the_length_alone(text: str) -> None:
    started = time.perf_counter()
    normal_form(text)
    words(text)
    assert time.perf_counter() - started < 3  # thirty times what it takes


@given(TEXTS)
def test_words_stand_in_their_text_in_its_order(text: str) -> None:
    found = words(text)
    assert [word.form for word in found] == word_forms(text)
    assert all(0 <= word.start < word.end <= len(text) for word in found)
    assert all(one.start <= other.start for one, other in itertools.pairwise(found))
    for word in found:
        assert word.form in normal_form(text[word.start : word.end])


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("Łukasz Żak", "łukasz zak"),
        ("O’Brien & Sons", "o ’ brien & sons"),
        ("Jean-Luc d'Arc", "jean - luc d ' arc"),
        ("Renée  de la Cruz", "renee de la cruz"),
        ("王小明", "王 小 明"),
        ("김철수", unicodedata.normalize("NFD", "김 철 수")),
        ("Толстой", "толстои"),  # BERT drops the marks of all scripts
        ("がっこう", "かっこう"),
        ("हिन्दी", "हिनदी"),
        ("Zoë \U0001f418 Smith", "zoe smith"),  # and what it does not know
        ("$1,250.50", "$ 1, 250. 50"),
        ("C++", "c + +"),
        ("AT&T Inc", "at & t inc"),
    ],
)
def test_an_answer_is_found_as_its_text_writes_it(written: str, answer: str) -> None:
    assert as_written(f"In 2004 it was ({written}), they said.", answer) == written


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It has 3.5 rooms.", "35"),
        ("The officers came.", "office"),
        ("It has 135 rooms.", "35"),
        ("A text.", ""),
        ("", "a"),
    ],
)
def test_no_part_of_a_word_or_number_is_an_answer(text: str, answer: str) -> None:
    assert as_written(text, answer) is None


@given(TEXTS, TEXTS, TEXTS)
def test_whatever_stands_between_spaces_is_found(before: str, answer: str, after: str) -> None:
    text = f"{before} {answer} {after}"
    found = as_written(text, answer)
    if word_forms(answer):
        assert found is not None
        assert found in text

"""The rules of self-study: what is asked about a passage, what is read in an LM's reply, and what is dropped."""

from __future__ import annotations

import doctest
import random
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.synthesis import candidates, checks, prompts
from pipelines.synthesis.candidates import KINDS, OPEN_KINDS, SPAN_KINDS, Candidate, choose_candidates, sentence_of
from pipelines.synthesis.checks import (
    Duplicates,
    agrees,
    fault_of_answer,
    fault_of_question,
    follows,
    stands_in,
)
from pipelines.synthesis.prompts import Written, read_answer, read_question
from tests.pipelines.rule_llm import MILL


class TestCandidates:
    def test_answers_of_every_kind_are_found(self) -> None:
        chosen = choose_candidates(MILL, 99, random.Random(0))
        found = {(each.kind, each.answer) for each in chosen}
        assert found == {
            ("name", "Ulvby"), ("name", "Karl Ek"), ("name", "Norby"), ("date", "May 1862"), ("date", "1911"),
            ("number", "400"), ("phrase", "old mill"), ("phrase", "wooden wheel"),
            *((kind, None) for kind in OPEN_KINDS),
        }  # fmt: skip
        sentences = {each.answer: each.sentence for each in chosen}
        assert sentences["400"] == "It ground 400 tonnes of rye a year for the bakers of Norby."
        assert sentences["1911"] == "Fire destroyed the wooden wheel in 1911, because lightning struck."

    def test_parts_of_words_are_no_answers(self) -> None:
        text = "All of Ulvby's 12-inch records of the 1950s were cut by Ek's firm (8 men), on the 2nd floor. Ada Voss"
        found = {(each.kind, each.answer) for each in choose_candidates(text, 99, random.Random(0)) if each.answer}
        assert found == {("name", "Ada Voss")}

    def test_kinds_take_turns(self) -> None:
        for seed in range(20):
            chosen = choose_candidates(MILL, len(KINDS), random.Random(seed))
            assert {each.kind for each in chosen} == set(KINDS)
            assert choose_candidates(MILL, len(KINDS), random.Random(seed)) == chosen
        assert len({tuple(choose_candidates(MILL, 3, random.Random(seed))) for seed in range(20)}) > 10

    @given(st.text(alphabet=st.sampled_from("aB é.Ü1,\n$-'\"(May 1862 the of")) | st.text(), st.integers(1, 12))
    def test_any_text(self, text: str, count: int) -> None:
        chosen = choose_candidates(text, count, random.Random(0))
        answers = [each.answer for each in chosen if each.answer is not None]
        assert len(chosen) <= count
        assert len(chosen) >= min(count, len(OPEN_KINDS))
        assert all(each.answer is None or each.answer in each.sentence in text for each in chosen)
        assert all(bool(each.opening) == (each.kind in ("date", "number", "phrase")) for each in chosen)
        assert all(each.answer is None or each.kind in SPAN_KINDS for each in chosen)
        assert len(set(answers)) == len(answers)

    @given(st.lists(st.sampled_from(["A b.", "C?", "d e!", "\n"]), min_size=1).map(" ".join), st.data())
    def test_sentences_are_parts_of_the_text(self, text: str, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(text) - 1))
        sentence = sentence_of(text, place)
        assert sentence in text
        assert text[place].isspace() or text[place] in sentence


@pytest.mark.parametrize("module", [candidates, checks, prompts])
def test_the_examples_of_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted >= 2
    assert not found.failed


class TestReadingWhatWasWritten:
    @pytest.mark.parametrize(
        ("text", "question"),
        [
            ("Who built it at Ulvby?", "Who built it at Ulvby?"),
            ("  **Question:** Who built it at Ulvby? Karl did.", "Who built it at Ulvby?"),
            ('"Who built it at Ulvby?"\nAnswer: Ek', "Who built it at Ulvby?"),
            ("Who?", None),
            ("Karl Ek built it.", None),
            ("", None),
            ("Why " * 50 + "?", None),
            ("Who built\0it at Ulvby?", None),
            ("Who built\ud83d it at Ulvby?", None),
        ],
    )
    def test_questions(self, text: str, question: str | None) -> None:
        found = read_question(Candidate("name", "Karl Ek", "."), text)
        assert (found and found.question) == question
        assert found is None or found.answer == "Karl Ek"

    def test_an_open_question_needs_an_answer(self) -> None:
        assert read_question(Candidate("reason"), "Question: Why did it burn?\nAnswer: Lightning struck.") == Written(
            "Why did it burn?", "Lightning struck"
        )
        assert read_question(Candidate("reason"), "Question: Why did it burn?") is None
        assert read_question(Candidate("reason"), "Question: Why did it burn?\nAnswer: ...") is None

    @given(st.text())
    def test_any_text(self, text: str) -> None:
        for candidate in (Candidate("name", "x", "x"), Candidate("overview")):
            found = read_question(candidate, text)
            assert found is None or (found.question.endswith("?") and found.question.count("?") == 1)
        answer = read_answer(text)
        assert answer is None or (answer.strip() == answer and "\n" not in answer)


class TestChecks:
    @pytest.mark.parametrize(
        ("question", "fault"),
        [
            ("What is the passage about?", "outside"),
            ("What does the given text say?", "outside"),
            ("Which mills are described above?", "outside"),
            ("When was it built?", "outside"),
            ("Who was their first owner?", "outside"),
            ("When did Karl Ek leave his mill?", None),
            ("Who built the old mill?", None),
            ("What did they grind in 1862?", None),
            ("Which contexts exist?", None),
            ("Which of the following is a mill?", "outside"),
            ("Who built the Kestrel mill at Ulvby?", "outside"),
        ],
    )
    def test_questions_that_refer_to_something_outside(self, question: str, fault: str | None) -> None:
        assert fault_of_question(question, MILL) == fault

    @pytest.mark.parametrize(
        ("kind", "question", "answer", "fault"),
        [
            ("name", "Who built the mill at Ulvby?", "Karl Ek", None),
            ("name", "Who was the Karl Ek of Ulvby?", "Karl Ek", "given away"),
            ("name", "Who was Karl Ekman?", "Karl Ek", None),
            ("name", "Who built it?", "Karl Eks brother", "unsupported"),
            ("reason", "Why did the wheel burn?", "lightning was destroying its wheels", None),
            ("reason", "Why did the wheel burn?", "because of 3 lightnings that struck", "unsupported"),
            ("reason", "Why did the wheel burn?", "because children played with matches", "unsupported"),
            ("reason", "Why did the wheel burn in 1911?", "the wheel was burning in 1911 by fire", "given away"),
            ("reason", "Why did the lightning strike the wheel?", "because of lightning", "given away"),
        ],
    )
    def test_answers(self, kind: str, question: str, answer: str, fault: str | None) -> None:
        assert fault_of_answer(kind, Written(question, answer), MILL) == fault

    def test_numbers_must_all_be_there(self) -> None:
        assert follows("It ground 400 tonnes of rye for bakers of Norby", MILL)
        assert not follows("It ground 401 tonnes of rye for bakers of Norby", MILL)

    @given(st.text(), st.text())
    def test_what_stands_in_a_text_follows_from_it(self, answer: str, text: str) -> None:
        assert not stands_in("", text)
        if stands_in(answer, text):
            assert agrees(answer, answer)

    def test_near_duplicates_have_the_same_document_and_answer(self) -> None:
        known = Duplicates()
        asked = "In which year was the old mill at Ulvby built?"
        assert not known.add("a", asked, "1862")
        assert not known.add("a", "In which year was the new mill at Ulvby built?", "1911")
        assert known.add("a", "In which year was the old mill at Ulvby rebuilt?", "in 1862")
        assert not known.add("b", "In which year was the old mill at Ulvby rebuilt?", "1862")
        assert known.add("b", asked.upper(), "1900")

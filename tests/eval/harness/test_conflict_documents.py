"""Documents that contradict the memory: outdated ones, and ones whose answer is replaced by another of its kind."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.harness.conflict import counterfactual, outdated, replaced, shape, superseded
from mac_rag.data.metrics import normalize
from mac_rag.data.newswire.generate import generate

STREAM = generate("test", 60, seed=3, questions_per_document=4, update_rate=0.5)


def test_the_outdated_document_is_the_one_that_the_newest_updates() -> None:
    found = outdated(STREAM)
    texts = {document.id: document for document in STREAM.documents}
    assert len(found) == 4 * len(superseded(STREAM)) > 0
    for case in found:
        newest = texts[case.question.document_id]
        assert (case.right, case.wrong) == (newest.text, texts[newest.metadata["updates"]].text)
        assert case.question.answers[0] in case.right
        assert case.wrong_answer in case.wrong
        assert case.wrong_answer != case.question.answers[0]


def test_a_counterfactual_document_has_another_answer_of_the_same_kind() -> None:
    found = counterfactual(STREAM, 0)
    assert found == counterfactual(STREAM, 0) != counterfactual(STREAM, 1)
    stories = superseded(STREAM) | {d.id for d in STREAM.documents if "updates" in d.metadata}
    same_fact = {(q.answers[0], q.id[-1]) for q in STREAM.questions}
    assert len(found) > 20
    for case in found:
        answer = case.question.answers[0]
        assert case.question.document_id not in stories
        pieces = re.split(rf"\b{re.escape(answer)}\b" if answer[0].isalnum() else re.escape(answer), case.right)
        assert case.wrong == case.wrong_answer.join(pieces) != case.right
        assert (case.wrong_answer, case.question.id[-1]) in same_fact


@given(
    st.text(alphabet="ab AB.1", max_size=30), st.lists(st.text(alphabet="abAB1", min_size=1, max_size=3), min_size=1)
)
def test_a_replacement_removes_the_answer_and_changes_nothing_else(text: str, answers: list[str]) -> None:
    changed = replaced(text, tuple(answers), "Zwolle")
    if changed is None:
        return
    assert "Zwolle" in changed
    words = normalize(changed).split()
    assert not {normalize(answer) for answer in answers} & set(words)
    kept = [re.escape(piece) for piece in changed.split("Zwolle")]
    accepted = "(?:" + "|".join(map(re.escape, answers)) + ")"
    assert re.fullmatch(accepted.join(kept), text)


@pytest.mark.parametrize(
    ("text", "answers", "wrong", "expected"),
    [
        ("Rome, not Romeo, fell.", ("Rome",), "Oslo", "Oslo, not Romeo, fell."),
        ("Old Rome fell; Rome burned.", ("Rome", "Old Rome"), "Oslo", "Oslo fell; Oslo burned."),
        ("ROME fell.", ("Rome",), "Oslo", None),
        ("Rome and rome fell.", ("Rome",), "Oslo", None),
        ("Rome fell, and Oslo.", ("Rome",), "Oslo", None),
        ("Rome fell.", ("Rome",), "Rome II", None),
    ],
)
def test_whole_words_alone_are_replaced(text: str, answers: tuple[str, ...], wrong: str, expected: str | None) -> None:
    assert replaced(text, answers, wrong) == expected


def test_answers_of_one_kind_have_one_shape() -> None:
    assert shape("Denver Broncos") == shape("Santa Clara, ")[:1] == shape("XXXIII") == "A"
    assert shape("$1.2 million") == shape("$769 million") == "$9 a"
    assert shape("in 1994") == "a 9"
    assert shape("the city of Rome") == "a A"

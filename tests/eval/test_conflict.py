"""Documents that contradict the memory: which there are, and answers where the memory is contradicted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.harness.bootstrap import paired_interval
from eval.harness.conflict import conflicts, counterfactual, measure, newest_only, outdated, replaced, shape, superseded
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.metrics import exact_match, normalize
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.engine import MACEngine
from mac_rag.errors import DataError
from mac_rag.model import MACModel
from tests.eval.helpers import Evaluate

STREAM = generate("test", 60, seed=3, questions_per_document=4, update_rate=0.5)


def test_rows_have_the_figures_of_their_answers(tiny_model: MACModel) -> None:
    engine = MACEngine(tiny_model)
    engine.adapt(STREAM.documents)
    newest = newest_only(STREAM)
    groups = conflicts(STREAM, 5, 0)
    assert [len(group) for group in groups] == [5, 5]
    for group, expected in zip(groups, (9, 6)):
        answered = measure(engine, group, STREAM)
        assert len(answered) == expected
        by_condition = {
            (row.settings["document"], row.settings["memory"]): (row, given)
            for row, given in answered
            if row.settings["memory"] != "before" and row.settings["time_named"]
        }
        for (document, memory), (row, verdicts) in by_condition.items():
            wrong = [exact_match(v.prediction, case.wrong_answer) for v, case in zip(verdicts, group)]
            assert row.measures["wrong_share"] == sum(wrong) / 5
            assert row.documents == (len(newest) if memory == "newest" else 60)
            assert (row.gain is None) == (memory == "none")
            if row.gain is not None:
                before = by_condition[document, "none"][1]
                assert row.gain.f1 == paired_interval([v.f1 for v in verdicts], [v.f1 for v in before])
        texts = [case.wrong for case in group]
        plain = tiny_model.generate([case.question.question for case in group], [[text] for text in texts])
        assert [v.prediction for v in by_condition["wrong", "none"][1]] == plain


def test_a_memory_of_the_newest_equals_a_bank_without_older_documents(tiny_model: MACModel) -> None:
    newest = newest_only(STREAM)
    [group, _] = conflicts(STREAM, 4, 0)
    whole, alone = MACEngine(tiny_model), MACEngine(tiny_model)
    whole.adapt(STREAM.documents)
    alone.adapt([document for document in STREAM.documents if document.id in newest])
    given = {row.settings["memory"]: verdicts for row, verdicts in measure(whole, group, STREAM)[4:5]}
    [(_, expected)] = measure(alone, group, STREAM)[3:4]
    assert given["newest"] == expected


def test_newswire_has_conflicts_of_both_kinds(evaluate: Evaluate) -> None:
    result, rows, samples, shown = evaluate("conflict", "--documents", 120, "--questions", 3)
    assert list(rows)[1:5] == [
        "MAC, updated facts", "outdated document", "outdated document + MAC", "outdated document + MAC of the newest",
    ]  # fmt: skip
    assert all(row.questions == 3 for row in result.rows)
    assert len(samples) == 6
    assert "false document + MAC" in shown


def test_a_data_set_from_a_folder_has_only_counterfactual_conflicts(evaluate: Evaluate, tmp_path: Path) -> None:
    write_archivalqa(generate("test", 9, seed=4), tmp_path / "data" / "test.csv")
    data = f"archivalqa:{tmp_path / 'data'}"
    made = evaluate("conflict", "--data", data, "--documents", 9, "--questions", 2)
    assert "Not run: outdated documents" in made.shown
    assert {row.settings["conflict"] for row in made.result.rows} == {"counterfactual"}


def test_a_data_set_without_conflicts_is_refused() -> None:
    only = QADataset("own", "test", (Document("1", "Rain fell."),), (Question("q", "What fell?", ("Rain",), "1"),))
    with pytest.raises(DataError, match="no answer in the 1 documents of own can be replaced"):
        conflicts(only, None, 0)


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

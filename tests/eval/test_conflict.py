"""Answers where a document contradicts the memory: the counts, and the gain against a plain computation."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.harness.bootstrap import paired_interval
from eval.harness.conflict import conflicts, measure, newest_only
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.metrics import exact_match
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

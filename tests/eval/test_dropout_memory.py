"""Memory of a training step: that it falls with p, and the rows of figure and table."""

from __future__ import annotations

import pytest
import torch

from eval.dropout_memory import first_batch, memory_rows, step_memory
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from tests.eval.helpers import Evaluate

STREAM = generate("train", 8, questions_per_document=2)


def test_memory_falls_with_p_and_grows_with_k(tiny_model: MACModel) -> None:
    rows = {row.name: row.measures for row in memory_rows(tiny_model, STREAM, [4, 8], 0)}
    peaks = {name: row["peak_mb"] for name, row in rows.items()}
    for count in (4, 8):
        by_p = [peaks[f"K = {count}, p = {share}"] for share in (0.0, 0.5, 0.75)]
        assert by_p == sorted(by_p, reverse=True)
        assert by_p[0] > 1.2 * by_p[-1]
    assert peaks["K = 8, p = 0.0"] > peaks["K = 4, p = 0.0"]
    # Of four documents, one under gradients is both p = 0.75 and the least there is.
    assert peaks["K = 4, p = min"] == peaks["K = 4, p = 0.75"]


def test_a_measured_step_leaves_the_model_as_it_was(tiny_model: MACModel) -> None:
    weights = {name: parameter.clone() for name, parameter in tiny_model.named_parameters()}
    assert step_memory(tiny_model, first_batch(tiny_model, STREAM, 2), 0.0, 0) > 0
    assert not tiny_model.training
    assert all(parameter.grad is None for parameter in tiny_model.parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in tiny_model.named_parameters())


def test_a_batch_has_a_question_on_each_document(tiny_model: MACModel) -> None:
    batch = first_batch(tiny_model, STREAM, 5)
    assert batch.documents == [document.text for document in STREAM.documents[:5]]
    assert batch.questions == [question.question for question in STREAM.questions[0:10:2]]
    with pytest.raises(ConfigError, match="K is 9, but the stream has only 8 documents"):
        first_batch(tiny_model, STREAM, 9)


@pytest.mark.usefixtures("few_stories")
@pytest.mark.slow
def test_the_table_of_answers_can_be_left_out(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.dropout_memory.TABLE", {"tiny": {"No backprop.": (2, 1, 0.0), "MAC": (4, 2, 0.75)}})
    small = ("--steps", 1, "--documents", 4, "--k", 2)
    rows = evaluate("dropout_memory", *small).result.rows
    assert [row.name for row in rows[:2]] == ["No backprop.", "MAC"]
    assert [(row.settings["K"], row.settings["p"]) for row in rows[:2]] == [(2, 0.0), (4, 0.75)]
    assert all(row.f1 is not None for row in rows[:2])
    assert len(rows) == 2 + 5
    result = evaluate("dropout_memory", *small, "--no-trainings").result
    assert (len(result.rows), result.samples) == (5, None)
    assert "the table of answers by p" in result.not_run

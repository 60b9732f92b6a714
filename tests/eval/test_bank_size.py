"""Answers against the size of the bank and the way of aggregation: which bank each question meets, and its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.bank_size import groups, measure
from eval.harness.results import Result
from mac_rag.config import AggregationConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.engine import MACEngine
from mac_rag.model import MACModel
from tests.eval.helpers import Command, Evaluate
from tests.helpers import mac_config

STREAM = generate("test", 12, seed=3)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 60))
def test_every_question_meets_one_bank_with_its_document(questions: int, more: int, size: int) -> None:
    documents = max(questions + more, size)
    asked = 0
    for group in groups(questions, documents, size):
        assert len(group) == size
        assert group.start >= 0
        assert group.stop <= documents
        mine = range(asked, min(group.stop, questions))
        assert mine
        assert set(mine) <= set(group)
        asked = mine.stop
    assert asked == questions


@pytest.mark.parametrize("size", [5, 12])
def test_answers_equal_those_of_a_bank_of_that_size(tiny_model: MACModel, size: int) -> None:
    whole = MACEngine(tiny_model)
    whole.adapt(STREAM.documents)
    row, verdicts = measure("row", whole, STREAM, size, False, batch_size=3)
    expected = []
    for group, asked in {5: [(range(5), range(5)), (range(5, 10), range(5, 10)), (range(7, 12), range(10, 12))]}.get(
        size, [(range(12), range(12))]
    ):
        engine = MACEngine(tiny_model)
        engine.adapt([STREAM.documents[i] for i in group])
        expected += [answer.text for answer in engine.answer([STREAM.questions[i].question for i in asked])]
    assert [verdict.prediction for verdict in verdicts] == expected
    assert (row.documents, row.questions) == (size, 12)


def test_the_prior_is_switched_off_only_while_it_is_measured(tiny_model: MACModel) -> None:
    with torch.no_grad():
        for block in tiny_model.aggregation.blocks:
            block.prior_scale.fill_(50.0)  # strong enough to change untrained answers
    whole = MACEngine(tiny_model)
    whole.adapt(STREAM.documents)
    prior = tiny_model.aggregation.prior
    questions = [question.question for question in STREAM.questions]
    phi = whole.bank.phi
    answers = {}
    for without in (True, False):
        _, verdicts = measure("row", whole, STREAM, 12, without, batch_size=12)
        answers[without] = [verdict.prediction for verdict in verdicts]
        assert tiny_model.aggregation.prior is prior
    assert answers[False] == tiny_model.generate(questions, modulation=tiny_model.aggregate(questions, phi))
    with tiny_model.without_document_prior():
        assert answers[True] == tiny_model.generate(questions, modulation=tiny_model.aggregate(questions, phi))
    assert answers[True] != answers[False]


def test_rows_with_and_without_the_prior(evaluate: Evaluate) -> None:
    _, rows, samples, shown = evaluate("bank_size", "--sizes", "4,20", "--questions", "10")
    assert shown.splitlines()[0] == "Generated newswire: 20 documents, 10 questions, split test"
    assert [(row.name, row.documents, row.questions) for row in rows.values()] == [
        ("4 documents, with prior", 4, 10),
        ("4 documents, without prior", 4, 10),
        ("20 documents, with prior", 20, 10),
        ("20 documents, without prior", 20, 10),
    ]
    assert all(name in shown for name in rows)
    assert len(samples) == 10


def test_a_model_may_have_no_prior(command: Command, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    plain = AggregationConfig(blocks=1, heads=2, head_width=8)
    MACModel.from_config(mac_config(model_folder("llama"), aggregation=plain)).save_pretrained(tmp_path / "plain")
    arguments = ("--model", tmp_path / "plain", "--sizes", "3", "--questions", "3", "--output", "r.json")
    code, _, _ = command("eval.bank_size", *arguments)
    assert code == 0
    assert [row.name for row in Result.read(tmp_path / "r.json").rows] == ["3 documents, without prior"]


SIZES = ("--documents", 16, "--questions", 6, "--batch-size", 4)


def test_hierarchical(evaluate: Evaluate, tiny_checkpoint: Path) -> None:
    result, rows, samples, _ = evaluate("aggregation", "hierarchical", *SIZES, "--subgroups", "2,8")
    assert list(rows) == ["full", "streaming", "hierarchical, M = 2", "hierarchical, M = 8"]
    assert rows["hierarchical, M = 8"].settings == {"method": "hierarchical", "entries": 16, "M": 8}
    full = rows["full"]
    assert full.measures["memory_kept"] == 100
    for row in rows.values():
        kept = row.measures["memory_kept"]
        assert abs(kept - 100 * row.measures["peak_mb"] / full.measures["peak_mb"]) < 1e-9
    assert len(samples) == 6
    assert all(sample.rows["streaming"] == sample.rows["full"] for sample in samples)
    assert result.config["model"] == str(tiny_checkpoint)


def test_reduction(evaluate: Evaluate) -> None:
    rows = evaluate("aggregation", "reduction", *SIZES).rows
    assert next(iter(rows)) == "whole bank"
    assert len(rows) == 1 + 3 * 3
    for share, entries in ((75, 12), (50, 8), (25, 4)):
        row = rows[f"nearest averaging, {share} %"]
        assert row.settings == {"method": "nearest averaging", "entries": entries}
        assert row.measures["bank_mb"] * 16 == pytest.approx(rows["whole bank"].measures["bank_mb"] * entries)

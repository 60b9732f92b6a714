"""Records for ragas and RAGChecker: what the evaluators read, from what a run of the protocol said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.harness.export import export_folder
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError
from tests.eval.helpers import Evaluate

# Fields of `ragas.SingleTurnSample`, ragas 0.4.3, and their types in JSON.
RAGAS = {
    "user_input": str,
    "response": str,
    "reference": str,
    "retrieved_contexts": list,
    "retrieved_context_ids": list,
    "reference_contexts": list,
    "reference_context_ids": list,
}
# Fields without a default of `ragchecker.container.RAGResult`, RAGChecker 0.1.9, and the documents in front of the LM.
RAGCHECKER = {"query_id", "query", "gt_answer", "response", "retrieved_context"}


def test_each_row_of_a_run_becomes_records_of_both_evaluators(evaluate: Evaluate, tmp_path: Path) -> None:
    options = ("--documents", 9, "--seed", 4, "--retriever", "bm25", "--k", 2)
    _, _, samples, shown = evaluate("qa", *options, "--export", "records")
    assert "Records for ragas and RAGChecker: 8 files in records" in shown
    for name in ("substring %", "MRR@k %", "nDCG@k %"):
        assert name in shown
    texts = {document.id: document.text for document in generate("test", 9, seed=4).documents}
    rows = {"LM alone": "LM-alone", "MAC": "MAC", "bm25 top-2": "bm25-top-2", "bm25 top-2 + MAC": "bm25-top-2-+-MAC"}
    for row, name in rows.items():
        lines = (tmp_path / "records" / f"{name}.ragas.jsonl").read_text().splitlines()
        checked = json.loads((tmp_path / "records" / f"{name}.ragchecker.json").read_text())
        assert set(checked) == {"results"}
        for sample, line, result in zip(samples, lines, checked["results"], strict=True):
            verdict = sample.rows[row]
            record = json.loads(line)
            assert {key: type(value) for key, value in record.items()} == RAGAS
            assert record["user_input"] == result["query"] == sample.question
            assert record["response"] == result["response"] == verdict.prediction
            assert record["reference"] == result["gt_answer"] == sample.answers[0]
            assert record["retrieved_context_ids"] == list(verdict.retrieved)
            assert record["retrieved_contexts"] == [texts[name] for name in verdict.retrieved]
            assert record["reference_contexts"] == [texts[sample.document_id]]
            assert record["reference_context_ids"] == [sample.document_id]
            assert set(result) == RAGCHECKER
            assert result["query_id"] == sample.id
            assert result["retrieved_context"] == [{"doc_id": name, "text": texts[name]} for name in verdict.retrieved]


def test_questions_without_documents_have_no_reference_contexts(evaluate: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "Town 1."}\n')
    (tmp_path / "test.jsonl").write_text('{"id": "q", "question": "Which town?", "golden_answers": ["Town 1"]}\n')
    evaluate("qa", "--data", tmp_path, "--export", tmp_path / "out")
    [line] = (tmp_path / "out" / "MAC.ragas.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == set(RAGAS) - {"reference_contexts", "reference_context_ids"}
    assert json.loads(line)["retrieved_contexts"] == []


def test_a_place_that_cannot_be_a_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--export .*file cannot be made a folder"):
        export_folder(tmp_path / "file")

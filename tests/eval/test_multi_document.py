"""Questions that need several documents, as a command: rows by kind, and recall of all documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.multi_document import all_retrieved
from mac_rag.data.newswire.multi_document import generate_multi_document
from tests.eval.helpers import Command, Evaluate


def test_rows_by_kind_are_those_of_their_questions(evaluate: Evaluate) -> None:
    options = ("--documents", "40", "--questions", "3", "--k", "1,4")
    _, rows, samples, shown = evaluate("multi_document", *options)
    stream = generate_multi_document("test", 40, questions_per_kind=3)
    names = ["LM alone", "MAC", "bm25 top-1", "bm25 top-1 + MAC", "bm25 top-4", "bm25 top-4 + MAC"]
    assert list(rows) == [f"{kind}: {name}" for kind in ("two-hop", "comparison", "counting", "all") for name in names]
    for full, row in rows.items():
        kind, _, name = full.partition(": ")
        mine = [sample.rows[name] for sample in samples if kind == "all" or sample.id.startswith(kind)]
        assert row.questions == len(mine) > 0
        assert row.f1 == pytest.approx(sum(verdict.f1 for verdict in mine) / len(mine))
        if row.k is not None:
            needed = [stream.evidence[s.id] for s in samples if kind == "all" or s.id.startswith(kind)]
            assert row.recall_at_k == all_retrieved([verdict.retrieved for verdict in mine], needed)
        over = row.measures.get("over_retrieval")
        assert (over is not None) == (name == "MAC")
        if over is not None:
            assert over == pytest.approx((row.em or 0) - (rows[f"{kind}: bm25 top-1"].em or 0))
    assert rows["two-hop: bm25 top-1"].recall_at_k == 0
    assert "two-hop: MAC" in shown


def test_recall_counts_questions_all_of_whose_documents_are_there() -> None:
    assert all_retrieved([["a", "b"], ["a"], ["c", "b", "a"]], [("b", "a"), ("a", "b"), ("a", "c")]) == 2 / 3


def test_too_few_documents_are_refused(command: Command, tmp_path: Path) -> None:
    code, _, errors = command("eval.multi_document", "--documents", "1")
    assert code == 1
    assert "--documents 1 are too few" in errors

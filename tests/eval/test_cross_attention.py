"""Attention maps: equal to the mass that the model itself tells, over the documents that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.cross_attention import attention_map, distracting
from eval.harness.protocol import some_questions
from mac_rag.data.newswire.generate import generate
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from tests.eval.helpers import Command, Evaluate

STREAM = some_questions(generate("test", 20, seed=2), 4, 0)


def test_distractors_are_bm25s_best_others() -> None:
    retriever = BM25Retriever()
    retriever.add(STREAM.documents)
    for question, beside in zip(STREAM.questions, distracting(STREAM, "bm25", 3, 0), strict=True):
        ranked = [hit.document_id for hit in retriever.retrieve([question.question], 4)[0]]
        expected = [i for i in ranked if i != question.document_id][:3]
        assert [document.id for document in beside][: len(expected)] == expected


@pytest.mark.parametrize("kind", ["bm25", "random"])
def test_distractors_are_distinct_others_and_repeatable(kind: str) -> None:
    chosen = distracting(STREAM, kind, 19, 1)
    for question, beside in zip(STREAM.questions, chosen, strict=True):
        assert {document.id for document in beside} | {question.document_id} == {d.id for d in STREAM.documents}
    assert chosen == distracting(STREAM, kind, 19, 1)


@pytest.mark.parametrize("prior", [True, False])
def test_the_map_sums_to_the_attention_of_the_model(tiny_model: MACModel, prior: bool) -> None:
    tiny_model.aggregation.use_prior = prior
    others = distracting(STREAM, "random", 3, 0)
    maps = attention_map(tiny_model, STREAM, others)
    assert maps.shape == (4, 4, 4, 4)  # questions, their tokens, documents, memory tokens
    texts = {document.id: document.text for document in STREAM.documents}
    for found, question, beside in zip(maps, STREAM.questions, others, strict=True):
        phi = tiny_model.amortize([texts[question.document_id], *(document.text for document in beside)])
        expected = tiny_model.attention([question.question], phi)[0]
        torch.testing.assert_close(found.sum(-1).mean(0), expected)


def test_the_map_is_written_beside_its_summary(evaluate: Evaluate, command: Command, tiny_checkpoint: Path) -> None:
    made = evaluate("cross_attention", "--documents", 12, "--questions", 3)
    assert "distractor 1" not in made.shown  # the map is for a plot
    rows = made.result.rows
    assert [row.name for row in rows[:4]] == [
        f"{kind} distractors{plain}" for kind in ("bm25", "random") for plain in ("", ", without the prior")
    ]
    for kind, summary in (("bm25", rows[0]), ("random", rows[2])):
        cells = [row for row in rows[4:] if row.settings["distractors"] == kind]
        assert len(cells) == 6 * 4
        assert sum(cell.measures["mass"] for cell in cells) == pytest.approx(1, abs=1e-5)
        gold = [cell.measures["mass"] for cell in cells if cell.settings["document"] == "gold"]
        assert sum(gold) == pytest.approx(summary.measures["gold_mass"], abs=1e-5)
    options = ("--model", tiny_checkpoint, "--documents", 5, "--questions", 3)
    code, _, errors = command("eval.cross_attention", *options)
    assert code == 1
    assert "the map has 6 documents, but the stream has only 5" in errors

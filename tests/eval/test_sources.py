"""What an answer tells of itself: whether its sources are the right ones, maps of attention, and its confidence."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.cross_attention import attention_map, distracting
from eval.harness.protocol import some_questions
from eval.report.collect import collect
from eval.report.page import page
from eval.sources import Named, control_rows, named_of
from eval.unanswerable import auroc, expected_calibration_error, risk_at_coverage
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Source
from mac_rag.model import MACModel
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.sources import highlights
from tests.eval.helpers import Command, Evaluate
from tests.pipelines.helpers import command as pipeline


def test_controls_are_their_definitions() -> None:
    sources = [Source("bridge", 0.3), Source("river", 0.5), Source("note")]
    only = named_of("bridge", frozenset({"bridge"}), sources, ["river", "bridge"])
    assert (only.first, only.most_attended, only.retrieved) == ("bridge", "river", "river")
    several = Named("bridge", frozenset({"bridge", "river"}), "river", "bridge", "bridge")
    nowhere = Named("bridge", frozenset(), "note", "note", "note")
    rows = {row.name: row.measures for row in control_rows("MAC", [only, several, nowhere, several])}
    assert rows == {
        "MAC: first source": {"right_document": 0.25, "holds_answer": 0.75, "elsewhere": 0.5},
        "MAC: most attention": {"right_document": 0.5, "holds_answer": 0.5},
        "MAC: the retriever's first": {"right_document": 0.5, "holds_answer": 0.5},
        "MAC: any that holds the answer": {"right_document": (1 + 0.5 + 0.5) / 4, "holds_answer": 0.75},
    }
    assert control_rows("MAC", []) == []
    without = named_of("bridge", frozenset({"bridge"}), sources, [])
    assert "MAC: the retriever's first" not in {row.name for row in control_rows("MAC", [without])}


def test_mac_tiny_names_the_right_document(evaluate: Evaluate, tmp_path: Path) -> None:
    options = ("--documents", "60", "--questions", "40", "--k", "3")
    result, rows, samples, _ = evaluate("sources", *options, model="mac-tiny")
    for name in ("MAC", "bm25 top-3 + MAC"):
        first = rows[f"{name}: first source"]
        assert first.measures["right_document"] >= 0.95
        assert first.measures["right_document"] >= rows[f"{name}: any that holds the answer"].measures["right_document"]
        assert first.questions == round(rows[name].measures["right"] * 40)
    assert "MAC: the retriever's first" not in rows
    texts = {document.id: document.text for document in generate("test", 60).documents}
    assert len(result.quotes) == 20
    assert all(quote.sentence in texts[quote.document_id] for quote in result.quotes)
    shown = page(collect([tmp_path]))
    quote = result.quotes[0]
    assert f"<mark>{escape(quote.sentence[slice(*highlights(quote.sentence, quote.answer)[0])])}</mark>" in shown
    name = "bm25 top-3 + MAC"
    assert rows[name].em == pytest.approx(sum(sample.rows[name].em for sample in samples) / 40)


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


ANSWERS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=30)


@given(ANSWERS)
def test_metrics_are_their_definitions(answers: list[tuple[float, bool]]) -> None:
    scores, right = [score for score, _ in answers], [is_right for _, is_right in answers]
    ours = [score for score, is_right in answers if is_right]
    theirs = [score for score, is_right in answers if not is_right]
    if ours and theirs:
        wins = sum((a > b) + 0.5 * (a == b) for a in ours for b in theirs)
        assert auroc(scores, right) == pytest.approx(wins / len(ours) / len(theirs))
    error = 0.0
    for number in range(10):
        bin_ = [(s, r) for s, r in answers if min(int(s * 10), 9) == number]
        if bin_:
            gap = abs(sum(s for s, _ in bin_) / len(bin_) - sum(r for _, r in bin_) / len(bin_))
            error += gap * len(bin_) / len(answers)
    assert expected_calibration_error(scores, right) == pytest.approx(error)
    assert risk_at_coverage(scores, right, 1.0) == pytest.approx(right.count(False) / len(right))
    assert 0 <= risk_at_coverage(scores, right, 0.5) <= 1


def test_a_fit_and_its_measurement_are_two_commands(evaluate: Evaluate, command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    MACModel.from_pretrained("mac-tiny").save_pretrained(folder)
    options = ("--documents", "24", "--questions", "24")
    code, _, told = command("eval.unanswerable", "--model", str(folder), *options)
    assert code == 1
    assert "python -m pipelines.calibrate" in told
    fitted = pipeline("pipelines.calibrate", "--model", str(folder), "--data", "newswire", *options)
    assert fitted.exit_code == 0, fitted.output
    assert "fitted on 24 answers" in fitted.output
    result, rows, samples, _ = evaluate("unanswerable", *options, model=folder)
    first = result.rows[0]
    assert first.name == "memory: confidence"
    assert first.measures["auroc"] > 0.8
    assert first.measures["risk_at_100"] <= 1 - (first.em or 0)
    assert set(rows) >= {"memory: prior alone", "memory: log_probability alone"}
    assert len(samples) == 24

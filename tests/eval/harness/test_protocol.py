"""The protocol on a real, untrained model: who is asked with what, and that the figures are those of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eval.harness.protocol import Outcome, run_protocol, some_questions
from mac_rag.data.metrics import substring_match
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.engine import MACEngine
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever

STREAM = generate("test", 6, seed=5)
ASKED = [question.question for question in STREAM.questions]


def run(model: MACModel, dataset: QADataset = STREAM) -> Outcome:
    return run_protocol(MACEngine(model), dataset, {"bm25": BM25Retriever()}, [1], batch_size=5)


def predictions(outcome: Outcome, row: str) -> list[str]:
    return [sample.rows[row].prediction for sample in outcome.samples]


def test_every_row_answers_from_the_memory_and_documents_in_its_name(tiny_model: MACModel) -> None:
    outcome = run(tiny_model)
    assert [row.name for row in outcome.rows] == ["LM alone", "MAC", "bm25 top-1", "bm25 top-1 + MAC"]
    retriever = BM25Retriever()
    retriever.add(STREAM.documents)
    hits = retriever.retrieve(ASKED, 1)
    contexts = [[hit.text for hit in row] for row in hits]
    memory = tiny_model.aggregate(ASKED, tiny_model.amortize([document.text for document in STREAM.documents]))
    assert predictions(outcome, "LM alone") == tiny_model.generate(ASKED)
    assert predictions(outcome, "MAC") == tiny_model.generate(ASKED, modulation=memory)
    assert predictions(outcome, "bm25 top-1") == tiny_model.generate(ASKED, contexts)
    assert predictions(outcome, "bm25 top-1 + MAC") == tiny_model.generate(ASKED, contexts, modulation=memory)
    for sample, found in zip(outcome.samples, hits):
        assert sample.rows["MAC"].retrieved == ()
        assert sample.rows["bm25 top-1"].retrieved == tuple(hit.document_id for hit in found)


def test_each_memory_weight_is_a_row(tiny_model: MACModel) -> None:
    torch.manual_seed(0)
    for parameter in tiny_model.modulation.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    engine = MACEngine(tiny_model, memory_weight=0.7)
    outcome = run_protocol(engine, STREAM, {"bm25": BM25Retriever()}, [1], memory_weights=[1.0, 1e-6])
    names = ["LM alone", "MAC", "bm25 top-1", "bm25 top-1 + MAC, lambda 1", "bm25 top-1 + MAC, lambda 1e-06"]
    assert [row.name for row in outcome.rows] == names
    assert predictions(outcome, names[4]) == predictions(outcome, names[2])
    assert predictions(outcome, names[3]) == predictions(run(tiny_model), "bm25 top-1 + MAC")
    assert predictions(outcome, names[3]) != predictions(outcome, names[2])
    assert engine.memory_weight == 0.7


def test_the_gain_compares_the_same_prompts_with_and_without_memory(tiny_model: MACModel) -> None:
    rows = run(tiny_model).rows
    for without, with_memory in zip(rows[::2], rows[1::2]):
        assert without.gain is None
        for figure in ("em", "f1"):
            gain = getattr(with_memory.gain, figure)
            assert gain.mean == pytest.approx(getattr(with_memory, figure) - getattr(without, figure))
            assert gain.low <= gain.mean <= gain.high


def test_figures_are_means_over_the_samples(tiny_model: MACModel) -> None:
    said = predictions(run(tiny_model), "MAC")
    # The right answer for every third question is what MAC says, as the second of two accepted ones.
    questions = tuple(
        Question(
            question.id,
            question.question,
            ("nothing of the kind", text) if i % 3 == 0 else ("zzz",),
            question.document_id,
        )
        for i, (question, text) in enumerate(zip(STREAM.questions, said))
    )
    outcome = run(tiny_model, QADataset("newswire", "test", STREAM.documents, questions))
    mac = next(row for row in outcome.rows if row.name == "MAC")
    assert mac.em == pytest.approx(1 / 3)
    assert mac.f1 == pytest.approx(1 / 3)
    assert mac.em_prefix == pytest.approx(1 / 3)
    for row in outcome.rows:
        verdicts = [sample.rows[row.name] for sample in outcome.samples]
        assert (row.documents, row.questions) == (6, 6)
        assert row.em == pytest.approx(sum(verdict.em for verdict in verdicts) / 6)
        assert row.f1 == pytest.approx(sum(verdict.f1 for verdict in verdicts) / 6)
        assert row.seconds > 0
        if row.recall_at_k is not None:
            found = [sample.document_id in sample.rows[row.name].retrieved for sample in outcome.samples]
            assert row.recall_at_k == pytest.approx(sum(found) / 6)
            assert row.k == 1  # so all figures of retrieval are equal
            assert row.mrr_at_k == row.ndcg_at_k == row.recall_at_k
        contained = [
            max(substring_match(sample.rows[row.name].prediction, answer) for answer in sample.answers)
            for sample in outcome.samples
        ]
        assert row.substring == pytest.approx(sum(contained) / 6)


def test_dated_rows_ask_as_of_the_moment_of_each_question() -> None:
    """The oracle of a dated answer is the engine, asked one question as of its moment."""
    mac_tiny = MACModel.from_pretrained("mac-tiny")
    documents = tuple(
        Document(document.id, document.text, {"date": f"{2000 + number}"})
        for number, document in enumerate(STREAM.documents)
    )
    questions = tuple(
        replace(question, as_of=None if number % 3 == 2 else f"{2002 + number % 4}-06-01")
        for number, question in enumerate(STREAM.questions)
    )
    stream = QADataset("timeqa", "test", documents, questions)
    outcome = run_protocol(MACEngine(mac_tiny), stream, {"bm25": BM25Retriever()}, [1], batch_size=5)
    both = ["bm25 top-1", "bm25 top-1 + MAC"]
    names = ["LM alone", "MAC, times unused", "MAC", "MAC, dated", *both, *(f"{name}, dated" for name in both)]
    assert [row.name for row in outcome.rows] == names
    engine = MACEngine(mac_tiny, retriever=BM25Retriever(), k=1)
    engine.adapt(documents)
    for question, sample in zip(questions, outcome.samples):
        [from_memory] = engine.answer([question.question], use_retriever=False, as_of=question.as_of)
        [from_both] = engine.answer([question.question], as_of=question.as_of)
        assert sample.rows["MAC, dated"].prediction == from_memory.text
        assert sample.rows["bm25 top-1 + MAC, dated"].prediction == from_both.text
        assert sample.rows["bm25 top-1, dated"].retrieved == from_both.document_ids
    assert predictions(outcome, "MAC, dated") != predictions(outcome, "MAC")
    rows = {row.name: row for row in outcome.rows}
    for name in both:
        dated = rows[f"{name}, dated"]
        assert dated.measures["dates_f1"] == pytest.approx(dated.f1 - rows[name].f1)
        assert "dates_f1" not in rows[name].measures
    for name in ("MAC", "MAC, dated"):
        assert rows[name].measures["dates_f1"] == pytest.approx(rows[name].f1 - rows["MAC, times unused"].f1)
    assert rows["MAC, dated"].gain.f1.mean == pytest.approx(rows["MAC, dated"].f1 - rows["LM alone"].f1)
    together = rows["bm25 top-1 + MAC, dated"]
    assert together.gain.f1.mean == pytest.approx(together.f1 - rows["bm25 top-1, dated"].f1)


def test_a_memory_that_knows_of_times_has_a_row_without_them() -> None:
    mac_tiny = MACModel.from_pretrained("mac-tiny")
    stories = generate("val", 12, update_rate=1.0)
    questions = tuple(replace(question, as_of="2030") for question in stories.questions)
    stream = QADataset("timeqa", "test", stories.documents, questions)
    outcome = run_protocol(MACEngine(mac_tiny), stream, batch_size=5)
    assert [row.name for row in outcome.rows] == ["LM alone", "MAC, times unused", "MAC", "MAC, dated"]
    engine = MACEngine(mac_tiny)
    engine.adapt(stories.documents)
    with mac_tiny.without_times():
        expected = [answer.text for answer in engine.answer([question.question for question in questions])]
    assert predictions(outcome, "MAC, times unused") == expected
    assert predictions(outcome, "MAC") != expected


def test_long_documents_and_prompts_are_counted(tiny_model: MACModel) -> None:
    long = " ".join(["The harbour of Lund was opened by Ada Voss."] * tiny_model.context_window)
    documents = (Document("long", long), Document("short", "Rain fell on Kell."))
    questions = (
        Question("a", "Who opened the harbour?", ("Ada Voss",), "long"),
        Question("b", "What fell on Kell?", ("rain",), "short"),
    )
    outcome = run(tiny_model, QADataset("newswire", "test", documents, questions))
    assert outcome.adaptation.documents == 2
    assert outcome.adaptation.chunked == 1
    assert outcome.adaptation.rows > 2
    assert {row.name: row.truncated for row in outcome.rows} == {
        "LM alone": 0,
        "MAC": 0,
        "bm25 top-1": 1,
        "bm25 top-1 + MAC": 1,
    }
    assert [sample.rows["bm25 top-1"].truncated for sample in outcome.samples] == [True, False]


def test_some_questions_are_drawn_by_the_seed_in_stream_order() -> None:
    stream = generate("test", 12)
    assert some_questions(stream, None, 0) is stream
    assert some_questions(stream, 12, 0) is stream
    drawn = some_questions(stream, 5, 0)
    assert drawn.documents == stream.documents
    places = [stream.questions.index(question) for question in drawn.questions]
    assert len(places) == 5
    assert places == sorted(set(places))
    assert drawn == some_questions(stream, 5, 0)
    assert any(drawn != some_questions(stream, 5, seed) for seed in range(1, 5))

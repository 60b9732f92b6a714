"""The benchmark commands on a real, untrained model: what they read, print, write and export, and what they refuse."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from eval.harness.results import Data, Result
from eval.multi_document import all_retrieved
from eval.qa import named_columns
from mac_rag.data.archivalqa import write_archivalqa
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError
from pipelines.corpora.multi_document import generate_multi_document
from tests.eval.helpers import Command, Evaluate


@pytest.mark.parametrize("experiment", ["squad", "qa"])
def test_newswire_is_the_default_data(command: Command, tiny_checkpoint: Path, tmp_path: Path, experiment: str) -> None:
    code, shown, progress = command(
        f"eval.{experiment}", "--model", tiny_checkpoint, "--retriever", "bm25", "--k", 2, "--documents", 9, "--seed", 4
    )
    assert code == 0
    first, *lines = shown.splitlines()
    assert first.startswith("The embedded newswire sample, because no --data was given")
    assert first.endswith("9 documents, 9 questions, split test")
    [path] = (tmp_path / "results").glob("*.json")
    assert path.name.startswith(f"{experiment}-")
    assert lines[-1] == f"Result: {path.relative_to(tmp_path)}"
    for name in ("LM alone", "MAC", "bm25 top-2", "bm25 top-2 + MAC"):
        assert f"│ {name} " in shown
        assert name in progress
    result = Result.read(path)
    samples, stream = result.read_samples(path), generate("test", 9, seed=4)
    assert result.experiment == experiment
    assert result.seed == result.config["seed"] == 4
    assert (result.data.name, result.data.source) == ("newswire", "generated")
    assert [sample.question for sample in samples] == [question.question for question in stream.questions]
    assert result.model.name == str(tiny_checkpoint)
    assert [row.recall_at_k is None for row in result.rows] == [True, True, False, False]


def test_data_are_read_from_the_folder_given(evaluate: Evaluate, tmp_path: Path) -> None:
    """The same documents give the same answers, generated or from a file."""
    write_archivalqa(generate("test", 9, seed=4), tmp_path / "data" / "test.csv")
    generated = evaluate("archivalqa", "--documents", 9, "--seed", 4)
    read = evaluate("archivalqa", "--documents", 9, "--data", tmp_path / "data")
    title = f"ArchivalQA-Seq from {tmp_path / 'data'}: 9 documents, 9 questions, split test"
    assert read.shown.splitlines()[0] == title
    assert read.samples == generated.samples
    assert (read.result.data.name, read.result.data.source) == ("archivalqa", str(tmp_path / "data"))
    assert list(read.rows) == ["LM alone", "MAC"]


def test_documents_and_questions_are_limited(evaluate: Evaluate, tmp_path: Path) -> None:
    with (tmp_path / "val.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "question", "answers"])
        writer.writerows(
            [f"Rain fell on town {i // 3}.", f"What fell on town {i // 3}, {i}?", "rain"] for i in range(30)
        )
    options = ("--data", tmp_path, "--split", "val", "--documents", 4, "--questions", 5)
    result, _, samples, shown = evaluate("streamingqa", *options)
    assert "4 documents, 5 questions, split val" in shown.splitlines()[0]
    assert (result.data.documents, result.data.questions, len(samples)) == (4, 5, 5)
    assert result.adaptation.documents == 4


def test_data_of_ones_own_give_the_rows_of_a_benchmark(evaluate: Evaluate, tmp_path: Path) -> None:
    """The oracle is StreamingQA's command on the same questions."""
    stream = generate("test", 5, seed=4)
    texts = {document.id: document.text for document in stream.documents}
    rows = [(texts[q.gold], q.question, q.answers[0]) for q in stream.questions]
    with (tmp_path / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "question", "answers"), *rows])
    with (tmp_path / "mine.jsonl").open("w") as file:
        file.writelines(json.dumps(dict(zip(("document", "q", "answers"), row))) + "\n" for row in rows)
    common = ("--retriever", "bm25", "--k", "2")
    expected = evaluate("streamingqa", *common, "--data", tmp_path)
    own = evaluate("qa", *common, "--data", "mine.jsonl", "--columns", "question=q", "--split", "all")
    assert own.shown.splitlines()[0] == "mine.jsonl: 5 documents, 5 questions, split all"
    assert [row.model_copy(update={"seconds": None}) for row in own.result.rows] == [
        row.model_copy(update={"seconds": None}) for row in expected.result.rows
    ]
    assert own.result.data == Data(name="own", split="all", source="mine.jsonl", documents=5, questions=5)


def test_questions_without_documents_have_neither_recall_nor_reference_contexts(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"id": str(i), "contents": f"Town {i}."}) + "\n" for i in range(4))
    )
    (tmp_path / "test.jsonl").write_text('{"id": "q", "question": "Which town?", "golden_answers": ["Town 1"]}\n')
    options = ("--retriever", "bm25", "--k", 2, "--export", tmp_path / "out")
    result, _, samples, _ = evaluate("qa", "--data", tmp_path, *options)
    assert [row.recall_at_k for row in result.rows] == [None] * 4
    assert samples[0].document_id is None
    [line] = (tmp_path / "out" / "MAC.ragas.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == set(RAGAS) - {"reference_contexts", "reference_context_ids"}
    assert json.loads(line)["retrieved_contexts"] == []


@pytest.mark.parametrize("columns", ["question", "question=", "question=q,question=p", "=q"])
def test_columns_that_name_nothing_are_refused(columns: str) -> None:
    with pytest.raises(ConfigError, match="--columns takes FIELD=COLUMN, separated by commas, each field once"):
        named_columns(columns)


def test_a_benchmark_of_moments_has_rows_with_dates(evaluate: Evaluate, tmp_path: Path) -> None:
    paras = ["Tom Webb", "Webb played for Lund FC from 1996 to 2003 .", "In 2004 he moved to Kell United ."]
    asked = [
        ["Which team did Webb play for from 1996 to 2003?", [{"para": 1, "from": 16, "end": 23, "answer": "Lund FC"}]]
    ]
    pages = [{"index": "/wiki/Webb#P54", "type": "P54", "link": "/wiki/Webb", "paras": paras, "questions": asked}]
    (tmp_path / "human_annotated_test.json").write_text(json.dumps(pages))
    _, _, [sample], shown = evaluate("timeqa", "--data", tmp_path, "--retriever", "bm25", "--k", 3)
    assert shown.splitlines()[0] == f"Time-Sensitive QA from {tmp_path}: 3 documents, 1 questions, split test"
    assert sample.as_of == "2003-12-31"
    assert set(sample.rows["bm25 top-3"].retrieved) == {"Webb#0", "Webb#1", "Webb#2"}
    assert set(sample.rows["bm25 top-3, dated"].retrieved) == {"Webb#0", "Webb#1"}
    assert "MAC, dated" in sample.rows


def test_weekly_news_is_asked_as_of_the_day_of_each_question(evaluate: Evaluate, tmp_path: Path) -> None:
    common = {"question_sentence": "Who opened the hall?", "choices": ["Lena Marsh", "Ada Voss"]}
    for week, (day, right) in {"20230526": ("2023/05/26", "1"), "20230609": ("2023/06/08", "0")}.items():
        name = common["choices"][int(right)]
        question = {**common, "question_id": f"{week}_0", "question_date": day, "answer": [right]}
        row = {**question, "evidence": f"The hall was opened by {name}."}
        (tmp_path / f"{week}_qa.jsonl").write_text(json.dumps(row) + "\n")
    _, _, [first, second], shown = evaluate("realtimeqa", "--data", tmp_path, "--retriever", "bm25", "--k", 5)
    assert shown.splitlines()[0] == f"RealTimeQA from {tmp_path}: 2 documents, 2 questions, split test"
    assert (first.as_of, second.as_of) == ("2023-05-26", "2023-06-08")
    assert first.rows["bm25 top-5, dated"].retrieved == ("20230526_0-evidence",)
    assert len(first.rows["bm25 top-5"].retrieved) == len(second.rows["bm25 top-5, dated"].retrieved) == 2


@pytest.mark.parametrize(
    ("experiment", "arguments", "message"),
    [
        (
            "qa",
            ("--columns", "question=q"),
            "--columns 'question=q' names columns of data of your own; give them with --data",
        ),
        ("timeqa", (), "eval.timeqa needs --data, a folder with the files of Time-Sensitive QA; they are in dataset/"),
        ("archivalqa", ("--data", "nowhere"), "nowhere"),
        ("streamingqa", ("--data", "."), "test.csv: missing column 'question'"),
        ("archivalqa", ("--documents", 3, "--model", "mac-nowhere"), "'mac-nowhere'"),
        ("archivalqa", ("--split", "dev"), "no split 'dev'; choose one of train, val, test"),
        ("archivalqa", ("--retriever", "bm25,google"), "unknown retriever 'google'"),
        ("archivalqa", ("--k", "0,5"), "--k must be at least 1"),
        *(
            (
                "archivalqa",
                ("--memory-weight", given),
                f"numbers above 0 and at most 1, separated by commas, got '{given}'",
            )
            for given in ("0", "0.5,2", "half", "nan")
        ),
        ("archivalqa", ("--output", "."), "is a folder"),
        ("bank_size", ("--sizes", "x"), "whole numbers"),
    ],
)
def test_a_refusal_is_one_message_without_a_result(
    command: Command, tmp_path: Path, experiment: str, arguments: tuple[object, ...], message: str
) -> None:
    (tmp_path / "test.csv").write_text("text,answers\nRain fell.,rain\n")
    code, _, errors = command(f"eval.{experiment}", *arguments)
    assert code == 1
    assert not list(tmp_path.rglob("*.json"))
    assert "Traceback" not in errors
    [said] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert message in said


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


def test_rows_by_kind_are_those_of_their_questions(evaluate: Evaluate) -> None:
    options = ("--documents", "40", "--questions", "3", "--k", "1,4")
    _, rows, samples, shown = evaluate("multi_document", *options)
    stream = generate_multi_document("test", 40, questions_per_kind=3)
    evidence = {question.id: (question.gold, *question.further_ids) for question in stream.questions}
    names = ["LM alone", "MAC", "bm25 top-1", "bm25 top-1 + MAC", "bm25 top-4", "bm25 top-4 + MAC"]
    assert list(rows) == [f"{kind}: {name}" for kind in ("two-hop", "comparison", "counting", "all") for name in names]
    for full, row in rows.items():
        kind, _, name = full.partition(": ")
        mine = [sample.rows[name] for sample in samples if kind == "all" or sample.id.startswith(kind)]
        assert row.questions == len(mine) > 0
        assert row.f1 == pytest.approx(sum(verdict.f1 for verdict in mine) / len(mine))
        if row.k is not None:
            needed = [evidence[s.id] for s in samples if kind == "all" or s.id.startswith(kind)]
            assert row.recall_at_k == all_retrieved([verdict.retrieved for verdict in mine], needed)
        over = row.measures.get("over_retrieval")
        assert (over is not None) == (name == "MAC")
        if over is not None:
            assert over == pytest.approx((row.em or 0) - (rows[f"{kind}: bm25 top-1"].em or 0))
    assert rows["two-hop: bm25 top-1"].recall_at_k == 0
    assert "two-hop: MAC" in shown


def test_recall_counts_questions_all_of_whose_documents_are_there() -> None:
    assert all_retrieved([["a", "b"], ["a"], ["c", "b", "a"]], [("b", "a"), ("a", "b"), ("a", "c")]) == 2 / 3

"""Training on data of one's own: equal to training on the same data in SQuAD's files, and refused where it must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from mac_rag.data import load_dataset, squad
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import QADataset
from mac_rag.errors import DataError
from mac_rag.model import MACModel
from pipelines.corpora.qa_data import DataConfig
from pipelines.tasks.train import TrainTask
from pipelines.tasks.tune_qa import TuneTask
from pipelines.trainer import Trainer
from tests.helpers import Folder
from tests.pipelines.helpers import TRAINER, command, tune_recipe
from tests.pipelines.test_pipelines import train_recipe

Weights = dict[str, torch.Tensor]


def articles(data: QADataset) -> list[dict[str, Any]]:
    """A data set in SQuAD's layout, two paragraphs to an article, some questions with several answers."""
    questions = data.questions_by_document()
    paragraphs = [
        {
            "context": document.text,
            "qas": [
                {
                    "id": question.id,
                    "question": question.question,
                    "answers": [{"text": f"{question.answers[0]}, as said"}, {"text": question.answers[0]}],
                }
                for question in questions[document.id]
            ],
        }
        for document in data.documents
    ]
    return [{"title": f"Title {i}", "paragraphs": paragraphs[i : i + 2]} for i in range(0, len(paragraphs), 2)]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same data in three folders: SQuAD's files, rows of JSON Lines, and JSON in SQuAD's layout by splits."""
    parts = {"train": generate("train", 12, questions_per_document=2), "val": generate("val", 4)}
    squad_folder, rows, layout = (tmp_path / name for name in ("squad", "rows", "layout"))
    for folder in (squad_folder, rows, layout):
        folder.mkdir()
    count = sum(len(part.questions) for part in parts.values())
    written = [article for part in parts.values() for article in articles(part)]
    (squad_folder / "train-v1.1.json").write_text(json.dumps({"data": written}))
    start = 0
    for split, part in parts.items():
        stop = start + len(part.questions)
        monkeypatch.setitem(squad.PARTS, split, squad.SplitRange("train-v1.1.json", start, stop, count))
        start = stop
        read = load_dataset("squad", split, squad_folder)
        texts = {document.id: document for document in read.documents}
        lines = [
            {
                "id": question.id,
                "question": question.question,
                "answers": list(reversed(question.answers)),
                "document": texts[question.gold].text,
                "title": texts[question.gold].metadata["title"],
            }
            for question in read.questions
        ]
        (rows / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (layout / f"{split}.json").write_text(json.dumps({"data": articles(part)}))
    return tmp_path


def trained(model_folder: Folder, source: dict[str, Any], output: Path) -> Weights:
    data = {**source, "validation_documents": 4}
    recipe = train_recipe(model_folder, data=data, group_by_title=2, trainer={**TRAINER, "steps": 2})
    Trainer(TrainTask(recipe), recipe.trainer, output).run()
    return MACModel.from_pretrained(output / "last", device="cpu").mac_state()


def tuned(model_folder: Folder, source: dict[str, Any], output: Path) -> Weights:
    data, context = {**source, "validation_documents": 4}, {"retriever": "bm25", "k": [2], "rate": 0.5}
    recipe = tune_recipe(
        model_folder("llama"), data=data, context=context, sequence_length=512, trainer={**TRAINER, "steps": 2}
    )
    Trainer(TuneTask(recipe), recipe.trainer, output).run()
    return dict(AutoModelForCausalLM.from_pretrained(output / "last").state_dict())


@pytest.mark.parametrize("task", [trained, tuned])
def test_a_model_has_the_weights_that_squads_own_files_give_it(
    model_folder: Folder, data: Path, task: Callable[[Folder, dict[str, Any], Path], Weights]
) -> None:
    expected = task(model_folder, {"name": "squad", "path": str(data / "squad")}, data / "run-squad")
    for form in ("rows", "layout"):
        weights = task(model_folder, {"name": "own", "path": str(data / form)}, data / f"run-{form}")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    # Other data give other weights, so the comparison can fail.
    other = data / "rows" / "train.jsonl"
    other.write_text("".join(reversed(other.read_text().splitlines(keepends=True))))
    weights = task(model_folder, {"name": "own", "path": str(data / "rows")}, data / "run-other")
    assert not all(torch.equal(weights[name], expected[name]) for name in expected)


def test_questions_without_documents_are_refused_for_training(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "contents": "A text."}\n')
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text('{"id": "q", "question": "What?", "golden_answers": ["text"]}\n')
    config = DataConfig.parse({"name": "own", "path": str(tmp_path)}, "test")
    for load in (config.training_set, config.validation_set):
        with pytest.raises(DataError, match=r"question 'q' names no document\. .* training has to know the document"):
            load()
    assert load_dataset("own", "val", tmp_path).questions[0].answers == ("text",)


def test_an_empty_validation_split_is_refused_before_the_regression(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes minutes."""
    row = {"document": "Rain fell.", "question": "What fell?", "answers": "Rain"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr("pipelines.tasks.train.init_by_kv_regression", lambda *_: pytest.fail("it is too late"))
    source = {"name": "own", "path": str(tmp_path / "mine.jsonl")}
    with pytest.raises(DataError, match=r"the split 'val' .* holds no question"):
        TrainTask(train_recipe(model_folder, data=source, init="kv_regression"))


def test_metadata_of_any_kind_are_trained_with(model_folder: Folder, tmp_path: Path) -> None:
    """Also under names that generated news use: `updates`, and a title that is no text."""
    rows = [
        {"document": f"Rain fell on town {i}.", "question": f"What fell, {i}?", "answers": "Rain", "title": i // 2,
         "metadata": {"updates": [i, {"n": i}]}}
        for i in range(6)
    ]  # fmt: skip
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "own", "path": str(tmp_path / "mine.jsonl"), "train": "all", "val": "all"}
    recipe = train_recipe(model_folder, data=source, group_by_title=2)
    task = TrainTask(recipe)
    batch, _ = task.batch(0, 0, 4)
    towns = [int(text.removesuffix(".").split()[-1]) for text in batch.documents]
    assert [towns[i] // 2 for i in (0, 2)] == [towns[i] // 2 for i in (1, 3)]


def test_columns_are_named_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("body,q,answer\nA text.,What?,text\n")
    values = {"name": "own", "path": str(tmp_path / "mine.csv"), "train": "all", "columns": {"document": "body"}}
    with pytest.raises(DataError, match=r"field 'question': it is missing or empty; .*has 'body', 'q', 'answer'"):
        DataConfig.parse(values, "test").training_set()
    values["columns"]["question"] = "q"  # type: ignore[index]
    assert DataConfig.parse(values, "test").training_set().questions[0].question == "What?"


def test_the_drawn_splits_share_nothing(tmp_path: Path) -> None:
    rows = [
        {"document": f"{d.text}", "title": f"Story {i // 3}", "question": f"Who, {d.id}?", "answers": "x"}
        for i, d in enumerate(generate("train", 120).documents)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    source = {"name": "own", "path": str(tmp_path / "mine.jsonl")}
    trainer = {"steps": 1, "batch_size": 1, "learning_rate": 1}
    values = {"task": "train", "start_from": "mac-tiny", "data": source, "trainer": trainer}
    recipe.write_text(yaml.safe_dump(values))
    found = command("pipelines.check_splits", str(recipe))
    assert found.exit_code == 0, found.output
    assert "own, train shares with test: 0 of " in found.stdout
    recipe.write_text(yaml.safe_dump({**values, "data": {**source, "train": "all"}}))
    assert command("pipelines.check_splits", str(recipe)).exit_code == 1


def test_batches_hold_all_documents_that_questions_need(model_folder: Folder, tmp_path: Path) -> None:
    texts = {f"d{number}": f"Rain fell on town {number}." for number in range(12)}
    needs = {f"What fell on {number}, and then?": [f"d{number}", f"d{(number + 5) % 12}"] for number in range(12)}
    documents = [{"id": name, "text": text} for name, text in texts.items()]
    questions = [
        {"question": question, "answers": "Rain", "document_id": own, "further_document_ids": further}
        for question, (own, *further) in needs.items()
    ]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    source = {"name": "own", "path": str(tmp_path), "train": "all", "val": "all"}
    task = TrainTask(train_recipe(model_folder, data=source))
    for step in range(4):
        batch, _ = task.batch(step, 0, 4)
        for question, gold, further in zip(batch.questions, batch.gold, batch.further, strict=True):
            found = [batch.documents[place] for place in (gold, *further)]
            assert found == [texts[name] for name in needs[question]]
        assert len(set(batch.documents)) == len(batch.documents) == len(batch.dates)


@pytest.mark.parametrize("form", ["rows", "apart"])
def test_questions_without_answers_are_read_where_they_may_have_none(tmp_path: Path, form: str) -> None:
    data = generate("train", 10, questions_per_document=2)
    texts = {document.id: document.text for document in data.documents}
    questions = [
        {"id": each.id, "question": each.question}
        | ({"document": texts[each.gold]} if form == "rows" else {"document_id": each.gold})
        for each in data.questions
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    path = tmp_path / "questions.jsonl"
    if form == "apart":
        documents = [{"id": name, "text": text} for name, text in texts.items()]
        (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
        path = tmp_path
    read = load_dataset("own", "all", path, unanswered=True).questions
    assert len(read) == 20
    assert {question.answers for question in read} == {()}
    with pytest.raises(DataError, match="field 'answers': it is missing or empty"):
        load_dataset("own", "all", path)


def test_impossible_questions_are_left_out_as_ever(tmp_path: Path) -> None:
    rows = [
        {"document": "A text.", "question": "What?", "is_impossible": True},
        {"document": "A text.", "question": "Who?", "answers": []},
        {"document": "A text.", "question": "Why?", "answers": ["text"]},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = load_dataset("own", "all", tmp_path / "mine.jsonl", unanswered=True)
    assert [(question.question, question.answers) for question in read.questions] == [("Who?", ()), ("Why?", ("text",))]

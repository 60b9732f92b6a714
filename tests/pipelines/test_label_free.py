"""Training on questions that have no answers: by distillation, and by nothing that needs answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mac_rag.data import load_dataset
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import DataError
from pipelines.corpora.qa_data import DataConfig
from pipelines.objective import LossWeights
from pipelines.tasks.train import TrainTask
from tests.helpers import Folder
from tests.pipelines.helpers import TRAINER, metrics
from tests.pipelines.test_pipelines import resumed_and_whole, train_recipe

PURE = {"answer": 0, "distillation": 1, "aggregated_distillation": 0.5, "contrastive": 0.3}


def write(folder: Path, *, answered: bool, form: str = "rows") -> Path:
    """Data of one's own, with answers or without."""
    data = generate("train", 10, questions_per_document=2)
    texts = {document.id: document.text for document in data.documents}
    questions = [
        {"id": each.id, "question": each.question}
        | ({"answers": list(each.answers)} if answered else {})
        | ({"document": texts[each.gold]} if form == "rows" else {"document_id": each.gold})
        for each in data.questions
    ]
    if form == "rows":
        folder /= f"{answered}.jsonl"
    else:
        folder.mkdir()
        documents = [{"id": name, "text": text} for name, text in texts.items()]
        (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    path = folder if form == "rows" else folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in questions))
    return folder


def recipe(model_folder: Folder, path: Path, **values: Any) -> Any:
    source = {"name": "own", "path": str(path), "train": "all", "val": "all", "validation_documents": 3}
    trainer = {**TRAINER, "best": "loss"}
    values = {"data": source, "losses": PURE, "trainer": trainer, **values}
    return train_recipe(model_folder, **values)


@pytest.mark.parametrize("form", ["rows", "apart"])
def test_questions_without_answers_are_read_where_they_may_have_none(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / form if form == "apart" else tmp_path, answered=False, form=form)
    questions = load_dataset("own", "all", path, unanswered=True).questions
    assert len(questions) == 20
    assert {question.answers for question in questions} == {()}
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


def test_a_training_without_answers_goes_through_and_resumes_exactly(model_folder: Folder, tmp_path: Path) -> None:
    config = recipe(model_folder, write(tmp_path, answered=False))
    stopped, whole = resumed_and_whole(config, tmp_path)
    assert stopped.fingerprint == whole.fingerprint
    validated = [line for line in metrics(tmp_path / "stopped") if line["kind"] == "val"][-1]
    assert {"loss", "distillation_loss", "aggregated_distillation_loss", "contrastive_loss"} <= validated.keys()
    assert not {"em", "f1"} & validated.keys()


@pytest.mark.parametrize(
    ("losses", "trained"),
    [
        ({"answer": 0, "distillation": 1, "contrastive": 0.3}, {"amortization", "input_encoder", "aggregation"}),
        ({"answer": 0, "aggregated_distillation": 1}, {"amortization", "input_encoder", "aggregation", "modulation"}),
        ({"answer": 0, "distillation": 1, "reconstruction": 1}, {"amortization", "modulation"}),
    ],
)
def test_losses_without_answers_train_their_networks(
    model_folder: Folder, tmp_path: Path, losses: dict[str, float], trained: set[str]
) -> None:
    task = TrainTask(recipe(model_folder, write(tmp_path, answered=False), losses=losses))
    terms = task(task.batch(0, 0, 3))
    assert set(terms) == {"loss", *(name for name, weight in losses.items() if weight)}
    terms["loss"].backward()
    reached = {
        name
        for name, part in task.model.named_children()
        for p in part.parameters()
        if p.grad is not None and p.grad.any()
    }
    assert trained <= reached
    assert "base_lm" not in reached


def test_losses_that_need_answers_ask_for_them_at_the_start(model_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path, answered=False)
    for values in (
        {"losses": {"answer": 1}},
        {"losses": {**PURE, "direct": 0.1}},
        {"curriculum": {"steps": 1, "steps_per_sentence": 1}},
    ):
        with pytest.raises(DataError, match="field 'answers': it is missing or empty"):
            TrainTask(recipe(model_folder, path, **values))
    with pytest.raises(DataError, match="field 'answers'"):
        DataConfig.parse({"name": "own", "path": str(path), "train": "all"}, "test").training_set()
    assert not LossWeights.parse({**PURE, "reconstruction": 1}, "test").need_answers


def test_a_curriculum_without_answers_reads_whole_documents(model_folder: Folder, tmp_path: Path) -> None:
    curriculum = {"steps": 2, "steps_per_sentence": 1, "losses": {"answer": 0, "distillation": 1}}
    task = TrainTask(recipe(model_folder, write(tmp_path, answered=False), curriculum=curriculum))
    texts = {document.text for document in generate("train", 10, questions_per_document=2).documents}
    batch, _ = task.batch(0, 0, 3)
    assert set(batch.documents) <= texts
    assert set(batch.answers) == {""}


def test_processes_that_train_in_parts_need_answers(model_folder: Folder, tmp_path: Path) -> None:
    trainer = {**TRAINER, "best": "loss", "parallel": "fsdp"}
    config = recipe(model_folder, write(tmp_path, answered=False), trainer=trainer)
    with pytest.raises(DataError, match=r"has no answer.*--own-answers"):
        TrainTask(config)
    TrainTask(recipe(model_folder, write(tmp_path, answered=True), trainer=trainer))

"""Training questions that need several documents: their batches hold all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.corpora.qa_data import DataConfig
from pipelines.tasks.train import TrainTask
from tests.pipelines.test_pipelines import train_recipe

Folder = Callable[[str], Path]


def test_batches_hold_all_documents_that_questions_need(model_folder: Folder) -> None:
    data = DataConfig(documents=8, linked_documents=60, validation_documents=8)
    by_question = {question.question: question for question in data.training_set().questions}
    texts = {document.id: document.text for document in data.training_set().documents}
    assert len(texts) == 68
    task = TrainTask(train_recipe(model_folder, data=data))
    several = 0
    for step in range(8):
        batch, _ = task.batch(step, 0, 4)
        for text, gold, further in zip(batch.questions, batch.gold, batch.further, strict=True):
            needed = by_question[text]
            assert batch.documents[gold] == texts[needed.gold]
            assert [batch.documents[place] for place in further] == [texts[name] for name in needed.further_ids]
            several += bool(further)
        assert len(set(batch.documents)) == len(batch.documents) == len(batch.dates)
    assert several


def test_linked_documents_of_another_data_set_are_refused() -> None:
    with pytest.raises(ValidationError, match="linked_documents are generated newswire"):
        DataConfig(name="squad", path="x", linked_documents=5)

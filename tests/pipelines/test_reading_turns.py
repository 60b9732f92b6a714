"""Steps in which the LM alone reads documents, between those in which it learns to use memory."""

from __future__ import annotations

import pytest
import torch

from mac_rag.data.types import QADataset
from mac_rag.errors import ConfigError
from pipelines.corpora.qa_data import DataConfig
from pipelines.tasks.train import TrainTask
from pipelines.tasks.tune_qa import TuneTask
from tests.helpers import Folder
from tests.pipelines.helpers import TRAINER, tune_recipe
from tests.pipelines.test_pipelines import train_recipe

READING = {"context": {"retriever": "bm25", "k": [2]}}


def test_they_train_the_lm_as_tuning_it_does(model_folder: Folder) -> None:
    task = TrainTask(train_recipe(model_folder, reading=READING, tune_base_lm="full"))
    tuned = TuneTask(tune_recipe(model_folder("llama")))
    assert [isinstance(task.batch(step, 0, 2), list) for step in range(6)] == [False, False, True] * 2
    for step in (2, 5):
        read, batch = task.batch(step, 0, 2), tuned.batch(step // 3, 0, 4)
        assert read == batch
        terms = task(read)
        torch.testing.assert_close(terms["loss"], tuned(batch)["loss"])
    terms["loss"].backward()
    reached = {name for name, weight in task.named_parameters() if weight.grad is not None}
    assert reached == {f"model.base_lm.{name}" for name, _ in task.model.base_lm.named_parameters()}


def test_their_task_reads_no_data_to_validate_on(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training validates the LM; data for another validation would be read, and retrieved for, in vain."""
    read: list[str] = []
    load = DataConfig.validation_set

    def counted(self: DataConfig) -> QADataset:
        read.append(self.val)
        return load(self)

    monkeypatch.setattr(DataConfig, "validation_set", counted)
    TrainTask(train_recipe(model_folder, reading=READING, tune_base_lm="full"))
    assert read == ["val"]


def test_there_are_none_where_the_lm_does_not_learn(model_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="tune_base_lm is frozen; set it to lora or full"):
        train_recipe(model_folder, reading=READING)
    with pytest.raises(ConfigError, match="leave reading out"):
        train_recipe(model_folder, reading=READING, tune_base_lm="full", trainer={**TRAINER, "parallel": "fsdp"})

"""A trained model with other settings of aggregation. What they add begins untrained; contradictions are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from pipelines.corpora.qa_data import DataConfig
from pipelines.tasks.extended_model import with_aggregation
from pipelines.tasks.train import TrainTask
from tests.helpers import copy_of
from tests.pipelines.test_pipelines import train_recipe

Folder = Callable[[str], Path]


def test_a_training_begins_slots_in_a_model_without(
    model_folder: Folder, loaded_tiny_model: MACModel, tmp_path: Path
) -> None:
    loaded_tiny_model.save_pretrained(tmp_path / "start")
    data = DataConfig(documents=8, validation_documents=8)
    start = str(tmp_path / "start")
    task = TrainTask(train_recipe(model_folder, model=None, start_from=start, aggregation={"slots": 2}, data=data))
    losses = task(task.batch(0, 0, 4))
    losses["loss"].backward()
    assert task.model.aggregation.slots is not None
    assert task.model.aggregation.slots.places.grad is not None
    old, new = loaded_tiny_model.aggregation.state_dict(), task.model.aggregation.state_dict()
    assert all(torch.equal(value, new[name]) for name, value in old.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 1}, "would leave out trained weights: blocks.1"),
        ({"head_width": 4}, "do not fit the aggregation settings"),
        ({"slots": 1, "slot_cutoff": 4}, r"slot_cutoff is 4\.0, but slots is 1"),
        ({"slotz": 2}, "slotz: Extra inputs are not permitted"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    loaded_tiny_model: MACModel, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_aggregation(copy_of(loaded_tiny_model), changes)


def test_settings_that_a_model_has_leave_it_as_it_is(loaded_tiny_model: MACModel) -> None:
    assert with_aggregation(loaded_tiny_model, {"slots": 1}) is loaded_tiny_model


def test_recipes_that_contradict_themselves_are_refused(model_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="aggregation changes the model of start_from"):
        train_recipe(model_folder, aggregation={"slots": 2})

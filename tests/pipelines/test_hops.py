"""Training of slots that follow one another: their fit, and batches with all the documents that questions need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from pipelines.corpora.qa_data import DataConfig, linked_streams
from pipelines.tasks.extended_model import with_aggregation
from pipelines.tasks.fit_hops import FitHopsConfig, fit_hops, write_fitted_hops
from pipelines.tasks.train import TrainTask
from tests.helpers import copy_of
from tests.pipelines.test_pipelines import train_recipe

Folder = Callable[[str], Path]
HOPS = {"slots": 2, "hops": True}


def test_fitting_changes_nothing_else_and_lowers_the_loss(loaded_tiny_model: MACModel) -> None:
    model = with_aggregation(copy_of(loaded_tiny_model), HOPS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    streams = linked_streams(60)
    first = fit_hops(model, streams, steps=1, learning_rate=1e-9)
    assert fit_hops(model, streams, steps=30) < first - 0.1
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"aggregation.prior.query.weight", "aggregation.prior.key.weight"} < changed
    assert all(name.startswith(("aggregation.prior.", "aggregation.hops.")) for name in changed)


def test_what_cannot_be_fitted_is_refused(loaded_tiny_model: MACModel) -> None:
    with pytest.raises(ConfigError, match="this model has no hops"):
        fit_hops(loaded_tiny_model, linked_streams(60))
    with pytest.raises(ConfigError, match="no stream has a question"):
        fit_hops(with_aggregation(copy_of(loaded_tiny_model), HOPS), linked_streams(1))


def test_they_are_fitted_to_documents_longer_than_the_model_reads(loaded_tiny_model: MACModel, tmp_path: Path) -> None:
    short, longest = tmp_path / "short", 95
    loaded_tiny_model.save_pretrained(short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_document_tokens": longest}))
    texts = [document.text for document in linked_streams(30)[0].documents]
    assert max(len(loaded_tiny_model.amortization.ids(text)) for text in texts) > longest
    write_fitted_hops(FitHopsConfig(start_from=str(short), slots=3, documents=30, steps=2), tmp_path)
    fitted = MACModel.from_pretrained(tmp_path / "last")
    assert fitted.aggregation.slots is not None
    assert fitted.aggregation.slots.count == 3
    assert fitted.aggregation.hops is not None


def test_batches_hold_all_documents_that_questions_need(model_folder: Folder, loaded_tiny_model: MACModel) -> None:
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


def test_a_training_begins_hops_in_a_model_without(
    model_folder: Folder, loaded_tiny_model: MACModel, tmp_path: Path
) -> None:
    loaded_tiny_model.save_pretrained(tmp_path / "start")
    data = DataConfig(documents=8, linked_documents=30, validation_documents=8)
    recipe = train_recipe(model_folder, model=None, start_from=str(tmp_path / "start"), aggregation=HOPS, data=data)
    task = TrainTask(recipe)
    losses = task(task.batch(0, 0, 4))
    losses["loss"].backward()
    assert task.model.aggregation.hops is not None
    assert task.model.aggregation.hops.to_query.weight.grad is not None
    old, new = loaded_tiny_model.aggregation.state_dict(), task.model.aggregation.state_dict()
    assert all(torch.equal(value, new[name]) for name, value in old.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 1}, "would leave out trained weights: blocks.1"),
        ({"head_width": 4}, "do not fit the aggregation settings"),
        ({"slots": 1, "hops": True}, "hops lead from slot to slot, but slots is 1"),
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
        train_recipe(model_folder, aggregation=HOPS)
    with pytest.raises(ValidationError, match="linked_documents are generated newswire"):
        DataConfig(name="squad", path="x", linked_documents=5)

"""Questions from which memory hides what answers them: the target, the loss, and what cannot be trained so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mac_rag.config import PromptFormat
from mac_rag.errors import ConfigError
from mac_rag.lm.chat import prompt_encoder
from mac_rag.model import MACModel
from pipelines.objective import LossWeights, mac_loss
from pipelines.tasks.train import TrainTask
from tests.helpers import Folder
from tests.pipelines.test_objective import BATCH
from tests.pipelines.test_pipelines import train_recipe

UNKNOWN = "I don't know"
ANSWER = LossWeights()


def hidden_recipe(model_folder: Folder, **values: Any) -> Any:
    model = {**train_recipe(model_folder).model.model_dump(), "prompt": {"abstention": UNKNOWN}}
    return train_recipe(model_folder, **{"model": model, "gold_hidden": 0.5, "without_memory": 0.5, **values})


def test_the_lm_abstains_from_what_neither_memory_nor_text_says(model_folder: Folder) -> None:
    task = TrainTask(hidden_recipe(model_folder))
    seen = set()
    for step in range(20):
        batch, _ = task.batch(step, 0, 4)
        rows = zip(batch.gold, batch.contexts, batch.without_memory, batch.gold_hidden, batch.abstains, strict=True)
        for gold, contexts, without, hidden, abstains in rows:
            in_front, remembered = batch.documents[gold] in contexts, not (without or hidden)
            assert abstains == (not in_front and not remembered)
            seen.add((in_front, bool(without), hidden))
    assert len(seen) == 8, "some case was never drawn"


def test_hidden_documents_are_not_attended_to(tiny_model: MACModel) -> None:
    """The loss is that of a bank without them."""
    one = {name: getattr(BATCH, name)[:1] for name in ("questions", "answers")}
    with_hidden = dataclasses.replace(BATCH, **one, gold=[0], gold_hidden=[True])
    without = dataclasses.replace(BATCH, **one, documents=BATCH.documents[1:], gold=[0])
    got, expected = (mac_loss(tiny_model, batch, ANSWER)[0]["loss"].item() for batch in (with_hidden, without))
    assert got == pytest.approx(expected, rel=1e-5)
    assert mac_loss(tiny_model, dataclasses.replace(with_hidden, gold_hidden=[False]), ANSWER)[0]["loss"].item() != got


def test_an_abstention_is_the_target_of_phi_alone(tiny_model: MACModel) -> None:
    lm = tiny_model.base_lm
    lm.prompts = prompt_encoder(lm.tokenizer, PromptFormat(abstention=UNKNOWN))
    abstaining = dataclasses.replace(BATCH, abstains=[True] * 4)
    said = dataclasses.replace(BATCH, answers=[UNKNOWN] * 4)
    got, expected = (mac_loss(tiny_model, batch, ANSWER)[0]["loss"].item() for batch in (abstaining, said))
    assert got == pytest.approx(expected, rel=1e-6)
    direct = LossWeights(answer=0, direct=1)
    got, expected = (mac_loss(tiny_model, batch, direct)[0]["loss"].item() for batch in (abstaining, BATCH))
    assert got == expected


def test_hidden_documents_need_an_abstention(model_folder: Folder) -> None:
    with pytest.raises(ConfigError, match=r"gold_hidden is 0\.2.*set model\.prompt\.abstention"):
        TrainTask(train_recipe(model_folder, gold_hidden=0.2))

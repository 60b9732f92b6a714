"""Recipes with the names of the last release are read for one more release."""

from __future__ import annotations

from typing import Any

import pytest

from mac_rag.config import Config
from mac_rag.errors import ConfigError
from pipelines.objective import LossWeights
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig

TRAINER = {"steps": 1, "batch_size": 1, "learning_rate": 1}
TUNE: dict[str, Any] = {"base_lm": {"name": "x"}, "trainer": TRAINER}
TRAIN: dict[str, Any] = {"preset": "distilgpt2", "trainer": TRAINER}


@pytest.mark.parametrize(
    ("kind", "values", "old", "new"),
    [
        (TuneConfig, TUNE, {"apart": 0.5, "unseen": 0.25}, {"question_blind": 0.5, "token_dropout": 0.25}),
        (TrainConfig, TRAIN, {"start": "reader"}, {"init": "kv_regression"}),
        (TrainConfig, TRAIN, {"start": "built", "together": 8}, {"init": "pretrained", "group_by_title": 8}),
        (LossWeights, {}, {"imitation": 0.5}, {"alignment": 0.5}),
    ],
)
def test_an_old_name_means_what_the_new_one_means_and_warns(
    kind: type[Config], values: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
) -> None:
    with pytest.warns(FutureWarning) as warned:
        read = kind.parse({**values, **old}, "test")
    assert read == kind.parse({**values, **new}, "test")
    for before, after in zip(old, new, strict=True):
        assert any(f"{before} is now called {after}" in str(warning.message) for warning in warned)


def test_a_wrong_value_under_an_old_name_is_still_named() -> None:
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=r"init: .*\(got 'cold'\)"):
        TrainConfig.parse({**TRAIN, "start": "cold"}, "test")

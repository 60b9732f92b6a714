"""Recipes on presets: what a recipe says is changed, and everything else stays the preset's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mac_rag.config import BaseLMConfig, MACConfig
from mac_rag.errors import ConfigError
from mac_rag.model.presets import PRESETS, preset
from pipelines.recipe import load_recipe
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig
from tests.pipelines.helpers import TRAINER


def loaded(kind: Any, folder: Path, values: dict[str, Any], *overrides: str) -> Any:
    """A recipe of a kind that was written to a folder."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"task": "train", **values, "trainer": TRAINER}))
    return load_recipe(kind, str(path), list(overrides))


def model_of(folder: Path, values: dict[str, Any], *overrides: str) -> MACConfig:
    return loaded(TrainConfig, folder, values, *overrides).model


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        ({"base_lm": {"name": "runs/tuned"}}, ()),
        ({"model": {"base_lm": {"name": "runs/tuned"}}}, ()),
        ({}, ("base_lm.name=runs/tuned",)),
        ({}, ("model.base_lm.name=runs/tuned",)),
        ({"base_lm": {"name": "another"}}, ("base_lm.name=runs/tuned",)),
    ],
)
def test_the_name_of_an_lm_keeps_everything_else_of_a_preset(
    tmp_path: Path, name: str, values: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    model = model_of(tmp_path, {"preset": name, **values}, *overrides)
    expected = preset(name).model_dump()
    expected["base_lm"]["name"] = "runs/tuned"
    assert model.model_dump() == expected
    assert model_of(tmp_path, {"preset": name}) == preset(name)


def test_nested_values_change_alone(tmp_path: Path) -> None:
    changes = {"tokens": 8, "aggregation": {"prior_width": 32}, "base_lm": {"quantization": "none"}}
    model = model_of(tmp_path, {"preset": "llama2-7b", "model": changes})
    whole = preset("llama2-7b")
    assert (model.tokens, model.aggregation.prior_width, model.aggregation.blocks) == (8, 32, whole.aggregation.blocks)
    assert (model.base_lm.dtype, model.base_lm.quantization) == ("bf16", "none")
    assert model.amortization == whole.amortization
    assert preset("llama2-7b") == whole  # not changed in place


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_lm": {"nmae": "x"}}, r"model\.base_lm\.nmae: Extra inputs"),
        ({"model": {"aggregation": {"block": 3}}}, r"model\.aggregation\.block: Extra inputs"),
        ({"model": {"base_lm": {"dtype": "fp8"}}}, r"model\.base_lm\.dtype.*'fp8'"),
        ({"base_lm": "runs/tuned"}, r"model\.base_lm.*'runs/tuned'"),
        ({"base_lm": None}, r"model\.base_lm.*None"),
        ({"model": 3}, "model is 3"),
        ({"model": {"base_lm": {"name": "a"}}, "base_lm": {"name": "b"}}, r"base_lm or model\.base_lm, not both"),
        ({"start_from": "mac-tiny"}, "give one of"),
        ({"preset": "gpt9"}, "unknown preset 'gpt9'"),
        ({"preset": ["gpt2-xl"]}, r"unknown preset \['gpt2-xl'\]"),
        ({"preset": None}, "unknown preset None"),
    ],
)
def test_wrong_values_beside_a_preset_are_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(tmp_path, {"preset": "gpt2-xl", **values})


class TestTuning:
    """Of a preset its LM is tuned, in its dtype."""

    def base_lm(self, folder: Path, values: dict[str, Any], *overrides: str) -> BaseLMConfig:
        return loaded(TuneConfig, folder, values, *overrides).base_lm

    @pytest.mark.parametrize("name", PRESETS)
    def test_the_lm_of_a_preset_is_tuned_unquantised_unless_somebody_asks(self, tmp_path: Path, name: str) -> None:
        whole = preset(name).base_lm
        assert self.base_lm(tmp_path, {"preset": name}) == whole.model_copy(update={"quantization": "none"})
        tuned = self.base_lm(tmp_path, {"preset": name, "base_lm": {"name": "runs/tuned"}})
        assert tuned == whole.model_copy(update={"name": "runs/tuned", "quantization": "none"})
        asked = self.base_lm(tmp_path, {"preset": name}, "base_lm.quantization=int8")
        assert asked.quantization == "int8"  # loading says that it cannot be trained

"""The models that the paper's scale needs: their paths, their order, and recipes that take their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.harness.paper_models import TUNING_SPLITS, TrainedModel, trained_on, with_starts
from mac_rag.data import SPLITS
from mac_rag.errors import ConfigError
from mac_rag.model.presets import PAPER
from pipelines.recipe import load_recipe
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig

PATHS = [
    "runs/gpt2-xl/train/best",
    "runs/gpt2-xl/train-squad/best",
    "runs/gpt2-xl/tune_qa/best",
    "runs/llama2-7b/train-joint/best",
    "runs/llama2-7b/train-joint-archivalqa/best",
    "runs/llama2-7b/tune_qa-joint-archivalqa/best",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_says_what_the_model_is(path: str) -> None:
    model = TrainedModel.of(path)
    assert model.path == path
    assert f"--output {model.folder} " in model.command(Path("data"))


@pytest.mark.parametrize("path", ["runs/gpt2-xl/best", "gpt2-xl", "runs/gpt2-xl/train-wikipedia/best", "mac-tiny"])
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="is no model of the paper's recipes"):
        TrainedModel.of(path)


def test_the_same_model_on_other_data() -> None:
    assert trained_on("runs/gpt2-xl/train/best", "squad") == "runs/gpt2-xl/train-squad/best"
    assert trained_on("runs/gpt2-xl/train-squad/best", "streamingqa") == "runs/gpt2-xl/train/best"
    assert trained_on("runs/llama2-7b/train-joint/best", "archivalqa") == "runs/llama2-7b/train-joint-archivalqa/best"


def test_an_lm_comes_before_what_is_trained_around_it_and_each_once() -> None:
    models = [TrainedModel.of(path) for path in ("runs/gpt2-xl/train/best", "runs/gpt2-xl/tune_qa/best")]
    assert [model.path for model in with_starts({model.path: model for model in models})] == [
        "runs/gpt2-xl/tune_qa/best",
        "runs/gpt2-xl/train/best",
    ]


@pytest.mark.parametrize("dataset", TUNING_SPLITS)
@pytest.mark.parametrize("name", PAPER)
def test_every_recipe_takes_the_values_of_every_data_set(name: str, dataset: str) -> None:
    joint = [False, True] if name == "llama2-7b" else [False]
    for model in (TrainedModel(name, task, each, dataset) for task in ("train", "tune_qa") for each in joint):
        kind = TrainConfig if model.task == "train" else TuneConfig
        recipe = load_recipe(kind, model.recipe, list(model.overrides(Path("data") / dataset)))
        assert isinstance(recipe, TrainConfig | TuneConfig)
        assert (recipe.data.name, recipe.data.path) == (dataset, f"data/{dataset}")
        assert {recipe.data.train, recipe.data.val} <= set(SPLITS[dataset])
        if model.joint:
            assert (recipe.context.retriever, recipe.context.k) == ("bm25", (1, 3, 5))
        else:
            assert recipe.context.retriever == "none"
        if isinstance(recipe, TrainConfig):
            assert recipe.model is not None
            assert recipe.model.base_lm.name == f"{model.starts_from.folder if model.starts_from else ''}/best"
            assert recipe.model.base_lm.quantization == ("nf4" if name in ("gpt2-xl", "llama2-7b") else "none")

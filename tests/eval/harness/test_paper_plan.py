"""The steps of `eval.paper` and the trained models that they need: paths, order, options and recipes that exist."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from eval.harness.paper_plan import (
    DATASETS,
    PLANS,
    TUNING_SPLITS,
    Step,
    TrainedModel,
    models_needed,
    models_to_train,
    steps,
    trained_on,
)
from eval.harness.scales import SCALES, Scale
from eval.report.catalogue import CATALOGUE
from mac_rag.data import SPLITS
from mac_rag.errors import ConfigError
from mac_rag.model.presets import PAPER
from pipelines.recipe import load_recipe
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig


def folders(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
    return path


def test_every_experiment_has_a_place_in_the_report_and_a_step() -> None:
    assert {entry.experiment for entry in PLANS} == {experiment.name for experiment in CATALOGUE}


def test_the_tiny_scale_needs_no_data_and_runs_every_experiment_but_those_of_a_data_set() -> None:
    planned = steps("tiny", None, 0)
    assert not any(step.missing or "--data" in step.arguments for step in planned)
    assert {entry.experiment for entry in PLANS} - {step.name for step in planned} == {"squad", "streamingqa"}


def test_the_papers_scale_runs_on_its_data_sets_only(tmp_path: Path) -> None:
    assert all(step.missing for step in steps("paper", None, 0))
    planned = steps("paper", folders(tmp_path, *DATASETS), 0)
    assert not any(step.missing for step in planned)
    assert all("--data" in step.arguments for step in planned)
    assert {f"main_table-{name}" for name in DATASETS} <= {step.name for step in planned}


@pytest.mark.parametrize("scale", SCALES)
def test_names_are_unique_and_options_exist(tmp_path: Path, scale: Scale) -> None:
    planned = steps(scale, folders(tmp_path, *DATASETS) if scale == "paper" else None, 3)
    assert len({step.name for step in planned}) == len(planned)
    for step in planned:
        app = typer.Typer()
        module, *arguments = step.command(tmp_path)
        app.command()(importlib.import_module(module).main)
        command = typer.main.get_command(app)
        command.make_context(step.name, list(arguments))  # stops at what the command would refuse
        assert arguments[arguments.index("--seed") + 1] == "3"


def test_a_folder_without_any_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of the folders streamingqa, squad, archivalqa"):
        steps("paper", tmp_path, 0)


PATHS = [
    "runs/gpt2-xl/train/best",
    "runs/gpt2-xl/train-squad/best",
    "runs/llama2-7b/train-joint/best",
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


def paper_step(name: str) -> Step:
    return next(step for step in steps("paper", None, 0) if step.name == name)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        (
            "main_table-squad",
            {"runs/gpt2-xl/train-squad/best", "runs/gpt2-xl/tune_qa-squad/best", "runs/distilgpt2/tune_qa/best"},
        ),
        ("quantization-squad", {"runs/llama2-7b/tune_qa-squad/best"}),
        ("hierarchical-archivalqa", {"runs/gpt2-xl/train-archivalqa/best"}),
    ],
)
def test_a_step_names_the_models_that_it_loads(name: str, needed: set[str]) -> None:
    assert set(models_needed(paper_step(name))) == needed


def test_a_model_that_no_recipe_trains_is_refused() -> None:
    step = replace(paper_step("hierarchical-archivalqa"), arguments=("--model", "runs/gpt9/train/best"))
    with pytest.raises(ConfigError, match="unknown preset 'gpt9'"):
        models_needed(step)


def test_models_are_trained_once_and_after_their_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = ["runs/gpt2-xl/train/best", "runs/gpt2-xl/tune_qa/best", "runs/gpt2-xl/train/best"]
    lm, model = models_to_train(paths)
    assert [lm.path, model.path] == ["runs/gpt2-xl/tune_qa/best", "runs/gpt2-xl/train/best"]
    Path(lm.path).mkdir(parents=True)
    assert models_to_train(paths) == [model]


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
            assert recipe.model.base_lm.name == f"{model.starts_from.folder if model.starts_from else ''}/best"
            assert recipe.model.base_lm.quantization == ("nf4" if name in ("gpt2-xl", "llama2-7b") else "none")

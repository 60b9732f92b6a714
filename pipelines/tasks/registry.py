"""The tasks of the pipelines by name: the class of each one's recipes, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mac_rag.config import Config
from pipelines.recipe import keep_recipe, read_recipe
from pipelines.stages import with_stage_folders
from pipelines.tasks.fit_recency import FitRecencyConfig, write_fitted
from pipelines.tasks.pretrain import PretrainConfig, PretrainTask
from pipelines.tasks.train import TrainTask
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_prior import TunePriorConfig, TunePriorTask
from pipelines.tasks.tune_qa import TuneConfig, TuneTask
from pipelines.tasks.tune_reading import TuneReadingConfig, TuneReadingTask
from pipelines.trainer import Task, Trainer


@dataclass(frozen=True)
class TaskKind:
    """A kind of stage.

    Attributes:
        config: the class of its recipes.
        run: runs it to its end, given a recipe, the folder of the run and the label of the progress bar. It resumes an
            earlier run in this folder, and writes `last/` there at the end.
    """

    config: type[Config]
    run: Callable[[Any, Path, str], None]


def _training(make: Callable[[Any, Path], Task]) -> Callable[[Any, Path, str], None]:
    def run(recipe: Any, output: Path, label: str) -> None:
        Trainer(make(recipe, output), recipe.trainer, output, label=label).run()

    return run


TASK_KINDS = {
    "pretrain": TaskKind(PretrainConfig, _training(PretrainTask)),
    "tune_qa": TaskKind(TuneConfig, _training(lambda recipe, _: TuneTask(recipe))),
    "tune_reading": TaskKind(TuneReadingConfig, _training(lambda recipe, _: TuneReadingTask(recipe))),
    "train": TaskKind(TrainConfig, _training(lambda recipe, _: TrainTask(recipe))),
    "tune_prior": TaskKind(TunePriorConfig, _training(lambda recipe, _: TunePriorTask(recipe))),
    "fit_recency": TaskKind(FitRecencyConfig, lambda recipe, output, _: write_fitted(recipe, output)),
}


def load_task(name: str, overrides: list[str] | None) -> tuple[str, Config]:
    """The task of a recipe, and its validated configuration; the arguments are those of `read_recipe`.

    Raises:
        ConfigError: as `read_recipe`; for an invalid value, which it names.
    """
    recipe = read_recipe(name, overrides)
    return recipe.task, TASK_KINDS[recipe.task].config.parse(recipe.values, recipe.where)


def run_task(task: str, recipe: Config, output: Path, label: str = "train") -> None:
    """Runs a task to its end, from wherever an earlier run of the same folder stopped.

    References of the recipe to other stages are folders next to `output`.

    Raises:
        ConfigError: if the folder holds a run of another recipe.
    """
    keep_recipe(kept_values(task, recipe), output)
    TASK_KINDS[task].run(with_stage_folders(recipe, output.parent), output, label)


def kept_values(task: str, recipe: Config) -> dict[str, Any]:
    """What the folder of a run keeps: the recipe as YAML holds it, with its task."""
    return {"task": task, **recipe.model_dump(mode="json")}

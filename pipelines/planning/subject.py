"""What a plan is of: a preset, a recipe, a stage of a pipeline, or a trained model, by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mac_rag.config import Config
from mac_rag.errors import ConfigError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.model import MACModel
from mac_rag.model.checkpoint import CONFIG, find, read_config
from mac_rag.model.presets import PRESETS, merged
from mac_rag.shipped_models import FINGERPRINTS
from pipelines.planning.architectures import lm_architecture
from pipelines.planning.empty_model import empty_lm, empty_model
from pipelines.planning.memory import Memory
from pipelines.planning.training import training_of
from pipelines.recipe import load_recipe, read_recipe, recipe_names
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig

GENERAL = "small-lm/train"  # settings of a training for what has no recipe of its own


@dataclass(frozen=True)
class Subject:
    """What a plan is of.

    Attributes:
        name: its name.
        recipe: its training.
    """

    name: str
    recipe: TrainConfig | TuneConfig

    @property
    def settings(self) -> str:
        """The sizes of a training step, for people."""
        recipe, trainer = self.recipe, self.recipe.trainer
        what = "documents" if isinstance(recipe, TrainConfig) else "questions"
        text = f"{trainer.batch_size} {what} of a pass, {trainer.accumulate} passes of a step, {trainer.precision}"
        if isinstance(recipe, TrainConfig) and recipe.backprop_dropout:
            text += f", back-propagation dropout {recipe.backprop_dropout:g}"
        return text

    def empty(self) -> MACModel | BaseLM:
        """A new model without numbers: a MAC model, or the LM that is tuned.

        Raises:
            ConfigError, ModelLoadError: as `empty_model`, and as `mac_rag.model.checkpoint.find`.
        """
        recipe = self.recipe
        if isinstance(recipe, TuneConfig):
            return empty_lm(recipe.base_lm, lm_architecture(recipe.base_lm))
        if recipe.model is not None:
            return empty_model(recipe.model)
        assert recipe.start_from is not None
        if recipe.start_from.startswith("${"):
            raise ConfigError(
                f"{recipe.start_from} is the result of another stage; give its folder: --set start_from=FOLDER"
            )
        folder = find(recipe.start_from, None)
        return empty_model(read_config(folder), folder)

    def training(self, document_tokens: int | None = None) -> Memory:
        """The memory of its training; the argument and errors are those of `training_memory`."""
        return training_of(self.empty(), self.recipe, document_tokens)

    def changed(self, **changes: Any) -> Subject:
        """The same with other values of the recipe, which may be nested."""
        values = merged(self.recipe.model_dump(mode="json"), changes)
        return replace(self, recipe=type(self.recipe).parse(values, self.name))


def subject(name: str, overrides: Sequence[str] = ()) -> Subject:
    """What a name stands for.

    Args:
        name: a preset; a recipe or a stage of a pipeline, as `pipelines.train` takes it; or a MAC model: a folder, a
            shipped one, or a repository on the Hub.
        overrides: `name=value` each, as `--set` takes them.

    Raises:
        ConfigError: for a name that stands for none of them, an invalid value, or a task that has no plan.
        ModelLoadError: when there is no such model.
    """
    if name in PRESETS:
        if f"{name}/train" in recipe_names():
            return Subject(name, load_recipe(TrainConfig, f"{name}/train", list(overrides)))
        return Subject(name, load_recipe(TrainConfig, GENERAL, [f"preset={name}", *overrides]))
    if (Path(name) / CONFIG).is_file() or name in FINGERPRINTS:
        values = read_recipe(GENERAL, list(overrides)).values
        values = {key: value for key, value in values.items() if key not in ("preset", "init")}
        return Subject(name, TrainConfig.parse({**values, "start_from": name}, name))
    recipe = read_recipe(name, list(overrides))
    kind: type[TrainConfig] | type[TuneConfig] | None = {
        "train": TrainConfig, "tune_qa": TuneConfig, None: _kind_of(recipe.values)
    }.get(recipe.task)  # fmt: skip
    if kind is None:
        raise ConfigError(f"{name}: the task {recipe.task} has no plan; train and tune_qa have one")
    return Subject(name, kind.parse(recipe.values, recipe.where))


def _kind_of(values: dict[str, Any]) -> type[TrainConfig] | type[TuneConfig]:
    """The kind of a recipe that says no task: the one whose fields it uses."""
    only_tuning = _fields(TuneConfig) - _fields(TrainConfig) - {"base_lm"}
    if values.keys() & only_tuning or ("base_lm" in values and "preset" not in values):
        return TuneConfig
    return TrainConfig


def _fields(kind: type[Config]) -> set[str]:
    return set(kind.model_fields)

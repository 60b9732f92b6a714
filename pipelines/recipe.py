"""Recipes of the training commands: reads them, overrides values, and stores the configuration beside a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
import yaml

from mac_rag.config import Config
from mac_rag.errors import ConfigError
from pipelines.stages import RECIPES, override_value, pipeline_file, read_mapping, read_stages, task_of

C = TypeVar("C", bound=Config)

_KEPT = "config.yaml"  # in the folder of a run

ConfigOption = Annotated[
    str, typer.Option("--config", help="A YAML file, or a recipe in the package, such as my-lm or mac-tiny/train.")
]
OutputOption = Annotated[Path, typer.Option("--output", help="Folder of the run. An interrupted run in it is resumed.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Overrides one value of the recipe, e.g. --set trainer.steps=100.")
]


class Recipe(NamedTuple):
    """A recipe as it is written, not validated.

    Attributes:
        where: its file, and its stage in a pipeline, for messages.
        task: one of `pipelines.stages.TASKS`.
    """

    values: dict[str, Any]
    where: str
    task: str


def load_recipe(kind: type[C], name: str, overrides: list[str] | None) -> C:
    """Reads and validates a recipe.

    Raises:
        ConfigError: as `read_recipe`; for an invalid value, which it names.
    """
    recipe = read_recipe(name, overrides)
    return kind.parse(recipe.values, recipe.where)


def read_recipe(name: str, overrides: list[str] | None) -> Recipe:
    """Reads a recipe without validating it.

    Args:
        name: a YAML file; a shipped recipe, such as `distilgpt2/train`; or a stage of a pipeline, such as
            `mac-small/joint` or `pipeline.yaml/joint`.
        overrides: `name=value` each.

    Raises:
        ConfigError: for an unknown name, ill-formed YAML, or a recipe without a task, which it names.
    """
    path = Path(name) if Path(name).is_file() else RECIPES / f"{name}.yaml"
    if path.is_file():
        values = read_mapping(path)
        if "stages" in values:
            raise ConfigError(f"{path} holds a pipeline; name one of its stages ({path}/STAGE), or use pipelines.run")
        recipe = Recipe(values, str(path), task_of(values, str(path)))
    else:
        recipe = _stage_recipe(name)
    for override in overrides or ():
        override_value(recipe.values, override)
    return recipe


def stages_or_itself(name: str) -> list[str]:
    """Names of the recipes of all stages, for the name of a pipeline; for that of a recipe, the name itself."""
    path = pipeline_file(name)
    if path is None or "stages" not in read_mapping(path):
        return [name]
    return [f"{name}/{stage.name}" for stage in read_stages(path)]


def recipe_names() -> list[str]:
    """Names of all shipped recipes: files and stages of pipelines."""
    names = []
    for path in sorted(RECIPES.rglob("*.yaml")):
        if path.name == "pipeline.yaml":
            names += [f"{path.parent.relative_to(RECIPES)}/{stage.name}" for stage in read_stages(path)]
        else:
            names.append(str(path.relative_to(RECIPES).with_suffix("")))
    return names


def _stage_recipe(name: str) -> Recipe:
    pipeline, _, stage_name = name.rpartition("/")
    path = pipeline_file(pipeline) if pipeline else None
    for stage in read_stages(path) if path is not None else ():
        if stage.name == stage_name:
            return Recipe(stage.values, f"{stage.where} (task {stage.task})", stage.task)
    raise ConfigError(f"no recipe {name!r}: neither a file nor one of {', '.join(recipe_names())}")


def keep_recipe(values: Mapping[str, Any], output: Path) -> None:
    """Writes what determines a run into its folder, or checks that the run in the folder has the same values.

    Args:
        values: a recipe with its task, or any other values that YAML holds.
        output: the folder.

    Raises:
        ConfigError: if the folder holds a run of other values; names the differences.
    """
    path = output / _KEPT
    output.mkdir(parents=True, exist_ok=True)
    new = output / f".config.{os.getpid()}"
    new.write_text(yaml.safe_dump(dict(values), sort_keys=False))
    try:
        os.link(new, path)  # atomic, because several processes may do this at the same time
    except FileExistsError:
        changes = changes_since(output, values)
        if changes:
            raise ConfigError(
                f"{output} holds a run of another configuration: {'; '.join(changes)}. Choose another --output, or "
                f"delete {output}"
            ) from None
    finally:
        new.unlink()


def changes_since(output: Path, values: Mapping[str, Any]) -> list[str]:
    """Differences of values from those of the run in a folder; none if the folder has no run."""
    path = output / _KEPT
    if not path.exists():
        return []
    try:
        stored = read_mapping(path)
    except ConfigError as error:
        return [str(error)]
    return list(_differences(stored, dict(values), ""))


def _differences(old: Any, new: Any, name: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield f"{name} was {json.dumps(old)} and is now {json.dumps(new)}"

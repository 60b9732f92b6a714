"""Pipeline files: named stages in order. Each has a task and a recipe, and may start from results of earlier stages.

    shared:                # values for YAML anchors; the stages do not read this key
      data: &data {name: newswire}
    stages:
      reader:
        task: tune_qa
        data: *data
        ...
      memory:
        task: train
        model: {base_lm: {name: "${stages.reader}/best"}, ...}
        ...

Every stage has a folder with its name, and the folders of one pipeline lie side by side. `${stages.reader}/best` is the
folder `best` of the stage `reader`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mac_rag.config import Config
from mac_rag.errors import ConfigError
from mac_rag.strict_yaml import parse_yaml, read_yaml
from mac_rag.untrusted_files import MalformedError

C = TypeVar("C", bound=Config)

RECIPES = Path(__file__).parent / "recipes"
# The tasks of `pipelines.tasks.registry`.
TASKS = ("pretrain", "tune_qa", "tune_reading", "train", "tune_prior", "fit_recency")
_STAGE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_REFERENCE = re.compile(r"\$\{stages\.([^}]*)\}/(?:best|last)")
_EVERY_STAGE = "*"


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline.

    Attributes:
        name: its name, which is also the name of its folder.
        task: one of `TASKS`.
        values: its recipe, not validated, with unresolved references to earlier stages.
        where: file and stage, for messages.
    """

    name: str
    task: str
    values: dict[str, Any]
    where: str

    @property
    def starts_from(self) -> set[str]:
        """Names of the stages that its recipe refers to."""
        return {match[1] for text in _texts(self.values) if (match := _REFERENCE.fullmatch(text))}


def pipeline_file(name: str) -> Path | None:
    """The file of a pipeline: `name` itself, or that of the shipped model with this name; None if there is neither."""
    path = Path(name) if Path(name).is_file() else RECIPES / name / "pipeline.yaml"
    return path if path.is_file() else None


def read_stages(path: Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """The stages of a pipeline file, in order.

    Args:
        overrides: `STAGE.name=value` each; `*` stands for every stage whose recipe has the first of the names.

    Raises:
        ConfigError: for ill-formed YAML, a stage without a known task, a reference to anything but an earlier stage, or
            an override of an unknown stage or value; it names the stage.
    """
    values = read_mapping(path)
    stages = values.get("stages")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(f"{path} holds no pipeline: it has no stages")
    unknown = sorted(map(str, values.keys() - {"shared", "stages"}))
    if unknown:
        raise ConfigError(f"{path}: a pipeline has shared and stages, but not {', '.join(unknown)}")
    stages = {name: copy.deepcopy(stage) for name, stage in stages.items()}  # YAML aliases share one object
    for override in overrides:
        _override_stage(path, stages, override)
    read: list[Stage] = []
    for name, stage in stages.items():
        where = f"{path}, stage {name}"
        if not isinstance(name, str) or not _STAGE_NAME.fullmatch(name):
            raise ConfigError(f"{where}: a name has lower-case letters, digits, - and _, and becomes a folder's")
        recipe = dict(stage) if isinstance(stage, dict) else {}
        task = task_of(recipe, where)
        _check_references(recipe, [earlier.name for earlier in read], where)
        read.append(Stage(name, task, recipe, where))
    return read


def task_of(recipe: dict[str, Any], where: str) -> str:
    """Takes the task out of a recipe.

    Raises:
        ConfigError: if there is none, or an unknown one; names the recipe (`where`) and the tasks.
    """
    task = recipe.pop("task", None)
    if task not in TASKS:
        raise ConfigError(f"{where}: give it a task, one of {', '.join(TASKS)}; it has {task!r:.80}")
    return str(task)


def with_stage_folders(config: C, folder: Path) -> C:
    """The recipe with paths in place of its references; `folder` holds the folders of all stages."""
    values = config.model_dump(mode="json")
    if not any(_REFERENCE.fullmatch(text) for text in _texts(values)):
        return config
    return type(config).model_validate(
        _mapped(values, lambda text: _REFERENCE.sub(lambda match: str(folder / _path(match)), text))
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: for a file that cannot be read or is larger than 64 KiB; for ill-formed YAML, a repeated key, or a
            file that holds no mapping.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no recipe, but {values!r:.200}")
    return values


def override_value(values: dict[str, Any], override: str) -> None:
    """Sets one value: `override` is `name.of.value=YAML`."""
    dotted, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set takes name=value, got {override!r}")
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override}: {parent!r} holds no further values")
    try:
        values[last] = parse_yaml(text)
    except MalformedError:
        raise ConfigError(f"--set {override}: {text!r} is not valid YAML") from None


def _override_stage(path: Path, stages: dict[str, Any], override: str) -> None:
    name, dot, rest = override.partition(".")
    if name == _EVERY_STAGE and dot:
        first = re.split(r"[.=]", rest)[0]
        chosen = [stage for stage in stages.values() if isinstance(stage, dict) and first in stage]
        if not chosen:
            raise ConfigError(f"--set {override}: no stage of {path} has {first!r}")
    elif name in stages and dot and isinstance(stages[name], dict):
        chosen = [stages[name]]
    else:
        raise ConfigError(f"--set {override}: give STAGE.name=value; the stages of {path} are {', '.join(stages)}")
    for stage in chosen:
        override_value(stage, rest)


def _check_references(values: Any, earlier: Sequence[str], where: str) -> None:
    for text in _texts(values):
        match = _REFERENCE.fullmatch(text)
        if "${" in text and match is None:
            raise ConfigError(f"{where}: {text!r} is no reference; write ${{stages.NAME}}/best or .../last")
        if match is not None and match[1] not in earlier:
            known = f"earlier stages are {', '.join(earlier)}" if earlier else "it is the first stage"
            raise ConfigError(f"{where}: {text!r} refers to {match[1]!r}, which is no earlier stage; {known}")


def _path(match: re.Match[str]) -> str:
    return f"{match[1]}/{match[0].rpartition('/')[2]}"


def _texts(values: Any) -> Iterator[str]:
    """All strings in nested values."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _texts(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value)


def _mapped(values: Any, change: Callable[[str], str]) -> Any:
    """Nested values with every string changed."""
    if isinstance(values, str):
        return change(values)
    if isinstance(values, dict):
        return {name: _mapped(value, change) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_mapped(value, change) for value in values]
    return values

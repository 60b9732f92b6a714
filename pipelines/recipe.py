"""What the training commands share: a recipe, values that override it, and a folder for the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml

from mac_rag.config import Config
from mac_rag.errors import ConfigError

C = TypeVar("C", bound=Config)

RECIPES = Path(__file__).parent / "recipes"

ConfigOption = Annotated[
    str, typer.Option("--config", help="A YAML file, or the name of a shipped recipe such as mac-tiny/train.")
]
OutputOption = Annotated[
    Path, typer.Option("--output", help="Folder of the run. A run that stopped there goes on where it stopped.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Overrides one value of the recipe, e.g. --set trainer.steps=100.")
]
RetrieverOption = Annotated[
    str | None,
    typer.Option(
        "--retriever",
        help="Whose documents stand in front of the questions: none, bm25, minilm, hybrid, contriever, dpr, "
        "sentence-transformers:MODEL, module:attr. Short for --set context.retriever=...",
        show_default="the recipe's",
    ),
]
KOption = Annotated[
    str | None,
    typer.Option(
        "--k",
        help="How many of them; of several numbers with commas, such as 1,3,5, one is drawn for each question. Short "
        "for --set context.k=[...]",
        show_default="the recipe's",
    ),
]


def with_context(overrides: list[str] | None, retriever: str | None, k: str | None) -> list[str]:
    """The values of `--set`, and those of `--retriever` and `--k` behind them."""
    named = [] if retriever is None else [f"context.retriever={json.dumps(retriever)}"]
    numbers = [] if k is None else [f"context.k=[{k}]"]
    return [*(overrides or ()), *named, *numbers]


def load_recipe(kind: type[C], name: str, overrides: list[str] | None) -> C:
    """Reads and validates a recipe.

    Raises:
        ConfigError: as `recipe_values`, and for an invalid value, naming it.
    """
    values, path = recipe_values(name, overrides)
    return kind.parse(values, path)


def recipe_values(name: str, overrides: list[str] | None) -> tuple[dict[str, Any], Path]:
    """What a recipe says, not validated, and the file where it does.

    Raises:
        ConfigError: for a missing file or ill-formed YAML, naming it.
    """
    path = Path(name) if Path(name).is_file() else RECIPES / f"{name}.yaml"
    if not path.is_file():
        known = sorted(str(p.relative_to(RECIPES).with_suffix("")) for p in RECIPES.rglob("*.yaml"))
        raise ConfigError(f"no recipe {name!r}: neither a file nor one of {', '.join(known)}")
    try:
        values = yaml.safe_load(path.read_text())
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds no recipe, but {values!r}")
        for override in overrides or ():
            _override(values, override)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    return values, path


def _override(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set takes name=value, got {override!r}")
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override}: {parent!r} holds no further values")
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: {text!r} is not valid YAML") from None


def keep_recipe(config: Config, output: Path) -> None:
    """Leaves the exact configuration beside the run.

    Raises:
        ConfigError: when the folder holds a run of another configuration.
    """
    path = output / "config.yaml"
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    output.mkdir(parents=True, exist_ok=True)
    whole = output / f".config.{os.getpid()}"
    whole.write_text(text)
    try:
        os.link(whole, path)  # at once or not at all, for with several processes all come here together
    except FileExistsError:
        if path.read_text() != text:
            raise ConfigError(
                f"{output} holds a run of another configuration ({path} differs); choose another --output, or delete it"
            ) from None
    finally:
        whole.unlink()

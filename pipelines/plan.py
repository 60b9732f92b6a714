"""The size of a model and the bytes and FLOPs of its training and of answering: `python -m pipelines.plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say, show_table
from pipelines.recipe import SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from pipelines.sizes import Part
    from pipelines.tasks.train_config import TrainConfig

_WIDTH = 190  # of the table, in columns
GENERAL = "small-lm/train"  # settings of a training for a preset that has no recipe of its own


def main(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, such as smollm2-360m, or a recipe of the task train with a model.",
            show_default="a table of all presets, in Markdown",
        ),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Print bytes and FLOPs of a training step, of adapting to a document, and of a question, part by part.

    Answering is that of one question of 2,048 tokens with its documents, from a bank of 10,000 documents. Bytes of
    weights, gradients and the optimizer are exact; activations and FLOPs are estimates (see docs/guides/presets.md). No
    weights are loaded.
    """
    from pipelines.sizes import document_bytes, empty_model, sizes_of

    if name is None:
        for line in preset_table():
            say(line)
        return
    recipe = recipe_of(name, set_ or ())
    parts = sizes_of(recipe)
    assert recipe.model is not None  # else there are no sizes
    model, trainer = empty_model(recipe.model), recipe.trainer
    say(f"{name}: {trainer.batch_size} documents in a pass, {trainer.accumulate} passes in a step, {trainer.precision}")
    stored = [f"{document_bytes(model, rows):,} bytes in {rows}" for rows in ("bf16", "int8")]
    say(f"a document of one chunk in a bank: {' or '.join(stored)}")
    show_table(plan_table(parts), width=_WIDTH)


def recipe_of(name: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """The recipe that trains a preset, or a recipe of the task `train` itself, with values as `--set` takes them.

    Raises:
        ConfigError: as `load_recipe`; for a stage of another task.
    """
    from mac_rag.errors import ConfigError
    from mac_rag.model.presets import PRESETS
    from pipelines.recipe import load_recipe, read_recipe, recipe_names
    from pipelines.tasks.train_config import TrainConfig

    if name in PRESETS:
        if f"{name}/train" in recipe_names():
            return load_recipe(TrainConfig, f"{name}/train", list(overrides))
        return load_recipe(TrainConfig, GENERAL, [f"preset={name}", *overrides])
    recipe = read_recipe(name, list(overrides))
    if recipe.task != "train":
        raise ConfigError(f"{name}: the task {recipe.task} has no plan; name a recipe of the task train, or a preset")
    return TrainConfig.parse(recipe.values, recipe.where)


def plan_table(parts: dict[str, Part]) -> Table:
    """A model part by part: weights, GiB and FLOPs of its training, then of answering."""
    from rich.table import Column, Table

    kinds = ("weights", "gradients", "optimizer", "activations")
    table = Table(
        Column("", no_wrap=True),
        "weights, M",
        "trained, M",
        *(f"{kind}, GiB" for kind in kinds),
        "training, GiB",
        "GFLOP a step",
    )
    for header in ("answering, GiB", "GFLOP a document", "GFLOP a question"):
        table.add_column(header)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, some in [*((name, [part]) for name, part in parts.items()), ("in all", list(parts.values()))]:
        of_kinds = [sum(part.training[kind] for part in some) for kind in kinds]
        counts = (sum(part.weights for part in some), sum(part.trained for part in some))
        table.add_row(
            name,
            *(f"{count / 1e6:,.1f}" for count in counts),
            *map(_gib, [*of_kinds, sum(of_kinds)]),
            _giga(some, "step"),
            _gib(sum(sum(part.answering.values()) for part in some)),
            _giga(some, "document"),
            _giga(some, "question"),
        )
    return table


def preset_table() -> Iterator[str]:
    """The plans of all presets as a table in Markdown; see `docs/guides/presets.md`."""
    from mac_rag.model.presets import PRESETS
    from pipelines.sizes import BASE_LM, document_bytes, empty_model, sizes_of

    yield (
        "| preset | LM, M | trained, M | T | KB a document | training | GiB | TFLOP a step | answering, GiB | "
        "GFLOP a question |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, config in PRESETS.items():
        recipe, model = recipe_of(name), empty_model(config)
        parts, trainer = sizes_of(recipe), recipe.trainer
        every = list(parts.values())
        cells = [
            f"`{name}`",
            f"{parts[BASE_LM].weights / 1e6:,.1f}" + (", 4 bit" if config.base_lm.quantization == "nf4" else ""),
            f"{sum(part.trained for part in every) / 1e6:,.1f}",
            str(config.tokens),
            " / ".join(f"{document_bytes(model, rows) / 1000:.0f}" for rows in ("bf16", "int8")),
            f"{trainer.batch_size} × {trainer.accumulate}, {trainer.precision}",
            _gib(sum(sum(part.training.values()) for part in every)),
            f"{sum(part.flops['step'] for part in every) / 1e12:,.1f}",
            _gib(sum(sum(part.answering.values()) for part in every)),
            _giga(every, "question"),
        ]
        yield f"| {' | '.join(cells)} |"


def _giga(parts: list[Part], use: str) -> str:
    return f"{sum(part.flops[use] for part in parts) / 1e9:,.1f}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.{1 if size >= 10 << 30 else 2}f}"


if __name__ == "__main__":
    run_command(main)

"""Meta-trains MAC: `python -m pipelines.train --help`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mac_rag.cli.run import run_command
from pipelines.recipe import (
    ConfigOption,
    KOption,
    OutputOption,
    RetrieverOption,
    SetOption,
    load_recipe,
    with_context,
)


def main(
    config: ConfigOption,
    output: OutputOption,
    retriever: RetrieverOption = None,
    k: KOption = None,
    base_lm: Annotated[
        Literal["frozen", "lora", "full"] | None,
        typer.Option(
            help="Keep the base LM frozen, or train it jointly. Short for --set tune_base_lm=...",
            show_default="the recipe's",
        ),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Meta-train the amortization, input and aggregation networks around an LM, which is frozen or trained jointly.

    best/ and last/ in the output folder are MAC checkpoints: `MACModel.from_pretrained("OUTPUT/best")`. With several
    processes: `torchrun --nproc_per_node N -m pipelines.train ...`
    """
    from pipelines.tasks.registry import run_task
    from pipelines.tasks.train_config import TrainConfig

    overrides = with_context(set_, retriever, k) + ([] if base_lm is None else [f"tune_base_lm={base_lm}"])
    run_task("train", load_recipe(TrainConfig, config, overrides), output)


if __name__ == "__main__":
    run_command(main)

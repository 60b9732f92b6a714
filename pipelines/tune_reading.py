"""Tunes an LM to read documents through its own keys and values: `python -m pipelines.tune_reading --help`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(
    output: OutputOption,
    config: ConfigOption = "smollm2-135m-reading/read",
    lm: Annotated[
        str | None,
        typer.Option(
            "--lm",
            help="The LM: a folder, a name on the Hub, or smollm2-135m. Short for --set base_lm.name=...",
            show_default="the recipe's",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help="Folder of the data set. Short for --set data.path=...", show_default="the recipe's"
        ),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Tune an LM to answer from documents that it reads one by one, several at once, and trusts by their scores.

    Low-rank updates of all linear layers are trained, and by how much a retriever's scores count. best/ and last/ in
    the output folder are PEFT adapters, with reading.json and the codec of keys and values beside them.
    """
    from pipelines.tasks.registry import run_task
    from pipelines.tasks.tune_reading import TuneReadingConfig

    short = [("base_lm.name", lm), ("data.path", data)]
    overrides = [f"{name}={json.dumps(value)}" for name, value in short if value is not None]
    run_task("tune_reading", load_recipe(TuneReadingConfig, config, [*(set_ or ()), *overrides]), output)


if __name__ == "__main__":
    run_command(main)

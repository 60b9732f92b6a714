"""Fits the recency term of a MAC model: `python -m pipelines.fit_recency --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Fit the recency term of a trained model, by which newer documents on the same subject count more.

    Four numbers are learned from documents with dates, of which some are newer versions of others; all other weights
    stay as they are. For a model with hashed BM25, two numbers come first: how much the years count that texts name.
    last/ in the output folder is the model with both.
    """
    from pipelines.tasks.fit_recency import FitRecencyConfig
    from pipelines.tasks.registry import run_task

    run_task("fit_recency", load_recipe(FitRecencyConfig, config, set_), output)


if __name__ == "__main__":
    run_command(main)

"""Fits the hops between the slots of a MAC model: `python -m pipelines.fit_hops --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Fit the hops of a trained model, by which each slot looks for what the slots before it have not found.

    The hops and the projections of the document prior are fitted on newswire whose questions need several documents;
    all other weights stay as they are. last/ in the output folder is the model with them, a start for joint training.
    """
    from pipelines.tasks.fit_hops import FitHopsConfig
    from pipelines.tasks.registry import run_task

    run_task("fit_hops", load_recipe(FitHopsConfig, config, set_), output)


if __name__ == "__main__":
    run_command(main)

"""Tunes a base LM on questions and answers: `python -m pipelines.tune_qa --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Tune a base LM on question-answer pairs, with or without retrieved documents before them.

    best/ and last/ in the output folder are ordinary Hugging Face model folders. The paper's baselines and MAC with
    retrieval start from such an LM.
    """
    from pipelines.tasks.registry import run_task
    from pipelines.tasks.tune_qa import TuneConfig

    run_task("tune_qa", load_recipe(TuneConfig, config, set_), output)


if __name__ == "__main__":
    run_command(main)

"""Tunes the document prior of a MAC model and its sentence encoder: `python -m pipelines.tune_prior --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Tune the document prior of a trained model, and the sentence encoder whose vectors it compares.

    Each question is to rank its own document first among many with the same title; all other weights stay as they are.
    last/ in the output folder is the tuned model, best/ the one that ranked held-out documents best.
    """
    from pipelines.tasks.registry import run_task
    from pipelines.tasks.tune_prior import TunePriorConfig

    run_task("tune_prior", load_recipe(TunePriorConfig, config, set_), output)


if __name__ == "__main__":
    run_command(main)

"""Trains by a recipe, whatever its task: `python -m pipelines.train --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Train by a recipe, whose task says what: MAC's networks around an LM, or the LM for questions or for reading.

    best/ and last/ in the output folder are what the task trains: a MAC checkpoint for `MACModel.from_pretrained`, a
    Hugging Face model folder, or, of tune_reading, a PEFT adapter for `mac-rag init`. With several processes: `torchrun
    --nproc_per_node N -m pipelines.train ...`
    """
    from pipelines.tasks.registry import load_task, run_task

    task, recipe = load_task(config, set_)
    run_task(task, recipe, output)


if __name__ == "__main__":
    run_command(main)

"""Trains a small LM and its tokenizer from scratch: `python -m pipelines.pretrain --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Train a small LM and its tokenizer from scratch, on generated news.

    best/ and last/ in the output folder are ordinary Hugging Face model folders.
    """
    from pipelines.tasks.pretrain import PretrainConfig
    from pipelines.tasks.registry import run_task

    run_task("pretrain", load_recipe(PretrainConfig, config, set_), output)


if __name__ == "__main__":
    run_command(main)

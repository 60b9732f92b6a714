"""Trains a small LM and its tokenizer from a text corpus: `python -m pipelines.pretrain --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, keep_recipe, load_recipe


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Train a small LM and its tokenizer from scratch: a causal one, or a T5 for MAC's text encoders to start from.

    The corpus is the generated newswire or your own text files. best/ and last/ in the output folder are ordinary
    Hugging Face model folders.
    """
    from pipelines.tasks.pretrain import PretrainConfig, PretrainTask
    from pipelines.tasks.pretrain_t5 import PretrainT5Task
    from pipelines.trainer import Trainer

    recipe = load_recipe(PretrainConfig, config, set_)
    keep_recipe(recipe, output)
    task = PretrainT5Task if recipe.lm.kind == "t5" else PretrainTask
    Trainer(task(recipe, output), recipe.trainer, output).run()


if __name__ == "__main__":
    run_command(main)

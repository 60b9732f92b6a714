"""Tunes an LM to read documents through its own keys and values: `python -m pipelines.tune_reading --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(output: OutputOption, config: ConfigOption = "smollm2-135m-reading/read", set_: SetOption = None) -> None:
    """Tune an LM to answer from documents that it reads one by one, several at once, and trusts by their scores.

    Low-rank updates of all linear layers are trained, and by how much a retriever's scores count. best/ and last/ in
    the output folder are PEFT adapters, with reading.json and the codec of keys and values beside them.
    """
    from pipelines.tasks.registry import run_task
    from pipelines.tasks.tune_reading import TuneReadingConfig

    run_task("tune_reading", load_recipe(TuneReadingConfig, config, set_), output)


if __name__ == "__main__":
    run_command(main)

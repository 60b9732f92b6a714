"""Meta-trains MAC: `python -m pipelines.train --help`."""

from __future__ import annotations

from mac_rag.cli.run import run_command
from pipelines.recipe import ConfigOption, OutputOption, SetOption, load_recipe


def main(config: ConfigOption, output: OutputOption, set_: SetOption = None) -> None:
    """Meta-train the amortization, input and aggregation networks around an LM, which is frozen or trained jointly.

    best/ and last/ in the output folder are MAC checkpoints: `MACModel.from_pretrained("OUTPUT/best")`. With several
    processes: `torchrun --nproc_per_node N -m pipelines.train ...`
    """
    from pipelines.tasks.registry import run_task
    from pipelines.tasks.train_config import TrainConfig

    run_task("train", load_recipe(TrainConfig, config, set_), output)


if __name__ == "__main__":
    run_command(main)

"""Memory and answers of hierarchical aggregation (figure 5): `python -m eval.hierarchical --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from eval.harness.aggregation_table import measure_methods
from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, whole_numbers
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    subgroups: Annotated[
        str, typer.Option(help="Sizes M of the subgroups, separated by commas.")
    ] = "4,8,16,32,64,128,256",
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 16,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure memory and accuracy of hierarchical aggregation (algorithm 3), by subgroup size M.

    It is compared with the whole bank in one softmax ("full", as in the paper) and with streaming, which gives the same
    answers at constant memory.
    """
    from eval.harness.results import result_path
    from mac_rag.errors import ConfigError

    path = result_path(output, "hierarchical")
    sizes = whole_numbers("--subgroups", subgroups)
    if sizes[0] < 2:
        raise ConfigError(f"--subgroups must be at least 2, got {subgroups!r}: groups of one never become fewer")
    setup = SCALES[scale]["hierarchical"].override(model=model, documents=documents, questions=questions)
    dataset, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    from eval.harness.aggregation_methods import hierarchical_methods
    from mac_rag.model import MACModel

    measure_methods(
        "hierarchical",
        lambda network, bank, _: hierarchical_methods(network, bank, sizes),
        path,
        MACModel.from_pretrained(setup.model, device=device),
        dataset,
        batch_size,
        options=setup.options(context.params),
        source=source,
    )


if __name__ == "__main__":
    run_command(main)

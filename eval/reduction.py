"""Answers from a bank of a limited size (figure 7): `python -m eval.reduction --help`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from eval.harness.aggregation_table import measure_methods
from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from mac_rag.data.types import QADataset
    from mac_rag.memory.bank import MemoryBank


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 16,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure answers from banks that keep 75, 50 and 25 % of the stream's documents as entries.

    Random pruning, random averaging and averaging of the nearest entries make room as documents arrive. The whole bank
    is the comparison.
    """
    from eval.harness.results import result_path

    path = result_path(output, "reduction")
    setup = SCALES[scale]["reduction"].override(model=model, documents=documents, questions=questions)
    dataset, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    from eval.harness.aggregation_methods import AggregationMethod, attending, projected, reduction_methods
    from mac_rag.model import MACModel

    def methods(network: MACModel, bank: MemoryBank, stream: QADataset) -> Iterator[AggregationMethod]:
        whole = attending(network, projected(network, bank))
        yield AggregationMethod("reduction", "whole bank", "whole bank", None, len(bank.phi), bank.nbytes, whole)
        yield from reduction_methods(network, bank, stream.documents, seed)

    measure_methods(
        "reduction",
        methods,
        path,
        MACModel.from_pretrained(setup.model, device=device),
        dataset,
        batch_size,
        options=setup.options(context.params),
        source=source,
    )


if __name__ == "__main__":
    run_command(main)

"""Memory and answers of hierarchical aggregation and of smaller banks (figures 5 and 7).

`python -m eval.aggregation hierarchical --help`
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, report, whole_numbers
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command


def main(
    context: typer.Context,
    experiment: Annotated[
        Literal["hierarchical", "reduction"],
        typer.Argument(help="Vary the size of subgroups (figure 5), or the size of the bank (figure 7)."),
    ],
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    subgroups: Annotated[
        str, typer.Option(help="Sizes M of the subgroups of hierarchical aggregation, separated by commas.")
    ] = "4,8,16,32,64,128,256",
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 16,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure memory and accuracy of aggregating a bank.

    hierarchical: aggregation in subgroups of size M (algorithm 3), against the whole bank in one softmax ("full", as in
    the paper) and against streaming, which gives the same answers at constant memory.

    reduction: banks that keep 75, 50 and 25 % of the stream's documents as entries, against the whole bank. Random
    pruning, random averaging and averaging of the nearest entries make room as documents arrive.

    Memory is the peak of all tensors that aggregating one batch of questions allocates, beyond the stored bank. As in
    the paper it excludes the encoding of the questions and the LM.
    """
    from eval.harness.results import result_path
    from mac_rag.errors import ConfigError

    path = result_path(output, experiment)
    sizes = whole_numbers("--subgroups", subgroups)
    if sizes[0] < 2:
        raise ConfigError(f"--subgroups must be at least 2, got {subgroups!r}: groups of one never become fewer")
    setup = SCALES[scale][experiment].override(model=model, documents=documents, questions=questions)
    dataset, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    from eval.harness.aggregation import hierarchical_methods, measure, reduction_methods
    from eval.harness.protocol import adapt, samples
    from mac_rag.bank import MemoryBank
    from mac_rag.engine import MACEngine
    from mac_rag.model import AmortizedModel

    loaded = AmortizedModel.from_pretrained(setup.model, device=device)
    bank = MemoryBank(loaded.fingerprint)
    adaptation = adapt(MACEngine(loaded, bank), dataset.documents)
    if experiment == "hierarchical":
        methods = hierarchical_methods(loaded, bank, sizes)
    else:
        methods = reduction_methods(loaded, bank, dataset.documents, seed)
    rows, verdicts = measure(loaded, methods, dataset, batch_size)
    report(
        path,
        experiment=experiment,
        options=setup.options(context.params),
        rows=rows,
        samples=samples(dataset.questions, verdicts),
        adaptation=adaptation,
        dataset=dataset,
        source=source,
        model=loaded,
    )


if __name__ == "__main__":
    run_command(main)

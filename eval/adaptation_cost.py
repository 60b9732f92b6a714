"""Time and memory of adaptation, for each system (figure 2): `python -m eval.adaptation_cost --help`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from eval.baselines.options import ADAPTING, LMOption, chosen_methods
from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, report
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, open_stream
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    import torch

    from eval.harness.results import Row
    from eval.harness.systems import System
    from mac_rag.data.types import Document

_STREAM = 1665
_MB = 1e6


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = ",".join(ADAPTING),
    documents: DocumentsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    lm: LMOption = None,
    output: OutputOption = None,
) -> None:
    """Measure the time and peak memory of adapting to documents.

    Memory is the peak of adapting to one document. It includes the networks: for fine-tuning the LM and the state of
    its optimiser, for MAC the amortization network. Time is measured on a stream, document by document for fine-tuning
    and in batches for the others, and scaled to 1,665 documents. Neither depends on the weights, so CaMeLS and CCM are
    not trained for this.
    """
    from eval.harness.results import result_path

    path = result_path(output, "adaptation_cost")
    from eval.baselines.factory import open_factory
    from mac_rag.errors import ConfigError

    names = chosen_methods(methods, ADAPTING)
    setup = SCALES[scale]["adaptation_cost"].override(model=model, documents=documents)
    options = setup.options(context.params)
    dataset, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    factory = open_factory(setup, path, scale=scale, data=data, seed=seed, device=device, batch_size=batch_size, lm=lm)
    rows: list[Row] = []
    not_run: dict[str, str] = {}
    for method in names:
        say(method, err=True)
        try:
            system = factory.make(method, learning_rate=factory.setup.retention_rate, trained=False)
        except ConfigError as error:
            not_run[method] = str(error)
            continue
        rows.append(measure(system, dataset.documents, factory.model.device))
    report(
        path,
        experiment="adaptation_cost",
        options=options,
        rows=rows,
        dataset=dataset,
        source=source,
        model=factory.model,
        not_run=not_run,
    )


def measure(system: System, documents: Sequence[Document], device: torch.device) -> Row:
    """Measures a system that has seen no document: memory on the first one, which warms up, and time on the others.

    The row has peak and network memory in megabytes, seconds per document, and minutes for 1,665 documents.
    """
    import torch

    from eval.harness.allocations import allocated_peak
    from eval.harness.results import Row

    networks = {id(weight): weight.nbytes for network in system.networks for weight in network.parameters()}
    _, extra = allocated_peak(lambda: system.adapt(documents[:1]), device)
    began = time.perf_counter()
    system.adapt(documents[1:])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - began) / (len(documents) - 1)
    return Row(
        name=system.name,
        settings={"method": system.name},
        documents=len(documents),
        measures={
            "peak_mb": (sum(networks.values()) + extra) / _MB,
            "networks_mb": sum(networks.values()) / _MB,
            "seconds_per_document": seconds,
            "minutes": _STREAM * seconds / 60,
        },
    )


if __name__ == "__main__":
    run_command(main)

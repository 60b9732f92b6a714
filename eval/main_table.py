"""MAC against online fine-tuning and other baselines (tables 1, 9 and 10): `python -m eval.main_table --help`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from eval.baselines.options import METHODS, LMOption, LoraOption, UnrelatedOption, chosen_methods
from eval.harness.command import (
    BatchOption,
    DeviceOption,
    OutputOption,
    ProtocolOption,
    ScaleOption,
    SeedOption,
    report,
)
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.results import Row, Verdict


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = ",".join(METHODS),
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Learning rate of all fine-tuning.",
            show_default="searched for each method on validation documents",
        ),
    ] = None,
    lora_rank: LoraOption = None,
    unrelated: UnrelatedOption = None,
    protocol: ProtocolOption = "strict",
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    lm: LMOption = None,
    output: OutputOption = None,
) -> None:
    """Compare all systems by the paper's protocol: one pass over a stream of documents, then all questions.

    Every system has the same LM, tuned on questions and answers. Fine-tuning takes one step of Adam on each document;
    its learning rate is searched on a validation stream. CaMeLS and CCM are trained first, and cached.
    """
    from eval.harness.results import result_path

    path = result_path(output, "main_table")
    names = chosen_methods(methods)
    setup = SCALES[scale]["main_table"].override(model=model, documents=documents, questions=questions)
    options = setup.options(context.params)
    size = setup.documents, setup.questions
    dataset, source = open_stream(data, "test", *size, seed=seed, scale=scale, protocol=protocol)
    say(f"{dataset.name}: {len(dataset.documents):,} documents, {len(dataset.questions):,} questions, {source}")

    import torch

    from eval.baselines.factory import open_factory, searched_notes
    from eval.harness.protocol import samples
    from eval.harness.published import departures
    from eval.harness.systems import ask
    from mac_rag.errors import ConfigError, QuantizationError

    factory = open_factory(
        setup, path, scale=scale, data=data, seed=seed, device=device, batch_size=batch_size, lm=lm,
        lora_rank=lora_rank, unrelated=unrelated, protocol=protocol,
    )  # fmt: skip
    rows: list[Row] = []
    verdicts: dict[str, list[Verdict]] = {}
    not_run: dict[str, str] = {}
    for method in names:
        say(method, err=True)
        try:
            system = factory.make(method, learning_rate=learning_rate)
            began = time.perf_counter()
            system.adapt(dataset.documents)
            seconds = time.perf_counter() - began
            row, verdicts[system.name] = ask(system.name, system, dataset.questions, len(dataset.documents), protocol)
        except (ConfigError, QuantizationError) as error:
            not_run[method] = str(error)
            continue
        except torch.OutOfMemoryError as error:  # as in the paper's table, for one GPU
            not_run[method] = f"out of memory: {str(error).splitlines()[0]}"
            torch.cuda.empty_cache()
            continue
        del system  # before another LM with gradients and moments is made
        rows.append(row.model_copy(update={"measures": {**row.measures, "adaptation_seconds": round(seconds, 3)}}))
        say(f"{row.name}: EM {100 * (row.em or 0):.1f} %, F1 {100 * (row.f1 or 0):.1f} %", err=True)
    report(
        path,
        experiment="main_table",
        options=options,
        rows=rows,
        samples=samples(dataset.questions, verdicts),
        dataset=dataset,
        source=source,
        model=factory.model,
        not_run=not_run,
        notes=[*searched_notes(factory), *departures(protocol, factory.model, greedy="ccm" in names)],
        further=True,
    )


if __name__ == "__main__":
    run_command(main)

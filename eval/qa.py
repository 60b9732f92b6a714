"""The paper's protocol on any data set, one's own included: `python -m eval.qa --help`."""

# ruff: noqa: ARG001 - options reach run_benchmark as context.params

from __future__ import annotations

from typing import Annotated

import typer

from eval.harness.benchmark import (
    AnswersOption,
    BenchmarkModel,
    ExportOption,
    KOption,
    QuestionsOption,
    RetrieverOption,
    SplitOption,
    StreamOption,
    WeightOption,
    run_benchmark,
)
from eval.harness.command import BatchOption, DeviceOption, OutputOption, ProtocolOption, SeedOption
from eval.harness.streams import DataOption, named_data
from mac_rag.cli.run import run_command


def main(
    context: typer.Context,
    model: BenchmarkModel = None,
    retriever: RetrieverOption = "none",
    k: KOption = "5",
    memory_weight: WeightOption = None,
    data: DataOption = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="For data of your own: the columns that hold our fields, if they have other names, such as "
            "question=q,answers=a.",
            show_default="the fields' names",
        ),
    ] = None,
    split: SplitOption = "test",
    documents: StreamOption = None,
    questions: QuestionsOption = None,
    protocol: ProtocolOption = "strict",
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    answers: AnswersOption = None,
    export: ExportOption = None,
    output: OutputOption = None,
) -> None:
    """Evaluate on any data set: adapt to a stream of documents, then ask all questions about them.

    Answers come from the LM alone and from MAC's memory alone; with --retriever also from retrieved documents, without
    and with the memory. One file of your own is divided by documents; --split all takes all of it. Without --data the
    stream is generated news.
    """
    if columns is not None and data is None:
        from mac_rag.errors import ConfigError

        raise ConfigError(f"--columns {columns!r} names columns of data of your own; give them with --data")
    about = "The embedded newswire sample, because no --data was given" if data is None else str(named_data(data)[1])
    run_benchmark("qa", data, about, context.params, named_columns(columns))


def named_columns(text: str | None) -> dict[str, str]:
    """Parses the value of --columns: field -> column."""
    from mac_rag.errors import ConfigError

    pairs = [] if text is None else [pair.partition("=") for pair in text.split(",")]
    columns = {field.strip(): column.strip() for field, _, column in pairs}
    if len(columns) < len(pairs) or not all((field and column) for field, column in columns.items()):
        raise ConfigError(f"--columns takes FIELD=COLUMN, separated by commas, each field once; got {text!r}")
    return columns


if __name__ == "__main__":
    run_command(main)

"""Adapting to documents unlike those of training (table 5): `python -m eval.ood --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eval.baselines.options import LMOption, RateOption, UnrelatedOption, chosen_methods
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
from eval.harness.streams import DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from eval.harness.results import Row, Sample
    from mac_rag.data.types import QADataset


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data sets to adapt to, separated by commas: folders named squad, streamingqa or archivalqa, or "
            "NAME:FOLDER.",
            show_default="newswire that is unlike mac-tiny's training: two stories in each document",
        ),
    ] = None,
    scale: ScaleOption = "tiny",
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    trained_on: Annotated[
        str | None,
        typer.Option(help="The training data set, named as for --data.", show_default="the generated newswire"),
    ] = None,
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = "zero-shot,camels,mac",
    learning_rate: RateOption = None,
    unrelated: UnrelatedOption = None,
    protocol: ProtocolOption = "strict",
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    lm: LMOption = None,
    output: OutputOption = None,
) -> None:
    """Adapt to data sets that no system was trained on, and ask about each.

    CaMeLS, like MAC, is trained on another data set; the learning rate of fine-tuning is not searched. At the tiny
    scale the first data set is newswire like that of mac-tiny's training, for comparison.
    """
    from eval.harness.results import result_path
    from mac_rag.errors import ConfigError

    path = result_path(output, "ood")
    method_names = chosen_methods(methods)
    setup = SCALES[scale]["ood"].override(model=model, documents=documents, questions=questions)
    if scale == "paper" and trained_on is None:
        raise ConfigError("--scale paper trains on the paper's data sets; give the one of training with --trained-on")
    names: list[str | None] = [None] if scale == "tiny" else []
    names += [] if data is None else data.split(",")
    streams = [
        open_stream(name, "test", setup.documents, setup.questions, seed=seed, scale=scale, protocol=protocol)[0]
        for name in names or [None]
    ]
    if data is None:
        streams.append(paired(streams[0]))
    twice = sorted({stream.name for stream in streams if [each.name for each in streams].count(stream.name) > 1})
    if twice:
        raise ConfigError(f"--data names {', '.join(twice)} twice; run them one by one")
    from eval.baselines.factory import open_factory
    from eval.harness.protocol import samples
    from eval.harness.systems import ask

    factory = open_factory(
        setup, path, scale=scale, data=trained_on, seed=seed, device=device, batch_size=batch_size, lm=lm,
        unrelated=unrelated, protocol=protocol,
    )  # fmt: skip
    rows: list[Row] = []
    sampled: list[Sample] = []
    for stream in streams:
        verdicts = {}
        for method in method_names:
            system = factory.make(method, learning_rate=learning_rate or factory.setup.retention_rate)
            system.adapt(stream.documents)
            name = f"{stream.name}: {system.name}"
            row, verdicts[name] = ask(name, system, stream.questions, len(stream.documents), protocol)
            rows.append(row.model_copy(update={"settings": {**row.settings, "dataset": stream.name}}))
        sampled += samples(stream.questions, verdicts)
    report(
        path, experiment="ood", options=setup.options(context.params), rows=rows, samples=sampled, model=factory.model
    )


def paired(stream: QADataset) -> QADataset:
    """Joins neighbouring stories two by two, with the same questions: documents twice as long as in training."""
    from mac_rag.data.types import Document, QADataset, Question

    documents = []
    pair_of: dict[str, str] = {}  # id of a story -> id of the document that holds it
    for first in range(0, len(stream.documents), 2):
        pair = stream.documents[first : first + 2]
        documents.append(Document(pair[0].id, " ".join(document.text for document in pair)))
        pair_of |= {document.id: pair[0].id for document in pair}
    questions = [
        Question(f"{question.id}-paired", question.question, question.answers, pair_of[question.gold])
        for question in stream.questions
    ]
    return QADataset(f"{stream.name}, two stories", stream.split, tuple(documents), tuple(questions))


if __name__ == "__main__":
    run_command(main)

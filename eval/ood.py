"""Adapting to documents unlike those of training (table 5): `python -m eval.ood --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eval.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, report
from eval.streams import DocumentsOption, ModelByScale, QuestionsOption, Setup, open_stream
from mac_rag.commands import run_command

if TYPE_CHECKING:
    from eval.results import Row
    from mac_rag.data.types import QADataset

# The paper's table is of GPT2-XL trained on StreamingQA and adapted to SQuAD and ArchivalQA.
SETUPS = {"tiny": Setup("mac-tiny", 512, 512), "paper": Setup("runs/gpt2-xl/train/best", 1665)}


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="The sets to adapt to, with commas: folders named squad, streamingqa or archivalqa, or NAME:FOLDER.",
            show_default="newswire that is unlike mac-tiny's training: two stories in each document",
        ),
    ] = None,
    scale: ScaleOption = "tiny",
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Adapt a model to sets that it was not trained on, and ask about each: the LM alone, and with the memory.

    At the tiny scale newswire like that of mac-tiny's training stands first, to be held against.
    """
    from eval.results import result_path
    from mac_rag.errors import ConfigError

    path = result_path(output, "ood")
    setup = SETUPS[scale].but(model, documents, questions)
    streams = [] if scale == "paper" else [open_stream(None, "test", setup, seed, scale=scale)[0]]
    names = [None] if data is None else data.split(",")
    if data is None and scale == "tiny":
        streams.append(paired(streams[0]))
    else:
        streams += [open_stream(name, "test", setup, seed, scale=scale)[0] for name in names]
    twice = sorted({stream.name for stream in streams if [each.name for each in streams].count(stream.name) > 1})
    if twice:
        raise ConfigError(f"--data names {', '.join(twice)} twice; run them one by one")
    from eval.protocol import run_protocol
    from eval.results import Sample
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel

    loaded = MACModel.from_pretrained(setup.model, device=device)
    rows: list[Row] = []
    samples: list[Sample] = []
    for stream in streams:
        outcome = run_protocol(MACEngine(loaded), stream, batch_size=batch_size, seed=seed, progress=True)
        rows += [
            row.model_copy(
                update={
                    "name": f"{stream.name}: {row.name}",
                    "settings": {"dataset": stream.name, "method": row.name},
                }
            )
            for row in outcome.rows
        ]
        samples += [
            Sample.of(question, {f"{stream.name}: {name}": verdict for name, verdict in sample.rows.items()})
            for question, sample in zip(stream.questions, outcome.samples, strict=True)
        ]
    report(
        path,
        experiment="ood",
        options=setup.options(context.params),
        rows=rows,
        samples=samples,
        model=loaded,
    )


def paired(stream: QADataset) -> QADataset:
    """The same stories and questions, each two neighbours in one document: twice as long as any of training."""
    from mac_rag.data.types import Document, QADataset, Question

    documents, home = [], {}
    for first in range(0, len(stream.documents), 2):
        together = stream.documents[first : first + 2]
        documents.append(Document(together[0].id, " ".join(document.text for document in together)))
        home |= {document.id: together[0].id for document in together}
    questions = [
        Question(f"{question.id}-paired", question.question, question.answers, home[question.document_id])
        for question in stream.questions
    ]
    return QADataset(f"{stream.name}, two stories", stream.split, tuple(documents), tuple(questions))


if __name__ == "__main__":
    run_command(main)

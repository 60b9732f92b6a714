"""Answers where the retrieved document contradicts the memory: `python -m eval.conflict --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, report
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from eval.harness.results import Row, Sample


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    split: Annotated[Literal["train", "val", "test"], typer.Option(help="Split of the data set to stream.")] = "test",
    documents: DocumentsOption = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    output: OutputOption = None,
) -> None:
    """Measure answers after a retrieved document that is wrong, without memory and with a memory that holds the truth.

    There are two kinds of conflict. Outdated, on generated newswire: a later document supersedes the retrieved one, and
    the memory holds both or the later one alone. Counterfactual, on every data set: the answer in the retrieved
    document is replaced by another of its kind, and the memory holds the true document. `wrong_share` is the share of
    answers that repeat the wrong document; `wrong_gain` is the change of this share by the memory, with its 95 %
    interval. For comparison, the right document is retrieved. --questions limits the questions of each kind.

    Two rows are of memory alone: asked as of the moment before the update, where the older answer is right, and asked
    without the time that the question names. For a model with a recency term, the rows with all documents in memory are
    repeated with the term off, and those about updates with shuffled dates, too.
    """
    from eval.harness.results import result_path

    path = result_path(output, "conflict")
    setup = SCALES[scale]["conflict"].override(model=model, documents=documents, questions=questions)
    if data is None and scale == "tiny":
        from mac_rag.data.newswire.generate import generate

        dataset = generate(split, setup.documents, seed=seed, questions_per_document=4)
        source = "generated"
    else:
        dataset, source = open_stream(data, split, setup.documents, seed=seed, scale=scale)

    from eval.harness.conflict import conflicts, measure
    from eval.harness.protocol import adapt, samples
    from mac_rag.data.types import QADataset
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel

    groups = conflicts(dataset, setup.questions, seed)
    loaded = MACModel.from_pretrained(setup.model, device=device)
    engine = MACEngine(loaded)
    adaptation = adapt(engine, dataset.documents)
    rows: list[Row] = []
    sampled: list[Sample] = []
    for group in groups:
        measured = measure(engine, group, dataset, batch_size=batch_size, seed=seed)
        rows += [row for row, _ in measured]
        sampled += samples([case.question for case in group], {row.name: verdicts for row, verdicts in measured})
    conflict_questions = tuple(case.question for group in groups for case in group)
    report(
        path,
        experiment="conflict",
        options=setup.options(context.params),
        rows=rows,
        samples=sampled,
        adaptation=adaptation,
        dataset=QADataset(dataset.name, dataset.split, dataset.documents, conflict_questions),
        source=source,
        model=loaded,
        table=[_shortened(row) for row in rows],
        not_run={} if source == "generated" else {"outdated documents": "only newswire tells which ones update others"},
    )


def _shortened(row: Row) -> Row:
    """The row with the figures that fit on a screen."""
    measures = {name: row.measures[name] for name in ("wrong_share", "wrong_gain") if name in row.measures}
    return row.model_copy(update={"em_prefix": None, "truncated": None, "seconds": None, "measures": measures})


if __name__ == "__main__":
    run_command(main)

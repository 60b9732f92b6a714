"""Controls of a memory: could other sources take its place? `python -m eval.controls --help`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from eval.harness.benchmark import AnswersOption, BenchmarkModel, QuestionsOption, SplitOption, model_for
from eval.harness.command import BatchOption, DeviceOption, OutputOption, SeedOption, report
from eval.harness.streams import DataOption, open_stream
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say


def main(
    context: typer.Context,
    model: BenchmarkModel = None,
    data: DataOption = None,
    split: SplitOption = "test",
    documents: Annotated[
        int | None, typer.Option(min=1, help="Documents of the stream, from its beginning.", show_default="all")
    ] = None,
    questions: QuestionsOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    answers: AnswersOption = None,
    output: OutputOption = None,
) -> None:
    """Answer the same questions from the memory, and from what could take its place.

    From the memory with its document prior off; from the memory tokens of the rows that the prior ranks first, without
    any aggregation; from those of the right document; from the texts of these documents; and from BM25's first text,
    alone, with memory, and with the first document's text by the max rule. A row of memory is a document, or a chunk of
    a long one. Gains are over the memory, with 95 % intervals of the paired bootstrap.

    A memory of the LM's own keys and values is compared with the same rows without their scores, with the row of the
    first document and of the right one, and with the texts of these documents, of all that it reads, and BM25's first.

    An answer without an exact match is an error. The memory's errors are divided: either another document than the
    right one had most of the attention, or the right one was read wrong.
    """
    from eval.harness.results import result_path

    path = result_path(output, "controls")
    dataset, source = open_stream(data, split, documents, questions, seed=seed, scale="tiny")
    say(f"{len(dataset.documents):,} documents, {len(dataset.questions):,} questions, split {dataset.split}")

    from eval.harness.controls import ask_controls, controls_of
    from eval.harness.kept_answers import answer_source
    from eval.harness.protocol import adapt, samples
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel

    name = model_for(model, data)
    loaded = MACModel.from_pretrained(name, device=device)
    engine = MACEngine(loaded)
    adaptation = adapt(engine, dataset.documents)
    controls = controls_of(engine, dataset, batch_size=batch_size)
    rows, verdicts = ask_controls(controls, answers, answer_source(loaded, dataset.documents), seed=seed)
    report(
        path,
        experiment="controls",
        options={**context.params, "model": name},
        rows=rows,
        samples=samples(dataset.questions, verdicts),
        adaptation=adaptation,
        dataset=dataset,
        source=source,
        model=loaded,
        not_run=controls.not_run,
        notes=dataset.notes,
        # Shares of errors belong to one row, and would take a third of the table's width.
        table=[row.model_copy(update={"em_prefix": None, "truncated": None, "measures": {}}) for row in rows],
    )
    if rows[0].measures:
        say(errors_in_words(rows[0].measures))


def errors_in_words(measures: Mapping[str, float]) -> str:
    """The memory's errors of each kind, as `eval.harness.controls` measures them, in a sentence."""
    right, wrong_document, read_wrong = (
        f"{100 * measures[name]:.1f} % ({100 * measures[f'{name}_low']:.1f} to {100 * measures[f'{name}_high']:.1f})"
        for name in ("attended_right", "wrong_document", "read_wrong")
    )
    return (
        f"The memory attends most to the right document in {right} of the questions. It attends to another one and "
        f"answers wrong in {wrong_document}, and attends to the right one and answers wrong in {read_wrong}."
    )


if __name__ == "__main__":
    run_command(main)

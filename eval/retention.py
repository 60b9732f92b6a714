"""Retention of the first documents while the stream goes on (figure 3): `python -m eval.retention --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eval.baselines.options import ADAPTING, FINE_TUNING, LMOption, RateOption, chosen_methods
from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, report
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.results import Row, Verdict


def main(
    context: typer.Context,
    model: ModelByScale = None,
    data: DataOption = None,
    scale: ScaleOption = "tiny",
    methods: Annotated[
        str, typer.Option(help=f"Methods to compare, separated by commas: {', '.join(ADAPTING)}.")
    ] = ",".join((*FINE_TUNING, "mac")),
    first: Annotated[int, typer.Option(min=1, help="Documents that the questions are about.")] = 200,
    further: Annotated[int, typer.Option(min=1, help="Documents that follow the first ones.")] = 1400,
    step: Annotated[int, typer.Option(min=1, help="Ask again after this many further documents.")] = 200,
    questions: QuestionsOption = None,
    learning_rate: RateOption = None,
    seed: SeedOption = 0,
    batch_size: BatchOption = 32,
    device: DeviceOption = None,
    lm: LMOption = None,
    output: OutputOption = None,
) -> None:
    """Ask about the first documents of a stream again and again while further documents follow.

    Retention is the F1 in percent of the F1 right after the first documents. A system that learned nothing from them
    retains everything, so each row also has the F1 of the LM before any document.
    """
    from eval.harness.results import result_path

    path = result_path(output, "retention")
    from mac_rag.errors import ConfigError, DataError

    names = chosen_methods(methods, ADAPTING)
    setup = SCALES[scale]["retention"].override(model=model, documents=first + further)
    options = setup.options(context.params) | {"questions": questions}
    dataset, source = open_stream(data, "test", setup.documents, setup.questions, seed=seed, scale=scale)
    if len(dataset.documents) < first + further:
        raise DataError(
            f"{dataset.name} has only {len(dataset.documents):,} documents, but --first and --further ask for "
            f"{first + further:,}; give smaller ones"
        )
    from eval.baselines.factory import open_factory
    from eval.harness.protocol import samples, some_questions
    from eval.harness.systems import ask
    from mac_rag.data.types import QADataset, first_documents

    about_first = some_questions(first_documents(dataset, first), questions, seed)
    if not about_first.questions:
        raise DataError(f"there are no questions about the first {first:,} documents; give a larger --first")
    factory = open_factory(setup, path, scale=scale, data=data, seed=seed, device=device, batch_size=batch_size, lm=lm)
    rate = factory.setup.retention_rate if learning_rate is None else learning_rate
    rows: list[Row] = []
    verdicts: dict[str, list[Verdict]] = {}
    not_run: dict[str, str] = {}
    before, _ = ask("before", factory.make("zero-shot"), about_first.questions, 0)
    for method in names:
        say(method, err=True)
        try:
            system = factory.make(method, learning_rate=rate)
        except ConfigError as error:
            not_run[method] = str(error)
            continue
        adapted = 0
        f1_at_first = 0.0
        for added in [*range(0, further, step), further]:
            system.adapt(dataset.documents[adapted : first + added])
            adapted = first + added
            name = f"{system.name}, +{added:,}"
            row, verdicts[name] = ask(name, system, about_first.questions, adapted)
            f1 = row.f1 or 0.0
            if added == 0:
                f1_at_first = f1
            measures = {"retention": 100 * f1 / f1_at_first} if f1_at_first else {}
            measures["f1_before_adaptation"] = before.f1 or 0.0
            settings = {**row.settings, "added": added}
            rows.append(row.model_copy(update={"settings": settings, "measures": measures}))
        if not f1_at_first:
            not_run[f"retention of {method}"] = "its F1 was 0 from the beginning, and has no share"
    report(
        path,
        experiment="retention",
        options=options,
        rows=rows,
        samples=samples(about_first.questions, verdicts),
        dataset=QADataset(dataset.name, dataset.split, dataset.documents, about_first.questions),
        source=source,
        model=factory.model,
        not_run=not_run,
    )


if __name__ == "__main__":
    run_command(main)

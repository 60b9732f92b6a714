"""Answers where the retrieved document contradicts the memory: `python -m eval.conflict --help`."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eval.harness.command import BatchOption, DeviceOption, OutputOption, ScaleOption, SeedOption, report
from eval.harness.scales import SCALES
from eval.harness.streams import DataOption, DocumentsOption, ModelByScale, QuestionsOption, open_stream
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.conflict_documents import Conflict
    from eval.harness.results import Row, Sample, Verdict
    from mac_rag.data.types import Answer, Document, QADataset
    from mac_rag.engine import MACEngine


_NAMES = {"outdated": ("outdated document", "newest document"), "counterfactual": ("false document", "true document")}


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
    """Measure answers behind a retrieved document that is wrong, without memory and with a memory that knows better.

    There are two kinds of conflict. Outdated, on the generated newswire: a later document supersedes the retrieved one,
    and the memory holds both or the later one alone. Counterfactual, on every data set: the answer in the retrieved
    document is replaced by another of its kind, and the memory holds the true document. `wrong_share` is the share of
    answers that repeat the wrong document; `wrong_gain` is the change of this share by the memory, with its 95 %
    interval. The right document is retrieved for comparison. --questions limits the questions of each kind.

    Two rows are of memory alone: asked as of the moment before the update, where the older answer is the right one, and
    asked without the time that the question names. For a model with a recency term, the rows with all documents in
    memory are repeated with the term off, and those about updates with the dates of the documents shuffled, too.
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
    groups = conflicts(dataset, setup.questions, seed)

    from eval.harness.protocol import adapt, samples
    from mac_rag.data.types import QADataset
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel

    loaded = MACModel.from_pretrained(setup.model, device=device)
    engine = MACEngine(loaded)
    adaptation = adapt(engine, dataset.documents, progress=True)
    rows: list[Row] = []
    sampled: list[Sample] = []
    for group in groups:
        measured = measure(engine, group, dataset, batch_size=batch_size, seed=seed, progress=True)
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


def conflicts(dataset: QADataset, questions: int | None, seed: int) -> list[list[Conflict]]:
    """Conflicts of each kind that the data set has.

    Args:
        dataset: newswire for both kinds; any other data set has counterfactual conflicts alone.
        questions: at most this many of each kind, drawn by the seed; None for all.
        seed: random seed of the draw and of the wrong answers.

    Returns:
        One list for each kind, none of them empty.

    Raises:
        DataError: if the data set has no conflict at all.
    """
    from eval.harness.conflict_documents import counterfactual, outdated
    from mac_rag.errors import DataError

    groups = [outdated(dataset) if dataset.name == "newswire" else [], counterfactual(dataset, seed)]
    if not any(groups):
        raise DataError(
            f"no answer in the {len(dataset.documents)} documents of {dataset.name} can be replaced by another of its "
            "kind; give more --documents"
        )
    rng = random.Random(seed)
    return [
        [group[index] for index in sorted(rng.sample(range(len(group)), min(questions or len(group), len(group))))]
        for group in groups
        if group
    ]


def newest_only(dataset: QADataset) -> set[str]:
    """The ids of the documents that no later document updates."""
    from eval.harness.conflict_documents import superseded

    return {document.id for document in dataset.documents} - superseded(dataset)


@dataclass(frozen=True)
class _Condition:
    """One experimental condition.

    Attributes:
        name: name of its row.
        document: the document in front of the question.
        memory: the documents in the memory; `before` are those from before the update, with the answer of then.
        timeless: True to ask without the time that the question names.
        dates: the documents' own; shuffled; or `unused`, with the recency term off.
    """

    name: str
    document: Literal["none", "wrong", "right"]
    memory: Literal["none", "all", "newest", "before"]
    timeless: bool = False
    dates: Literal["own", "shuffled", "unused"] = "own"


def _conditions(kind: str, recency: bool) -> Iterator[_Condition]:
    """All conditions; of each document, the one without memory comes first.

    Args:
        kind: kind of the conflicts.
        recency: True with the controls of a recency term.
    """
    wrong, right = _NAMES[kind]
    about = ", updated facts" if kind == "outdated" else ""
    yield _Condition(f"LM alone{about}", "none", "none")
    yield _Condition(f"MAC{about}", "none", "all")
    yield _Condition(wrong, "wrong", "none")
    yield _Condition(f"{wrong} + MAC", "wrong", "all")
    if kind == "outdated":
        yield _Condition(f"{wrong} + MAC of the newest", "wrong", "newest")
    yield _Condition(right, "right", "none")
    yield _Condition(f"{right} + MAC", "right", "all")
    if kind == "outdated":
        yield _Condition("MAC as of before the update", "none", "before")
        yield _Condition("MAC, no time named", "none", "all", timeless=True)
    if not recency:
        return
    controls: list[tuple[Literal["unused", "shuffled"], str]] = [("unused", "recency off")]
    if kind == "outdated":
        controls.append(("shuffled", "dates shuffled"))
    for dates, control in controls:
        yield _Condition(f"MAC{about}, {control}", "none", "all", dates=dates)
        yield _Condition(f"{wrong} + MAC, {control}", "wrong", "all", dates=dates)
        yield _Condition(f"{right} + MAC, {control}", "right", "all", dates=dates)


def measure(
    engine: MACEngine,
    cases: Sequence[Conflict],
    dataset: QADataset,
    *,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = False,
) -> list[tuple[Row, list[Verdict]]]:
    """Answers the questions of conflicts of one kind under every condition.

    Args:
        engine: an engine that has adapted to the whole stream.
        cases: at least one conflict, all of one kind.
        dataset: the stream.
        batch_size: questions of one generation.
        seed: random seed of the bootstrap.
        progress: shows progress bars.

    Returns:
        A row for each condition, with the verdicts on its answers. The gain of a condition with memory is over the same
        prompts without memory.
    """
    from eval.harness.bootstrap import paired_interval
    from eval.harness.protocol import judge, summarize
    from eval.harness.results import Gain
    from mac_rag.data.metrics import exact_match

    newest, shuffled = newest_only(dataset), with_shuffled_dates(dataset.documents, seed)
    kind = cases[0].kind
    recency = engine.model.aggregation.recency is not None
    measured: list[tuple[Row, list[Verdict]]] = []
    without: dict[str, dict[str, list[float]]] = {}  # figures of each question, by the document in front of it
    for condition in _conditions(kind, recency):
        if progress:
            say(condition.name, err=True)
        asked = [_asked(case, condition) for case in cases]
        questions = [case.question for case in asked]
        if condition.dates == "shuffled":
            engine.adapt(shuffled)
        began = time.perf_counter()
        with engine.model.without_recency() if condition.dates == "unused" else nullcontext():
            answers = _answers(engine, asked, condition, newest, batch_size, progress)
        seconds = time.perf_counter() - began
        if condition.dates == "shuffled":
            engine.adapt(dataset.documents)
        verdicts = judge(questions, answers)
        figures = {
            "em": [verdict.em for verdict in verdicts],
            "f1": [verdict.f1 for verdict in verdicts],
            "wrong": [exact_match(answer.text, case.wrong_answer) for answer, case in zip(answers, asked)],
        }
        measures = {"wrong_share": sum(figures["wrong"]) / len(cases)}
        gain = None
        if condition.memory == "none":
            without[condition.document] = figures
        elif condition.memory != "before":
            before = without[condition.document]
            em, f1, wrong = (paired_interval(figures[name], before[name], seed=seed) for name in ("em", "f1", "wrong"))
            gain = Gain(em=em, f1=f1)
            measures |= {"wrong_gain": wrong.mean, "wrong_gain_low": wrong.low, "wrong_gain_high": wrong.high}
        documents = len(newest) if condition.memory == "newest" else len(engine.bank)
        row = summarize(condition.name, questions, verdicts, documents, None, seconds)
        settings: dict[str, str | int | float] = {
            "conflict": kind,
            "document": condition.document,
            "memory": condition.memory,
            "time_named": int(not condition.timeless),
            "dates": condition.dates,
        }
        measured.append((row.model_copy(update={"gain": gain, "measures": measures, "settings": settings}), verdicts))
    return measured


def _answers(
    engine: MACEngine,
    cases: Sequence[Conflict],
    condition: _Condition,
    newest: Collection[str],
    batch_size: int,
    progress: bool,
) -> list[Answer]:
    """The answers under a condition. Questions as of different moments are asked moment by moment."""
    moments = [_moment_before(case) if condition.memory == "before" else None for case in cases]
    answers: dict[int, Answer] = {}
    for moment in dict.fromkeys(moments):
        some = [number for number, other in enumerate(moments) if other == moment]
        found = engine.answer(
            [cases[number].question.question for number in some],
            contexts=[_contexts(cases[number], condition) for number in some],
            use_memory=condition.memory != "none",
            allowed=newest if condition.memory == "newest" else None,
            as_of=moment,
            overflow="truncate",
            batch_size=batch_size,
            progress=progress and len(some) == len(cases),
        )
        answers |= zip(some, found, strict=True)
    return [answers[number] for number in range(len(cases))]


def _moment_before(case: Conflict) -> datetime:
    assert case.changed is not None
    return case.changed - timedelta(microseconds=1)


def _asked(case: Conflict, condition: _Condition) -> Conflict:
    """The case as a condition asks it."""
    if condition.memory == "before":
        return case.before
    return case.timeless if condition.timeless else case


def with_shuffled_dates(documents: Sequence[Document], seed: int) -> list[Document]:
    """The same documents, among which their dates are shuffled; those without a date stay without."""
    dated = [number for number, document in enumerate(documents) if document.date is not None]
    dates = [documents[number].metadata["date"] for number in dated]
    random.Random(seed).shuffle(dates)
    shuffled = list(documents)
    for number, date in zip(dated, dates, strict=True):
        shuffled[number] = replace(documents[number], metadata={**documents[number].metadata, "date": date})
    return shuffled


def _shortened(row: Row) -> Row:
    """The row with the figures that fit on a screen."""
    measures = {name: row.measures[name] for name in ("wrong_share", "wrong_gain") if name in row.measures}
    return row.model_copy(update={"em_prefix": None, "truncated": None, "seconds": None, "measures": measures})


def _contexts(case: Conflict, condition: _Condition) -> list[str]:
    return {"none": [], "wrong": [case.wrong], "right": [case.right]}[condition.document]


if __name__ == "__main__":
    run_command(main)

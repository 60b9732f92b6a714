"""What `eval.hierarchical` and `eval.reduction` share: ways of aggregation, measured and written as one result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.harness.command import report

if TYPE_CHECKING:
    from eval.harness.aggregation_methods import Figures, Way
    from eval.harness.results import Row
    from mac_rag.data.types import QADataset
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.model import MACModel

Ways = Callable[["MACModel", "MemoryBank", "QADataset"], Iterable["Way"]]


def measure_ways(
    experiment: str,
    ways: Ways,
    path: Path,
    model: MACModel,
    dataset: QADataset,
    batch_size: int,
    *,
    options: dict[str, Any],
    source: str,
) -> None:
    """Adapts to a stream, asks its questions in every way, and writes what each answered and the memory it took.

    Memory is the peak of all tensors that aggregating one batch of questions allocates, beyond the bank as it is
    stored (`eval.harness.allocations`); encoding the questions and the LM are left out, as in the paper.

    Args:
        experiment: name of the module.
        ways: makes them from the model, its bank and the stream; others are held against the first, the whole bank.
        path: of the result.
        model, dataset: what to measure on.
        batch_size: questions that are aggregated at once.
        options, source: see `eval.harness.command.report`.
    """
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces each start and stop on standard error
    from eval.harness.aggregation_methods import measure
    from eval.harness.protocol import adapt, samples
    from mac_rag.engine import MACEngine

    engine = MACEngine(model)
    adaptation = adapt(engine, dataset.documents, progress=True)
    rows: list[Row] = []
    verdicts = {}
    whole: Figures | None = None
    for way in ways(model, engine.bank, dataset):
        figures, verdicts[way.name] = measure(model, way, dataset.questions, batch_size)
        whole = whole or figures
        rows.append(row(figures, whole, len(dataset.documents), len(dataset.questions)))
    report(
        path,
        experiment=experiment,
        options=options,
        rows=rows,
        samples=samples(dataset.questions, verdicts),
        adaptation=adaptation,
        dataset=dataset,
        source=source,
        model=model,
    )


def row(figures: Figures, whole: Figures, documents: int, questions: int) -> Row:
    """The figures of one way as a row; `M` is the size of hierarchical aggregation's subgroups.

    `memory_kept` and `f1_kept` are percentages of the whole bank's.
    """
    from eval.harness.results import Row

    settings: dict[str, str | int | float] = {"method": figures.method, "entries": figures.entries}
    if figures.group == "hierarchical" and figures.parameter is not None:
        settings |= {"method": "hierarchical", "M": figures.parameter}
    kept = {} if whole.f1 == 0 else {"f1_kept": 100 * figures.f1 / whole.f1}
    return Row(
        name=figures.name,
        settings=settings,
        measures={
            "peak_mb": figures.peak_bytes / 1e6,
            "memory_kept": 100 * figures.peak_bytes / whole.peak_bytes,
            **kept,
            "bank_mb": figures.bank_bytes / 1e6,
            "aggregation_seconds": figures.aggregation_seconds,
        },
        documents=documents,
        questions=questions,
        em=figures.em,
        f1=figures.f1,
        em_prefix=figures.em_prefix,
    )

"""Measures aggregation methods and writes one result; shared by `eval.hierarchical` and `eval.reduction`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.harness.command import report

if TYPE_CHECKING:
    from eval.harness.aggregation_methods import AggregationMethod, Measurement
    from eval.harness.results import Row
    from mac_rag.data.types import QADataset
    from mac_rag.memory.bank import MemoryBank
    from mac_rag.model import MACModel

MethodFactory = Callable[["MACModel", "MemoryBank", "QADataset"], Iterable["AggregationMethod"]]


def measure_methods(
    experiment: str,
    make_methods: MethodFactory,
    path: Path,
    model: MACModel,
    dataset: QADataset,
    batch_size: int,
    *,
    options: dict[str, Any],
    source: str,
) -> None:
    """Adapts to a stream, answers its questions with every method, and writes answers and memory.

    Memory is the peak of all tensors that aggregating one batch of questions allocates, beyond the stored bank
    (`eval.harness.allocations`). It excludes the encoding of the questions and the LM, as in the paper.

    Args:
        experiment: name of the module, `eval.<experiment>`.
        make_methods: makes the methods from the model, its bank and the stream. The first one attends to the whole
            bank; the others are compared with it.
        path: the result file.
        model: the model to measure.
        dataset: the stream to adapt to, with its questions.
        batch_size: questions that are aggregated at once.
        options, source: see `eval.harness.command.report`.
    """
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces each start and stop on standard error
    from eval.harness.aggregation_methods import measure
    from eval.harness.protocol import adapt, samples
    from mac_rag.engine import MACEngine
    from mac_rag.memory import MemoryBank

    bank = MemoryBank(model.fingerprint)
    engine = MACEngine(model, bank)
    adaptation = adapt(engine, dataset.documents, progress=True)
    rows: list[Row] = []
    verdicts = {}
    whole: Measurement | None = None
    for method in make_methods(model, bank, dataset):
        measurement, verdicts[method.name] = measure(model, method, dataset.questions, batch_size)
        if whole is None:
            whole = measurement
        rows.append(row(measurement, whole, len(dataset.documents), len(dataset.questions)))
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


def row(measurement: Measurement, whole: Measurement, documents: int, questions: int) -> Row:
    """One measurement as a row of the result.

    The setting `M` is the subgroup size of hierarchical aggregation. `memory_kept` and `f1_kept` are percentages of
    the whole bank's peak memory and F1.
    """
    from eval.harness.results import Row

    settings: dict[str, str | int | float] = {"method": measurement.method, "entries": measurement.entries}
    if measurement.group == "hierarchical" and measurement.parameter is not None:
        settings |= {"method": "hierarchical", "M": measurement.parameter}
    f1_kept = {} if whole.f1 == 0 else {"f1_kept": 100 * measurement.f1 / whole.f1}
    return Row(
        name=measurement.name,
        settings=settings,
        measures={
            "peak_mb": measurement.peak_bytes / 1e6,
            "memory_kept": 100 * measurement.peak_bytes / whole.peak_bytes,
            **f1_kept,
            "bank_mb": measurement.bank_bytes / 1e6,
            "aggregation_seconds": measurement.aggregation_seconds,
        },
        documents=documents,
        questions=questions,
        em=measurement.em,
        f1=measurement.f1,
        em_prefix=measurement.em_prefix,
    )

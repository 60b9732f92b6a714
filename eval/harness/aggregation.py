"""Ways to aggregate a bank, compared by memory and accuracy: full attention, subgroups and bounded banks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from eval.harness.allocations import allocated_peak
from eval.harness.protocol import judge, summarize
from eval.harness.results import Row, Verdict
from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.projection import ProjectedBank
from mac_rag.bank.reduction import BoundedBank, ReductionMethod
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.engine import Answer
from mac_rag.model import AmortizedModel
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.progress import progress_bar

Aggregate = Callable[[MemoryTokens], Tensor]  # B encoded questions -> phi* [B, T, D]
SHARES = (0.75, 0.5, 0.25)


@dataclass(frozen=True)
class AggregationMethod:
    """A method that aggregates a bank into phi* for each question.

    Attributes:
        name, settings: those of its row: the method, the entries of its bank, and M, the size of subgroups.
        bank_bytes: size of the stored memory tokens.
        aggregate: maps encoded questions `[B, T, D]` to phi* `[B, T, D]`.
    """

    name: str
    settings: dict[str, str | int | float]
    bank_bytes: int
    aggregate: Aggregate


def measure(
    model: AmortizedModel, methods: Iterable[AggregationMethod], dataset: QADataset, batch_size: int
) -> tuple[list[Row], dict[str, list[Verdict]]]:
    """Answers all questions of a stream with each method; the first one attends to the whole bank.

    Returns:
        A row for each method, and the verdicts on its answers. `memory_kept` and `f1_kept` are percentages of the first
            method's peak memory and F1. The peak is that of the first batch; `aggregation_seconds` is the time of
            aggregation for all questions.
    """
    rows: list[Row] = []
    verdicts: dict[str, list[Verdict]] = {}
    whole_peak, whole_f1 = 0, 0.0
    for method in methods:
        answers, peak, seconds = _answers(model, method, dataset.questions, batch_size)
        verdicts[method.name] = judge(dataset.questions, answers)
        row = summarize(
            method.name, dataset.questions, verdicts[method.name], len(dataset.documents), None, seconds=0.0
        )
        f1 = row.f1 or 0.0
        if not rows:
            whole_peak, whole_f1 = peak, f1
        measures = {
            "peak_mb": peak / 1e6,
            "memory_kept": 100 * peak / whole_peak,
            **({"f1_kept": 100 * f1 / whole_f1} if whole_f1 else {}),
            "bank_mb": method.bank_bytes / 1e6,
            "aggregation_seconds": seconds,
        }
        of_method = {"settings": method.settings, "measures": measures, "seconds": None, "truncated": None}
        rows.append(row.model_copy(update=of_method))
    return rows, verdicts


@torch.no_grad()
def _answers(
    model: AmortizedModel, method: AggregationMethod, questions: Sequence[Question], batch_size: int
) -> tuple[list[Answer], int, float]:
    """The answers, the peak bytes of aggregating the first batch, and the seconds of all aggregation."""
    answers: list[Answer] = []
    peak, seconds = 0, 0.0
    with progress_bar(method.name, len(questions)) as bar:
        for first in range(0, len(questions), batch_size):
            texts = [question.question for question in questions[first : first + batch_size]]
            encoded = model.input_encoder([model.input_encoder.ids(text) for text in texts])
            if not answers:
                peak = allocated_peak(lambda: method.aggregate(encoded), model.device)[1]  # noqa: B023
            began = time.perf_counter()
            phi = method.aggregate(encoded)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            seconds += time.perf_counter() - began
            answers += [Answer(text, (), (), False) for text in model.generate(texts, modulation=phi)]
            bar.advance(len(texts))
    return answers, peak, seconds


def hierarchical_methods(
    model: AmortizedModel, bank: MemoryBank, subgroups: Sequence[int]
) -> Iterator[AggregationMethod]:
    """Figure 5 of the paper: attention to the whole bank in one softmax, streamed, and in subgroups of size M."""
    network, view = model.aggregation, _projected(model, bank)
    entries = view.documents

    def full(question: MemoryTokens) -> Tensor:
        phi: Tensor = network(question, model.project(bank.phi), attention=direct_attention)[0]
        return phi

    def grouped(size: int) -> Aggregate:
        return lambda question: hierarchical(network, question, view, size)

    for name, aggregate in (("full", full), ("streaming", _streaming(model, view))):
        yield AggregationMethod(name, {"method": name, "entries": entries}, bank.nbytes, aggregate)
    for size in subgroups:
        settings: dict[str, str | int | float] = {"method": "hierarchical", "entries": entries, "M": size}
        yield AggregationMethod(f"hierarchical, M = {size}", settings, bank.nbytes, grouped(size))


def reduction_methods(
    model: AmortizedModel, bank: MemoryBank, documents: Sequence[Document], seed: int
) -> Iterator[AggregationMethod]:
    """Figure 7 of the paper: the whole bank, and banks of 75, 50 and 25 % of the documents, filled in stream order."""
    phi = torch.cat([bank[document.id].phi for document in documents])
    rows = [len(bank[document.id].phi) for document in documents]
    settings: dict[str, str | int | float] = {"method": "whole bank", "entries": len(phi)}
    yield AggregationMethod("whole bank", settings, bank.nbytes, _streaming(model, _projected(model, bank)))
    for method in get_args(ReductionMethod):
        name = method.replace("-", " ")
        for share in SHARES:
            maximum = max(1, round(share * len(documents)))
            smaller = MemoryBank(model.fingerprint)
            smaller.keep_rows_as(bank.layout, bank.quantizer)
            bounded = BoundedBank(smaller, maximum, method, seed=seed)
            bounded.put(documents, phi, rows)
            yield AggregationMethod(
                f"{name}, {round(100 * share)} %",
                {"method": name, "entries": maximum},
                bounded.bank.nbytes,
                _streaming(model, _projected(model, bounded.bank)),
            )


def _streaming(model: AmortizedModel, view: BankView) -> Aggregate:
    """Exact attention over all rows of a view, streamed in chunks."""

    def aggregate(question: MemoryTokens) -> Tensor:
        phi: Tensor = model.aggregation(question, view)[0]
        return phi

    return aggregate


def _projected(model: AmortizedModel, bank: MemoryBank) -> ProjectedBank:
    """A view that caches no keys and values, so that the peak of aggregation includes projecting them."""
    return ProjectedBank(model.aggregation, bank, device=model.device, budget_bytes=0, chunk_rows=64)

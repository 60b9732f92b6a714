"""Aggregation methods compared by memory and accuracy: full attention, subgroups and bounded banks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from eval.harness.allocations import allocated_peak
from eval.harness.protocol import judge
from eval.harness.results import Verdict
from mac_rag.data.types import Document, Question
from mac_rag.engine import Answer
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.reduction import BoundedBank, ReductionMethod
from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.model import MACModel
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.progress import progress_bar

Group = Literal["hierarchical", "reduction"]
Aggregate = Callable[[MemoryTokens], Tensor]  # B encoded questions -> phi* [B, T, D]
SHARES = (0.75, 0.5, 0.25)


@dataclass(frozen=True)
class AggregationMethod:
    """A method that aggregates a bank into phi* for each question.

    Attributes:
        group: the experiment that the method belongs to.
        name: name of its row in the table, unique.
        family: name shared by the methods that differ only in `parameter`.
        parameter: subgroup size M, or entries of the bank; None if the method has none.
        entries: number of entries of the bank.
        bank_bytes: size of the stored memory tokens.
        aggregate: maps encoded questions `[B, T, D]` to phi* `[B, T, D]`.
    """

    group: Group
    name: str
    family: str
    parameter: int | None
    entries: int
    bank_bytes: int
    aggregate: Aggregate


@dataclass(frozen=True)
class Measurement:
    """Accuracy, memory and time of one aggregation method.

    Attributes:
        group, name, parameter, entries, bank_bytes: as in `AggregationMethod`.
        method: its family.
        em, f1, em_prefix: means over the questions, 0 to 1.
        peak_bytes: peak memory of aggregating one batch of questions, beyond the stored bank.
        aggregation_seconds: time of aggregation for all questions together.
    """

    group: str
    name: str
    method: str
    parameter: int | None
    entries: int
    bank_bytes: int
    em: float
    f1: float
    em_prefix: float
    peak_bytes: int
    aggregation_seconds: float


@torch.no_grad()
def measure(
    model: MACModel, method: AggregationMethod, questions: Sequence[Question], batch_size: int
) -> tuple[Measurement, list[Verdict]]:
    """Answers all questions with one aggregation method.

    Args:
        model: the model that encodes the questions and answers them.
        method: maps the encoded questions to phi*.
        questions: at least one.
        batch_size: questions of one batch; the peak memory is that of the first batch.

    Returns:
        The measurement, and the verdict on each answer.
    """
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
    verdicts = judge(questions, answers)
    em, f1, em_prefix = (
        sum(getattr(verdict, metric) for verdict in verdicts) / len(verdicts) for metric in ("em", "f1", "em_prefix")
    )
    measurement = Measurement(
        method.group,
        method.name,
        method.family,
        method.parameter,
        method.entries,
        method.bank_bytes,
        em,
        f1,
        em_prefix,
        peak,
        seconds,
    )
    return measurement, verdicts


def hierarchical_methods(model: MACModel, bank: MemoryBank, subgroups: Sequence[int]) -> Iterator[AggregationMethod]:
    """Figure 5 of the paper: attention to the whole bank in one softmax, streamed, and in subgroups of size M."""
    network, view = model.aggregation, projected(model, bank)

    def method(name: str, parameter: int | None, aggregate: Aggregate) -> AggregationMethod:
        return AggregationMethod("hierarchical", name, name, parameter, len(view.row_keys), bank.nbytes, aggregate)

    def full(question: MemoryTokens) -> Tensor:
        phi: Tensor = network(question, model.project(bank.phi), attention=direct_attention)[0]
        return phi

    def grouped(subgroup: int) -> Aggregate:
        return lambda question: hierarchical(network, question, view, subgroup)

    yield method("full", None, full)
    yield method("streaming", None, attending(model, view))
    for size in subgroups:
        yield method(f"hierarchical, M = {size}", size, grouped(size))


def reduction_methods(
    model: MACModel, bank: MemoryBank, documents: Sequence[Document], seed: int
) -> Iterator[AggregationMethod]:
    """Figure 7 of the paper: banks of 75, 50 and 25 % of the stream's documents, filled from its beginning."""
    phi = torch.cat([bank[document.id].phi for document in documents])
    rows = [len(bank[document.id].phi) for document in documents]
    for method in get_args(ReductionMethod):
        for share in SHARES:
            maximum = max(1, round(share * len(documents)))
            smaller = MemoryBank(model.fingerprint)
            smaller.keep_rows_as(bank.layout, bank.quantizer)
            bounded = BoundedBank(smaller, maximum, method, seed=seed)
            bounded.put(documents, phi, rows)
            yield AggregationMethod(
                "reduction",
                f"{method.replace('-', ' ')}, {round(100 * share)} %",
                method.replace("-", " "),
                maximum,
                maximum,
                bounded.bank.nbytes,
                attending(model, projected(model, bounded.bank)),
            )


def attending(model: MACModel, view: BankView) -> Aggregate:
    """Exact attention over all rows of a view, streamed in chunks."""

    def aggregate(question: MemoryTokens) -> Tensor:
        phi: Tensor = model.aggregation(question, view)[0]
        return phi

    return aggregate


def projected(model: MACModel, bank: MemoryBank) -> ProjectedBank:
    """A view that caches no keys and values, so that the peak of aggregation includes projecting them."""
    return ProjectedBank(model.aggregation, bank, device=model.device, budget_bytes=0, chunk_rows=64)

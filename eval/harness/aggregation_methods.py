"""The ways of aggregation that `benchmarks.memory_vs_accuracy` compares: what each answers, and the memory it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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
from mac_rag.memory.quantizer import fit
from mac_rag.memory.reduction import BoundedBank, ReductionMethod
from mac_rag.memory.views.codebook import CodebookView, quantize
from mac_rag.memory.views.prior_index import PriorIndex
from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.model import MACModel
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.progress import progress_bar

Group = Literal["hierarchical", "reduction", "codebook"]
Aggregate = Callable[[MemoryTokens], Tensor]  # B encoded questions -> phi* [B, T, D]
SHARES = (0.75, 0.5, 0.25)
WITHOUT_PRIOR = "no prior"


@dataclass(frozen=True)
class Way:
    """One way to get from questions and a bank to phi*.

    Attributes:
        group: the figure that it belongs to.
        name: what the table calls it.
        method: what it has in common with others of its group.
        parameter: what it differs in: M, entries of the bank, or codes; None where there is no such number.
        entries: of the bank.
        bank_bytes: of what is stored: memory tokens, or codes and their codebook.
        with_prior: whether the model's document prior takes part.
        aggregate: the way itself.
    """

    group: Group
    name: str
    method: str
    parameter: int | None
    entries: int
    bank_bytes: int
    with_prior: bool
    aggregate: Aggregate


@dataclass(frozen=True)
class Figures:
    """What a way gives: see `Way`, and

    Attributes:
        em, f1, em_prefix: means over the questions, 0 to 1.
        peak_bytes: most that one batch of questions holds during aggregation, beyond the bank as it is stored.
        aggregation_seconds: for all questions.
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
def measure(model: MACModel, way: Way, questions: Sequence[Question], batch_size: int) -> tuple[Figures, list[Verdict]]:
    """Asks all questions in one way; memory is that of the first, full batch."""
    answers: list[Answer] = []
    peak, seconds = 0, 0.0
    with (
        progress_bar(way.name, len(questions)) as bar,
        nullcontext() if way.with_prior or model.aggregation.prior is None else model.without_document_prior(),
    ):
        for first in range(0, len(questions), batch_size):
            asked = [question.question for question in questions[first : first + batch_size]]
            encoded = model.input_encoder([model.input_encoder.ids(text) for text in asked])
            if not answers:
                peak = allocated_peak(lambda: way.aggregate(encoded), model.device)[1]  # noqa: B023
            began = time.perf_counter()
            phi = way.aggregate(encoded)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            seconds += time.perf_counter() - began
            answers += [Answer(text, (), (), False) for text in model.generate(asked, modulation=phi)]
            bar.advance(len(asked))
    verdicts = judge(questions, answers)
    em, f1, em_prefix = (
        sum(getattr(verdict, metric) for verdict in verdicts) / len(verdicts) for metric in ("em", "f1", "em_prefix")
    )
    figures = Figures(
        way.group, way.name, way.method, way.parameter, way.entries, way.bank_bytes, em, f1, em_prefix, peak, seconds
    )
    return figures, verdicts


def hierarchical_ways(model: MACModel, bank: MemoryBank, subgroups: Sequence[int]) -> Iterator[Way]:
    """Figure 5 of the paper: the whole bank in one softmax, streamed, and in subgroups of M."""
    network, view = model.aggregation, projected(model, bank)

    def way(name: str, parameter: int | None, aggregate: Aggregate) -> Way:
        return Way("hierarchical", name, name, parameter, len(view.row_keys), bank_bytes(bank), True, aggregate)

    def full(question: MemoryTokens) -> Tensor:
        phi: Tensor = network(question, model.project(bank.phi), attention=direct_attention)[0]
        return phi

    def grouped(subgroup: int) -> Aggregate:
        return lambda question: hierarchical(network, question, view, subgroup)

    yield way("full", None, full)
    yield way("streaming", None, attending(model, view))
    for size in subgroups:
        yield way(f"hierarchical, M = {size}", size, grouped(size))


def reduction_ways(model: MACModel, bank: MemoryBank, documents: Sequence[Document], seed: int) -> Iterator[Way]:
    """Figure 7 of the paper: banks of a limited number of entries, each filled with the stream from its beginning."""
    phi = torch.cat([bank[document.id].phi for document in documents])
    rows = [len(bank[document.id].phi) for document in documents]
    for method in get_args(ReductionMethod):
        for share in SHARES:
            maximum = max(1, round(share * len(documents)))
            bounded = BoundedBank(MemoryBank(model.fingerprint), maximum, method, seed=seed)
            bounded.put(documents, phi, rows)
            yield Way(
                "reduction",
                f"{method.replace('-', ' ')}, {round(100 * share)} %",
                method.replace("-", " "),
                maximum,
                maximum,
                bank_bytes(bounded.bank),
                True,
                attending(model, projected(model, bounded.bank)),
            )


def codebook_ways(
    model: MACModel, bank: MemoryBank, sizes: Sequence[int], preselected: int, seed: int
) -> Iterator[Way]:
    """Quantised banks, and the one that they come from: all of it without the prior, preselected documents with it."""
    network, whole = model.aggregation, projected(model, bank)
    rows = len(whole.row_keys)

    def way(name: str, method: str, codes: int | None, stored: MemoryBank, aggregate: Aggregate) -> Way:
        with_prior = method != WITHOUT_PRIOR
        return Way("codebook", f"{name}, {method}", method, codes, rows, bank_bytes(stored), with_prior, aggregate)

    chosen = f"prior, {preselected} preselected"
    yield way("not quantised", WITHOUT_PRIOR, None, bank, attending(model, whole))
    if network.prior is not None:
        yield way("not quantised", chosen, None, bank, preselecting(model, whole, whole.prior_keys, preselected))
    for size in sizes:
        quantized = quantize(bank, fit(bank.phi, size, seed=seed))
        view = CodebookView(network, quantized, device=model.device)
        name = f"{size:,} codes"
        yield way(name, WITHOUT_PRIOR, size, quantized, attending(model, view))
        if network.prior is not None:
            yield way(name, chosen, size, quantized, preselecting(model, view, view.row_prior_keys, preselected))


def attending(model: MACModel, view: BankView) -> Aggregate:
    """Exact attention over all rows of a view."""

    def aggregate(question: MemoryTokens) -> Tensor:
        phi: Tensor = model.aggregation(question, view)[0]
        return phi

    return aggregate


def preselecting(
    model: MACModel, view: ProjectedBank | CodebookView, prior_keys: Tensor | None, preselected: int
) -> Aggregate:
    """Attention over the rows with the highest prior."""
    prior = model.aggregation.prior
    assert prior is not None
    assert prior_keys is not None
    index = PriorIndex()
    index.refresh(view.row_keys, prior_keys)

    def aggregate(question: MemoryTokens) -> Tensor:
        chosen, _ = index.search(prior.queries(question), prior.log_scale.exp(), preselected)
        phi: Tensor = model.aggregation(question, view.select(chosen))[0]
        return phi

    return aggregate


def projected(model: MACModel, bank: MemoryBank) -> ProjectedBank:
    """The bank with no keys and values kept, so that aggregation pays for all that it needs."""
    return ProjectedBank(model.aggregation, bank, device=model.device, budget_bytes=0, chunk_rows=64)


def bank_bytes(bank: MemoryBank) -> int:
    """What the bank stores of its memory tokens."""
    if bank.codebook is None:
        return bank.phi.nbytes
    return bank.codes(0, len(bank.row_keys)).numel() * torch.int32.itemsize + bank.codebook.nbytes

"""The cases of `benchmarks.aggregation`: implementations of aggregation, each checked against direct attention."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks import published
from benchmarks.generated import GeneratedBank
from benchmarks.measure import Usage, medians, usage
from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.memory_tokens import MemoryTokens

Implementation = Literal["published", "kept", "streamed"]

_PERIOD = 1665  # rows of a generated bank that differ from each other; the paper's largest bank
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Sizes:
    """Sizes of the aggregation network and of its inputs.

    Attributes:
        tokens: memory tokens T of a document, and of a question.
        width: width D of a memory token.
        blocks: cross-attention blocks.
        heads: attention heads.
        head_width: width of a head.
    """

    tokens: int
    width: int
    blocks: int
    heads: int
    head_width: int

    def network(self, device: torch.device) -> AggregationNetwork:
        """A network with random weights, without a document prior, as in the paper."""
        torch.manual_seed(0)
        network = AggregationNetwork(self.width, blocks=self.blocks, heads=self.heads, head_width=self.head_width)
        return network.requires_grad_(False).to(device)

    def question(self, questions: int, device: torch.device) -> MemoryTokens:
        """Random encoded questions `[B, T, D]`."""
        generator = torch.Generator().manual_seed(1)
        return MemoryTokens(torch.randn(questions, self.tokens, self.width, generator=generator).to(device))

    def bank(self, documents: int) -> GeneratedBank:
        """A generated bank."""
        return GeneratedBank(documents, (self.tokens, self.width), period=_PERIOD)


@dataclass(frozen=True)
class Case:
    """One implementation on one bank.

    Attributes:
        implementation: the implementation to measure.
        documents: number of documents in the bank.
        questions: questions of the batch.
    """

    implementation: Implementation
    documents: int
    questions: int


@dataclass(frozen=True)
class Measurement:
    """Time and memory of a case.

    Attributes:
        seconds: time of the whole batch.
        extra_bytes: peak memory beyond bank, network and cached keys and values.
        kept_bytes: size of the cached keys and values.
        kept_seconds: time of projecting them.
        moved_bytes: minimum of bytes to read: the cached keys and values, or the bank once for each block.
    """

    seconds: float
    extra_bytes: int
    kept_bytes: int
    kept_seconds: float
    moved_bytes: int


def compared(sizes: Sizes, documents: int, questions: int, rounds: int, device: torch.device) -> tuple[float, float]:
    """Median seconds with cached keys and values, and of the published implementation, timed in turns.

    Raises:
        AssertionError: if their results differ.
    """
    network, question, bank = sizes.network(device), sizes.question(questions, device), sizes.bank(documents)
    view = ProjectedBank(network, bank, device=device, budget_bytes=_UNLIMITED)
    phi = MemoryTokens(bank.phi.to(device))
    _check(network(question, view)[0], published.attend(network, question, phi))
    return medians(lambda: network(question, view), lambda: published.attend(network, question, phi), rounds)


def measured(case: Case, sizes: Sizes, device: torch.device, rounds: int) -> Measurement:
    """Measures a case, in a process that has done nothing else yet.

    Raises:
        AssertionError: if its result differs from direct attention.
    """
    network, question = sizes.network(device), sizes.question(case.questions, device)
    bank = sizes.bank(case.documents)
    moved = sizes.blocks * case.documents * sizes.tokens * sizes.width * torch.float32.itemsize
    if case.implementation == "published":
        phi = MemoryTokens(bank.phi.to(device))
        used, result = usage(lambda: published.attend(network, question, phi), device, rounds)
        _check(result, bank.answer(network, question))
        return _measurement(used, 0, 0, moved)
    began = time.perf_counter()
    budget = _UNLIMITED if case.implementation == "kept" else 0
    view = ProjectedBank(network, bank, device=device, budget_bytes=budget)
    if device.type == "cuda":
        torch.cuda.synchronize()
    prepared = time.perf_counter() - began
    used, result = usage(lambda: network(question, view)[0], device, rounds)
    _check(result, bank.answer(network, question))
    if case.implementation == "streamed":
        return _measurement(used, 0, 0, moved)
    pairs = [pair for block in range(sizes.blocks) for pair in view.chunks(block)]
    kept = sum(keys.nbytes + values.nbytes for keys, values in pairs)
    return _measurement(used, kept, prepared, kept)


def _check(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)


def _measurement(used: Usage, kept_bytes: int, kept_seconds: float, moved_bytes: int) -> Measurement:
    return Measurement(used.seconds, used.extra_bytes, kept_bytes, kept_seconds, moved_bytes)

"""Time and memory of aggregation, against the published code: `python -m benchmarks.aggregation --help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from benchmarks.measure import Usage
    from mac_rag.bank import MemoryBank
    from mac_rag.nn.aggregation import AggregationNetwork
    from mac_rag.nn.memory_tokens import MemoryTokens

Implementation = Literal["published", "kept", "streamed"]

_NAMES: dict[Implementation, str] = {
    "published": "published",
    "kept": "ours, keys and values cached",
    "streamed": "ours, streamed",
}
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Sizes:
    """Sizes of the bank, the questions and the aggregation network; the defaults are those of the paper's GPT2 models.

    Attributes:
        documents: documents in the bank, one row each.
        questions: questions of one batch.
        tokens: T, memory tokens of a document, and of a question.
        width: D, width of a memory token.
        blocks, heads, head_width: cross-attention blocks, their heads and the width of a head.
    """

    documents: int
    questions: int
    tokens: int = 12
    width: int = 768
    blocks: int = 4
    heads: int = 8
    head_width: int = 96


def main(
    documents: Annotated[int, typer.Option(min=1, help="Documents in the bank.")] = 1665,
    questions: Annotated[int, typer.Option(min=1, help="Questions of one batch.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each; the median counts.")] = 3,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
) -> None:
    """Measure the aggregation of a bank, and compare it with a re-implementation of the published method.

    The published implementation repeats the bank for each question, and each block computes its normalisation, keys and
    values anew. Ours caches keys and values. If they do not fit, it streams the bank: it projects the bank chunk by
    chunk, once for all questions. Each result is checked against direct attention.

    Networks and banks are random float32 tensors without a document prior. Time with cached keys and values and time of
    the published implementation are measured in turns. Extra memory is the peak of a process of its own.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.measure import in_child
    from mac_rag.lm.devices import default_device

    place = default_device(device)
    sizes = Sizes(documents, questions)
    fast, slow = compared(sizes, rounds, place)
    measurements = {name: in_child(measured, name, sizes, place, rounds) for name in _NAMES}
    table = Table(
        "",
        "seconds",
        "extra MB",
        title=f"{questions} questions of {documents:,} documents, T={sizes.tokens}, D={sizes.width}, "
        f"{sizes.blocks} blocks, {sizes.heads} heads of {sizes.head_width}; {place}, {torch.get_num_threads()} threads",
    )
    seconds = {"published": slow, "kept": fast, "streamed": measurements["streamed"].seconds}
    for name, label in _NAMES.items():
        table.add_row(label, f"{seconds[name]:.3f}", f"{measurements[name].extra_bytes / 1e6:.0f}")
    ratio = measurements["published"].extra_bytes / max(1, measurements["kept"].extra_bytes)
    table.add_row("published / cached", f"{slow / fast:.1f}x", f"{ratio:.1f}x")
    Console().print(table)


def compared(sizes: Sizes, rounds: int, device: torch.device) -> tuple[float, float]:
    """Median seconds with cached keys and values, and of the published implementation, timed in turns.

    Raises:
        AssertionError: if their results differ.
    """
    from functools import partial

    from benchmarks import published
    from benchmarks.measure import medians
    from mac_rag.bank.projection import ProjectedBank
    from mac_rag.nn.memory_tokens import MemoryTokens

    network, question, bank = _inputs(sizes, device)
    view = ProjectedBank(network, bank, device=device, budget_bytes=_UNLIMITED)
    phi = MemoryTokens(bank.phi.to(device))
    _check(network(question, view)[0], published.attend(network, question, phi))
    return medians(partial(network, question, view), partial(published.attend, network, question, phi), rounds)


def measured(implementation: Implementation, sizes: Sizes, device: torch.device, rounds: int) -> Usage:
    """Measures one implementation, in a process that has done nothing else yet.

    Raises:
        AssertionError: if its result differs from direct attention.
    """
    from benchmarks import published
    from benchmarks.measure import usage
    from mac_rag.bank.projection import ProjectedBank
    from mac_rag.nn.attention import direct_attention
    from mac_rag.nn.memory_tokens import MemoryTokens

    network, question, bank = _inputs(sizes, device)
    phi = MemoryTokens(bank.phi.to(device))
    if implementation == "published":
        used, result = usage(lambda: published.attend(network, question, phi), device, rounds)
    else:
        budget = _UNLIMITED if implementation == "kept" else 0
        view = ProjectedBank(network, bank, device=device, budget_bytes=budget)
        used, result = usage(lambda: network(question, view)[0], device, rounds)
    _check(result, network(question, network.project(phi), attention=direct_attention)[0])
    return used


def _inputs(sizes: Sizes, device: torch.device) -> tuple[AggregationNetwork, MemoryTokens, MemoryBank]:
    """A network without a document prior, as in the paper; encoded questions; and a bank. All are random."""
    import torch

    from mac_rag.bank import MemoryBank
    from mac_rag.data.types import Document
    from mac_rag.nn.aggregation import AggregationNetwork
    from mac_rag.nn.memory_tokens import MemoryTokens

    torch.manual_seed(0)
    network = AggregationNetwork(sizes.width, blocks=sizes.blocks, heads=sizes.heads, head_width=sizes.head_width)
    question = MemoryTokens(torch.randn(sizes.questions, sizes.tokens, sizes.width).to(device))
    bank = MemoryBank("random", rows="fp32")
    documents = [Document(f"{number}", "") for number in range(sizes.documents)]
    bank.put(documents, torch.randn(sizes.documents, sizes.tokens, sizes.width))
    return network.requires_grad_(False).to(device), question, bank


def _check(result: Tensor, expected: Tensor) -> None:
    import torch

    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)


if __name__ == "__main__":
    run_command(main)

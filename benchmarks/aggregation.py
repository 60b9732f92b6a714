"""Aggregation of a bank: time and memory against the published implementation.

python -m benchmarks.aggregation --help
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    """Sizes of the bank, the questions and the aggregation network.

    Attributes:
        documents: documents in the bank, one row each.
        questions: questions of one batch.
        tokens: memory tokens T of a document, and of a question.
        width: width D of a memory token.
        blocks: cross-attention blocks.
        heads: attention heads.
        head_width: width of a head.
    """

    documents: int
    questions: int
    tokens: int
    width: int
    blocks: int
    heads: int
    head_width: int


@dataclass(frozen=True)
class Measurement:
    """What one implementation takes for the whole batch.

    Attributes:
        seconds: its time.
        extra_bytes: peak memory beyond bank, network and cached keys and values.
    """

    seconds: float
    extra_bytes: int


def main(
    documents: Annotated[int, typer.Option(min=1, help="Documents in the bank.")] = 1665,
    questions: Annotated[int, typer.Option(min=1, help="Questions of one batch.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each; the median counts.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Memory tokens of a document, and of a question (T).")] = 12,
    width: Annotated[int, typer.Option(min=1, help="Width of a memory token (D).")] = 768,
    blocks: Annotated[int, typer.Option(min=1, help="Cross-attention blocks.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    head_width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 96,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure the aggregation of a bank, and compare it with a re-implementation of the published method.

    The published implementation repeats the bank for each question, and each block computes its normalisation, keys and
    values anew. Ours caches keys and values. If they do not fit, it streams the bank: it projects the bank chunk by
    chunk, once for all questions. Each result is checked against direct attention.

    Networks and banks are random float32 tensors without a document prior. Time with cached keys and values and time of
    the published implementation are measured in turns. Extra memory is the peak of a process of its own.
    """
    from dataclasses import asdict

    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.measure import in_child, write_json
    from mac_rag.lm.devices import default_device

    place = default_device(device)
    sizes = Sizes(documents, questions, tokens, width, blocks, heads, head_width)
    fast, slow = compared(sizes, rounds, place)
    measurements = {name: in_child(measured, name, sizes, place, rounds) for name in _NAMES}
    table = Table(
        "",
        "seconds",
        "extra MB",
        title=f"{questions} questions of {documents:,} documents, T={tokens}, D={width}, {blocks} blocks, "
        f"{heads} heads of {head_width}; {place}, {torch.get_num_threads()} threads",
    )
    seconds = {"published": slow, "kept": fast, "streamed": measurements["streamed"].seconds}
    for name, label in _NAMES.items():
        table.add_row(label, f"{seconds[name]:.3f}", f"{measurements[name].extra_bytes / 1e6:.0f}")
    ratio = measurements["published"].extra_bytes / max(1, measurements["kept"].extra_bytes)
    table.add_row("published / cached", f"{slow / fast:.1f}x", f"{ratio:.1f}x")
    Console().print(table)
    if output is not None:
        figures = {name: {**asdict(each), "seconds": seconds[name]} for name, each in measurements.items()}
        write_json(output, {"sizes": asdict(sizes), "device": str(place), "implementations": figures})


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


def measured(implementation: Implementation, sizes: Sizes, device: torch.device, rounds: int) -> Measurement:
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
    return Measurement(used.seconds, used.extra_bytes)


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

"""What is known of every row of a bank before the first question: prior keys, and norms that bound its contribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mac_rag.bank.rows import RowLayout, Summaries
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior import Postings, PriorKeys

if TYPE_CHECKING:
    from mac_rag.bank.bank import Contents, MemoryBank
    from mac_rag.data.types import Document

_SUMMARISED = 256  # rows that are summarised at a time


class Overview(NamedTuple):
    """What is known of k rows.

    Attributes:
        prior_keys: their keys of the document prior.
        longest: `[k, blocks H]`, for each block and head the largest norm of a row's keys.
    """

    prior_keys: PriorKeys
    longest: Tensor

    @classmethod
    def cat(cls, parts: list[Overview]) -> Overview:
        """What is known of the rows of several parts, at least one, in order."""
        keys = PriorKeys.cat([part.prior_keys for part in parts])
        return cls(keys, parts[0].longest if len(parts) == 1 else torch.cat([part.longest for part in parts]))

    def kept(self, mask: Tensor) -> Overview:
        """The rows where `mask` `[k]` is True; the same object if these are all."""
        return self if mask.all() else Overview(self.prior_keys.kept(mask), self.longest[mask])


def layout_for(network: AggregationNetwork) -> RowLayout:
    """How a new bank keeps rows for a network, unless the bank was made for other numbers."""
    return RowLayout(dtype="bf16", lexical_vectors=network.lexical_vectors, summary=network.summary_width)


def keep_rows_for(bank: MemoryBank, network: AggregationNetwork) -> None:
    """Has an empty bank keep rows for a network; see `MemoryBank.keep_rows_as`.

    With rows `pq`, the keys of the document prior are rounded to bf16, which takes a tenth off a document. Beside other
    rows they are a hundredth of it, and stay float32.

    Raises:
        BankError: for a bank with rows `pq`, when no quantizer was fitted to the model.
    """
    layout = layout_for(network)
    if bank.layout.dtype == "pq" and network.prior is not None:
        layout = layout.model_copy(update={"prior_keys": network.prior.key.out_features})
    bank.keep_rows_as(layout, network.quantizer)


@torch.no_grad()
def summarise(network: AggregationNetwork, phi: Tensor) -> Tensor:
    """Summaries `[n, S]` of a bank's rows `[n, T + R, D]` (`AggregationNetwork.summaries`), in float32 on the CPU."""
    weight = network.bank_norm.weight
    parts = (
        MemoryTokens.split(part.to(weight.device, weight.dtype), network.lexical_vectors)
        for part in phi.split(_SUMMARISED)
    )
    return torch.cat([network.summaries(part).float().cpu() for part in parts])


def put_with_overview(
    bank: MemoryBank, network: AggregationNetwork, documents: Sequence[Document], phi: Tensor, rows: Sequence[int]
) -> tuple[str, ...]:
    """Puts documents as `MemoryBank.put` does, with what the network wants to know of every row at once."""
    keep_rows_for(bank, network)
    return bank.put(documents, phi, rows, summarise=partial(summarise, network))


def keeps_overview(network: AggregationNetwork, bank: Contents) -> bool:
    """True if the bank keeps beside its rows what this network wants to know of each."""
    layout = bank.layout
    return layout.summary == network.summary_width > 0 and layout.lexical_vectors == network.lexical_vectors


@torch.no_grad()
def read_overviews(
    network: AggregationNetwork,
    bank: Contents,
    first: int,
    read: Callable[[Tensor], MemoryTokens],
    *,
    chunk_rows: int,
    device: torch.device,
) -> list[Overview]:
    """What is known of the rows from `first` on.

    Merged rows are read for it, and in a bank that does not keep what this network wants to know, all rows.

    Args:
        network: the network that reads the bank; it has a document prior.
        bank: the bank.
        first: number of the first row.
        read: reads rows by their numbers, as the network takes them.
        chunk_rows: rows that are read at a time.
        device: device of the result.

    Raises:
        DamageError: when what is read is not what was written.
    """
    found, start = [], first
    if not keeps_overview(network, bank):
        for some in torch.arange(first, len(bank.row_keys)).split(chunk_rows) if first < len(bank.row_keys) else ():
            phi = read(some)
            lexical = None if phi.lexical is None else phi.lexical.flatten(1)
            dense, longest = _divided(network, network.summaries(phi))
            found.append(Overview(PriorKeys.of(dense, lexical), longest))
        return found
    for summaries in bank.overview(first):
        index = torch.arange(start, start + len(summaries.summaries))
        found.append(_from_bank(network, summaries, index, read, chunk_rows, device))
        start += len(index)
    return found


def _from_bank(
    network: AggregationNetwork,
    kept: Summaries,
    index: Tensor,
    read: Callable[[Tensor], MemoryTokens],
    chunk_rows: int,
    device: torch.device,
) -> Overview:
    """From what a bank keeps; merged entries have no summary there."""
    summaries = kept.summaries.to(device, network.bank_norm.weight.dtype)
    unknown = (kept.summaries == 0).all(1).nonzero()[:, 0]
    if len(unknown):
        summaries = summaries.clone()
        for some in unknown.split(chunk_rows):
            summaries[some.to(device)] = network.summaries(read(index[some]))
    dense, longest = _divided(network, summaries)
    lexical = Postings(*(part.to(device) for part in kept.lexical)) if network.lexical_vectors else None
    return Overview(PriorKeys(dense, lexical), longest)


def _divided(network: AggregationNetwork, summaries: Tensor) -> tuple[Tensor, Tensor]:
    """Prior keys and norms, in memory of their own: one of them alone would keep both."""
    assert network.prior is not None
    width = network.prior.key.out_features
    return summaries[:, :width].contiguous(), summaries[:, width:].contiguous()

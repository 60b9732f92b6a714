"""A codebook bank: memory tokens as indices of C shared vectors, and attention over those vectors with counts.

Softmax attention over n equal tokens equals attention over one such token with log n added to its logit. So attention
over the codes with the log of their counts equals attention over all tokens of the quantized bank, at a cost that
depends on the codebook and not on the number of documents. Adding or deleting a document only changes counts.

The document prior distinguishes documents that share codes, so counts do not work with it. With the prior on, codes are
only how documents are stored, and preselected documents are expanded to their tokens (`CodebookView.select`).

Not part of the paper, which leaves the compression of the bank to future work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mac_rag.errors import BankError
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.contents import Contents
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_tokens import MemoryTokens, split_rows


def quantize(bank: Contents, codebook: Tensor) -> MemoryBank:
    """Copies a bank into one in memory that stores memory tokens as indices of a codebook `[C, D]`."""
    quantized = MemoryBank(
        bank.fingerprint, codebook=codebook, keep_texts=bank.keep_texts, secure_delete=bank.secure_delete
    )
    quantized.restore(bank)
    return quantized


class CodebookView:
    """A codebook bank under one aggregation network: a `BankView` whose rows are the codes in use, of one token each.

    The codes are projected once. A view shows one version of the bank: after a change of the bank, call `refresh`. It
    has no prior keys, so the network refuses it while the document prior is in use; `select` returns a view with them.

    Args:
        network: the aggregation network; its weights must not change while the view is in use.
        bank: the bank to follow; it must have a codebook.
        device: device of the network and of all tensors of the view.
        dtype: dtype of stored keys and values; they are computed in the network's dtype.
        chunk_rows: number of codes that are attended to, or of rows that are expanded, at a time.

    Attributes:
        codebook: `[C, D]`, the bank's codebook when the view was made.
        row_keys: `[N]`, keys of the bank's rows (not of the codes).

    Raises:
        BankError: for a bank without a codebook.
    """

    prior_keys: Tensor | None = None
    dates: Tensor | None = None  # of codes; rows have `row_dates`

    def __init__(
        self,
        network: AggregationNetwork,
        bank: Contents,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        chunk_rows: int = 8192,
    ) -> None:
        if bank.codebook is None:
            raise BankError("this memory bank has no codebook; quantize it first")
        self.network = network
        self.bank = bank
        self.chunk_rows = chunk_rows
        self.codebook = bank.codebook
        blocks = [block for block in network.blocks if isinstance(block, CrossAttentionBlock)]
        self._codebook = bank.codebook.to(device, blocks[0].to_key.weight.dtype)
        with torch.no_grad():
            normed = network.bank_norm(self._codebook[:, None])
            projected = [block.project(normed) for block in blocks]  # [H, C, 1, d]
        self._keys = [keys.to(dtype) for keys, _ in projected]
        self._values = [values.to(dtype) for _, values in projected]
        self._codes = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._row_prior_keys: Tensor | None = None
        self._counts = torch.zeros(len(self._codebook), dtype=torch.int64, device=device)
        self._version: int | None = None
        self.row_keys = torch.empty(0, dtype=torch.int64)
        self.refresh()

    def refresh(self) -> None:
        """Follows the bank: adds and removes the counts of changed rows. Nothing is projected."""
        if self._version == self.bank.version:
            return
        version, row_keys = self.bank.version, self.bank.row_keys
        # New rows stand behind all others, so the rows that are known already come first.
        first = int(torch.isin(row_keys, self.row_keys, assume_unique=True).long().cumprod(0).sum())
        kept = torch.isin(self.row_keys, row_keys[:first], assume_unique=True)
        kept = kept.to(self._codes.device)
        held = self._codes[kept]
        stored = self.bank.codes(first, len(row_keys)).to(held) if first < len(row_keys) else held[:0]
        lexical_vectors = self.network.lexical_vectors
        new = split_rows(stored, lexical_vectors)[0] if len(stored) else stored  # lexical vectors are not attended to
        codes = torch.cat([held, new]) if len(held) else new
        self._counts += self._counted(new) - self._counted(self._codes[~kept])
        if self.network.prior is not None:
            with torch.no_grad():
                parts = [
                    self.network.prior.keys(MemoryTokens.split(self._codebook[part.long()], lexical_vectors))
                    for part in stored.split(self.chunk_rows)
                ]
            before = [] if self._row_prior_keys is None else [self._row_prior_keys[kept]]
            self._row_prior_keys = torch.cat(before + parts)
        self._codes, self.row_keys, self._version = codes, row_keys, version

    def _counted(self, codes: Tensor) -> Tensor:
        return codes.flatten().long().bincount(minlength=len(self._codebook))

    @property
    def _used(self) -> Tensor:
        return self._counts.nonzero().squeeze(1)

    @property
    def documents(self) -> int:
        """K, the number of codes in use."""
        return len(self._used)

    @property
    def counts(self) -> Tensor:
        """How many tokens of the bank each code in use stands for, int64 `[K]`."""
        return self._counts[self._used]

    @property
    def log_counts(self) -> Tensor:
        """Log of `counts`, `[K]`."""
        return self.counts.double().log().to(self._codebook.dtype)

    @property
    def row_prior_keys(self) -> Tensor | None:
        """Prior keys of the bank's rows `[N, d_prior]`, to preselect rows by; None without a document prior."""
        return self._row_prior_keys

    @property
    def row_dates(self) -> Tensor | None:
        """When each of the bank's rows counts, int64 `[N]`; None for a network without a recency term."""
        if self.network.recency is None:
            return None
        dates: Tensor = self.bank.timeline.row_dates.to(self._codes.device)
        return dates

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        for codes in self._used.split(self.chunk_rows):
            yield self._keys[block][:, codes], self._values[block][:, codes]

    def select(self, index: Tensor) -> BankView:
        """A view of rows of the bank (not of codes) with all their tokens.

        Args:
            index: `[B, N]`, for each question the numbers of the rows that it sees, in the order of `bank.row_keys`.
        """
        return _ExpandedRows(self, index)

    def row_mass(self, mass: Tensor) -> Tensor:
        """Attention mass of the bank's rows `[B, N]`, from that of the codes in use `[B, K]`.

        It equals the mass of attention over the quantized bank, because equal tokens have equal shares.
        """
        shares = mass.new_zeros(len(mass), len(self._counts))
        shares[:, self._used] = mass / self.counts
        return torch.cat([shares[:, part.long()].sum(2) for part in self._codes.split(self.chunk_rows)], 1)


@dataclass(frozen=True)
class _ExpandedRows:
    """Rows of a codebook bank with all their tokens; each question has its own row numbers `index` `[B, N]`."""

    view: CodebookView
    index: Tensor
    log_counts: None = None

    @property
    def documents(self) -> int:
        return self.index.shape[1]

    @property
    def prior_keys(self) -> Tensor | None:
        keys = self.view.row_prior_keys
        return None if keys is None else keys[self.index]

    @property
    def dates(self) -> Tensor | None:
        dates = self.view.row_dates
        return None if dates is None else dates[self.index]

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        keys, values = self.view._keys[block], self.view._values[block]
        for rows in self.index.split(max(1, self.view.chunk_rows // len(self.index)), 1):
            codes = self.view._codes[rows].long()  # [B, n, T]
            yield keys[:, codes, 0].transpose(0, 1), values[:, codes, 0].transpose(0, 1)  # [B, H, n, T, d]

    def select(self, index: Tensor) -> _ExpandedRows:
        return _ExpandedRows(self.view, self.index.gather(1, index))

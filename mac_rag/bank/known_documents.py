"""Which documents of a bank count at a moment: those that are not later, and that no other has superseded by then.

Dates and ids lie in arrays, so a bank of a million documents is looked through without a loop over them.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mac_rag.bank.directory import id_hashes
from mac_rag.bank.interface import BankContents
from mac_rag.data.dates import written
from mac_rag.data.document_ids import HashedIds, id_hash


class KnownDocuments(HashedIds, Container[str]):
    """Ids of the documents that count at a moment, for what takes `allowed` documents.

    With a moment, these are documents of the bank alone: nobody knows when others came. Without one, all documents
    count but those that one of the bank supersedes, whatever its date.

    Two ids of one hash, which are one in 2^64 pairs, count if both do.

    Args:
        bank: the bank, or a snapshot of it.
        as_of: the moment, in microseconds since 1970; None for all dates.
        among: ids of the documents that may have any influence; None for all. Others supersede none either.
    """

    def __init__(self, bank: BankContents, as_of: int | None, among: Container[str] | None = None) -> None:
        self.bank = bank
        self.as_of = as_of
        self.among = among
        self._directory = directory = bank.directory
        counts = torch.ones_like(directory.dates, dtype=torch.bool) if as_of is None else directory.dates <= as_of
        by, named = directory.superseding, directory.superseded
        if len(by):
            # A document never supersedes itself, nor another before its own date.
            says = counts[by] & (directory.hashes[by] != named)
            if among is not None:
                says &= torch.isin(directory.hashes[by], _hashes_of(among, bank))
            counts = counts & ~torch.isin(directory.hashes, named[says])
        self._counts = counts

    def __contains__(self, document_id: object) -> bool:
        if not isinstance(document_id, str) or (self.among is not None and document_id not in self.among):
            return False
        return bool(self.holds(np.array([id_hash(document_id)]))[0])

    def holds(self, hashes: NDArray[np.int64]) -> NDArray[np.bool_]:
        different, counts = self._by_hash
        if not len(different):
            return np.full(len(hashes), self.as_of is None)
        places = np.searchsorted(different, hashes).clip(max=len(different) - 1)
        found: NDArray[np.bool_] = np.where(different[places] == hashes, counts[places], self.as_of is None)
        return found

    @cached_property
    def _by_hash(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The different hashes, ascending, and which of them count."""
        different, places = self._directory.by_hash
        counts = torch.ones(len(different), dtype=torch.bool)
        counts[places[~self._counts]] = False
        return different.numpy(), counts.numpy()

    def rows_of(self, bank: BankContents) -> Tensor:
        """Which rows of a bank stand for documents that all count, bool `[N]`."""
        if bank is not self.bank:
            return KnownDocuments(bank, self.as_of, self.among).rows_of(bank)
        members, rows = self._directory.members, self._directory.rows
        entries = torch.arange(len(members)).repeat_interleave(members)
        counts = torch.ones(len(members), dtype=torch.bool)
        counts[entries[~self._counts]] = False
        visible = counts.repeat_interleave(rows)
        return visible if self.among is None else visible & bank.visible_rows(self.among)

    def __str__(self) -> str:
        when = "" if self.as_of is None else f" of {written(self.as_of)} or before"
        return f"documents{when}{'' if self.among is None else ' among those allowed'} that none supersedes"


def _hashes_of(names: Container[str], bank: BankContents) -> Tensor:
    """Hashes of the documents in a container; of one that cannot be listed, of those that the bank holds."""
    if not isinstance(names, Collection):
        names = [name for name in bank.document_ids if name in names]
    return id_hashes([name for name in names if isinstance(name, str)])

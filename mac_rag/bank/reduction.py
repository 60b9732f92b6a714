"""A bank with a maximum number of entries (section "Memory bank size constraint" of the paper).

Documents arrive one by one, and a full bank makes room for each: it prunes a random entry, averages two random entries,
or averages the two most similar ones. An averaged entry stands for all its documents and keeps their ids, hashes and
metadata. Its documents share one memory, so deleting or updating one of them removes the whole entry; otherwise some of
its influence would remain. The other documents of the entry must be adapted again.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.database import PART_BITS
from mac_rag.bank.entries import new_entries
from mac_rag.bank.rows import NewRows
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError

ReductionMethod = Literal["random-pruning", "random-averaging", "nearest-averaging"]

# Vectors whose neighbours are searched in one pass over the set: reading the set costs more than the arithmetic.
_BLOCK = 128
# Nearest neighbours by float32 similarity, among which float64 decides.
_CANDIDATES = 4


class BoundedBank:
    """Puts documents into a bank and keeps it at `maximum` entries.

    The result depends only on the order of arrival, the method and the seed: not on how documents are grouped into
    calls, nor on restarts of the process in between. `nearest-averaging` is exact and needs no distance matrix: an
    arrival costs about one pass over the bank (see `ClosestPair`), for which memory tokens are held
    in memory a second time.

    Args:
        bank: a bank that is open for writing. Others may change it between calls.
        maximum: maximum number of entries. `len(bank)` counts documents and can be larger, because averaged documents
            are one entry.
        method: `random-pruning` deletes a random entry; `random-averaging` replaces two random entries by their mean;
            `nearest-averaging` replaces the two of highest cosine similarity, all memory tokens of an entry taken as
            one vector. An entry of several rows is averaged to one row first.
        seed: random seed of the two random methods.

    Raises:
        ConfigError: for an unknown method, a maximum below 1, and a bank of codes that a method would average.
    """

    def __init__(self, bank: MemoryBank, maximum: int, method: ReductionMethod, *, seed: int = 0) -> None:
        if method not in get_args(ReductionMethod):
            raise ConfigError(f"unknown reduction {method!r}; choose one of {', '.join(get_args(ReductionMethod))}")
        if maximum < 1:
            raise ConfigError(f"a bank must hold at least 1 entry, got a maximum of {maximum}")
        self.bank = bank
        self.maximum = maximum
        self.method = method
        self.seed = seed
        self._check_method(bank.layout.token_bytes > 0)
        self._forget()
        self._forgotten: list[str] = []  # during one call

    def _forget(self) -> None:
        self._version = -1  # the version of the bank that the fields below describe
        self._entries: list[int] = []  # sequence numbers of the entries, ascending
        self._closest: ClosestPair | None = None

    def put(
        self,
        documents: Sequence[Document],
        phi: NewRows,
        rows: Sequence[int] | None = None,
        *,
        summaries: Tensor | None = None,
    ) -> tuple[str, ...]:
        """Puts documents as `MemoryBank.put` does, all or none, and makes room for each as it arrives.

        So do entries that others have put since, in their order, before these documents.

        Args:
            documents, phi, rows: see `MemoryBank.put`.
            summaries: `[N, S]`, those of all rows, for a bank of codes that has any.

        Returns:
            Ids of the documents that the bank no longer holds: they were pruned, or were averaged with one that was
            replaced.

        Raises:
            BankError: see `MemoryBank.put`.
            ConfigError: for codes that the method would average.
        """
        self._check_method(not isinstance(phi, Tensor))
        new = new_entries(documents, rows, len(phi), keep_texts=False)
        self._follow()
        kept = phi.detach().cpu() if isinstance(phi, Tensor) else phi
        stops = list(accumulate(entry.rows for entry in new))
        try:
            with self.bank.changing():
                for document, start, stop in zip(documents, [0, *stops], stops):
                    self._put(document, kept[start:stop], None if summaries is None else summaries[start:stop])
        except BaseException:  # the bank is as before, so what is known of it is not true
            self._forget()
            raise
        self._version = self.bank.version
        return tuple(name for name in self._forgotten if name not in self.bank)

    def _put(self, document: Document, phi: NewRows, summaries: Tensor | None) -> None:
        replaced = self.bank[document.id].sequence if document.id in self.bank else None
        summarise = None if summaries is None else lambda _: summaries
        self._forgotten += self.bank.put([document], phi, [len(phi)], summarise=summarise)
        if replaced is not None:
            self._remove(replaced)
        self._arrive(self.bank[document.id].sequence)

    def _check_method(self, holds_codes: bool) -> None:
        if holds_codes and self.method != "random-pruning":
            raise ConfigError(f"codes of keys and values cannot be averaged, as {self.method} does; use random-pruning")

    def _follow(self) -> None:
        """Takes in the changes that others made to the bank."""
        self._forgotten = []
        if self._version == self.bank.version:
            return
        sequences = self.bank.row_keys >> PART_BITS
        known = torch.tensor(self._entries, dtype=torch.int64)
        for sequence in known[~torch.isin(known, sequences)].tolist():
            self._remove(sequence)
        is_first = sequences.diff(prepend=sequences.new_tensor([-1])) != 0
        new = (is_first & ~torch.isin(sequences, known)).nonzero().squeeze(1)
        for sequence in sequences[new].tolist():
            self._arrive(sequence)

    def _arrive(self, sequence: int) -> None:
        """Registers an entry, and makes room for it in a full bank."""
        self._add(sequence)
        if len(self._entries) <= self.maximum:
            return
        # Seeded by the arrival itself, so that a restarted process continues as the old one would have.
        rng = random.Random(f"{self.seed}/{sequence}")
        if self.method == "random-pruning":
            pruned = rng.choice(self._entries)
            self._remove(pruned)
            self._forgotten += self.bank.delete(self.bank.entry(pruned).document_id, from_index=False)
            return
        first, second = rng.sample(self._entries, 2) if self._closest is None else self._closest.pair()
        mean = (self._tokens(first) + self._tokens(second)) / 2
        documents = [self.bank.entry(one).document_id for one in (first, second)]
        self._remove(first)
        self._remove(second)
        self.bank.merge(documents, mean[None])
        self._add(self.bank[documents[0]].sequence)

    def _add(self, sequence: int) -> None:
        insort(self._entries, sequence)
        if self.method == "nearest-averaging":
            tokens = self._tokens(sequence).flatten()
            if self._closest is None:
                self._closest = ClosestPair(self.maximum + 1, len(tokens))
            self._closest.add(sequence, tokens)

    def _remove(self, sequence: int) -> None:
        """Drops an entry here, not from the bank."""
        del self._entries[bisect_left(self._entries, sequence)]
        if self._closest is not None:
            self._closest.remove(sequence)

    def _tokens(self, sequence: int) -> Tensor:
        """Memory tokens of an entry, averaged to one row `[T, D]`."""
        return self.bank.entry(sequence).phi.mean(0)


class ClosestPair:
    """A set of vectors that finds its pair of highest cosine similarity.

    Each vector knows its nearest neighbour among the vectors that were added before it, and keeps their similarity as
    an upper bound. When that neighbour is removed, the bound becomes too high, never too low: the remaining earlier
    vectors are farther away, and later vectors search for their own neighbour among all. So `pair` searches again only
    for vectors that have lost their neighbour and have one of the highest bounds, many in one pass over the set.

    A change of the set costs about one pass, O(n W). Only the first pair of n vectors costs all n² similarities; they
    are computed block by block. The set keeps one float32 copy of the vectors. Similarities are compared in float64.

    Args:
        capacity: maximum number of vectors at a time.
        width: W, the length of a vector.

    Examples:
        >>> import torch
        >>> from mac_rag.bank.reduction import ClosestPair
        >>> vectors = ClosestPair(capacity=3, width=2)
        >>> for key, vector in enumerate([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]):
        ...     vectors.add(key, torch.tensor(vector))
        >>> vectors.pair()
        (0, 2)
    """

    def __init__(self, capacity: int, width: int) -> None:
        self._vectors = torch.empty(capacity, width)
        self._norms = torch.ones(capacity, dtype=torch.float64)
        self._keys = torch.full((capacity,), -1)  # the key of the vector in each slot; -1 if it is free
        self._bounds = torch.full((capacity,), -torch.inf, dtype=torch.float64)
        self._nearest = torch.zeros(capacity, dtype=torch.int64)  # the slot of the nearest neighbour,
        self._nearest_keys = torch.full((capacity,), -2)  # and its key: the slot may hold another vector now
        self._seen = torch.zeros(capacity, dtype=torch.int64)  # slots that were in use when the vector was added
        self._slots: dict[int, int] = {}
        self._free = list(range(capacity))[::-1]
        self._used = 0  # slots from here on were never used, and their memory is not touched

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, key: int, vector: Tensor) -> None:
        """Adds a vector `[W]` under a new key, an integer of at least 0."""
        slot = self._free.pop()
        self._used = max(self._used, slot + 1)
        self._slots[key] = slot
        self._keys[slot] = key
        self._vectors[slot] = vector
        self._norms[slot] = vector.double().norm().clamp(min=1e-300)
        self._bounds[slot] = torch.inf
        self._nearest_keys[slot] = -2
        self._seen[slot] = self._used

    def remove(self, key: int) -> None:
        """Removes the vector of this key."""
        slot = self._slots.pop(key)
        self._free.append(slot)
        self._keys[slot] = -1
        self._bounds[slot] = -torch.inf

    def pair(self) -> tuple[int, int]:
        """The keys of the most similar pair, the lower key first.

        Raises:
            ValueError: for fewer than two vectors.
        """
        if len(self) < 2:
            raise ValueError(f"a pair takes two vectors, the set holds {len(self)}")
        while True:
            keys, bounds = self._keys[: self._used], self._bounds[: self._used]
            is_stale = self._keys[self._nearest[: self._used]] != self._nearest_keys[: self._used]
            best_known, best = bounds.masked_fill(is_stale, -torch.inf).max(0)
            unknown = (is_stale & (bounds > best_known)).nonzero().squeeze(1)
            if not len(unknown):
                first, second = sorted((int(keys[best]), int(self._nearest_keys[best])))
                return first, second
            # Vectors that were never searched for come first, in order: early ones have few vectors to compare with.
            new = unknown[bounds[unknown] == torch.inf]
            highest = new if len(new) else unknown[bounds[unknown].topk(min(_BLOCK, len(unknown))).indices]
            self._search(highest[:_BLOCK])

    def _search(self, slots: Tensor) -> None:
        """Finds the nearest neighbours of the vectors in these slots `[n]`."""
        seen = int(self._seen[slots].max())
        vectors, norms = self._vectors[:seen], self._norms[:seen]
        similarity = (vectors @ self._vectors[slots].T).T / norms.float()  # [n, seen], up to the norms of `slots`
        similarity[:, self._keys[:seen] < 0] = -torch.inf
        similarity.scatter_(1, slots[:, None], -torch.inf)
        candidates = similarity.topk(min(_CANDIDATES, seen)).indices  # [n, c]
        exact = (vectors[candidates].double() @ self._vectors[slots].double()[:, :, None]).squeeze(2)
        exact /= norms[candidates] * norms[slots, None]
        exact[similarity.gather(1, candidates) == -torch.inf] = -torch.inf
        self._bounds[slots], best = exact.max(1)
        self._nearest[slots] = candidates.gather(1, best[:, None]).squeeze(1)
        self._nearest_keys[slots] = self._keys[self._nearest[slots]]

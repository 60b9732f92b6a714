"""The document prior's keys of a whole bank, whose lexical parts are mostly zeros, in little memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class PriorKeys:
    """Keys of K documents: `[dense, lexical]`, each of width P + L.

    Examples:
        >>> keys = PriorKeys.of(torch.ones(1, 2), torch.tensor([[0.0, 3.0, 0.0]]))
        >>> keys.products(torch.tensor([[1.0, 1.0, 5.0, 1.0, 7.0]]))
        tensor([[5.]])
        >>> keys.take(torch.tensor([0]))
        tensor([[1., 1., 0., 3., 0.]])

    Args:
        dense: `[K, P]`.
        counts: `[K]`, int32, how many numbers of each document's lexical part are not zero.
        places: `[sum of counts]`, int32, where they stand in it; document after document.
        weights: `[sum of counts]`, the numbers, in float32 at least.
        width: L; 0 without lexical parts.
    """

    def __init__(self, dense: Tensor, counts: Tensor, places: Tensor, weights: Tensor, width: int) -> None:
        self.dense = dense
        self.counts = counts
        self.places = places
        self.weights = weights
        self.width = width

    @classmethod
    def of(cls, dense: Tensor, lexical: Tensor | None) -> PriorKeys:
        """Keys whose lexical parts are given with their zeros, `[K, L]`; None without them."""
        if lexical is None:
            lexical = dense.new_empty(len(dense), 0)
        filled = lexical != 0
        weights = lexical[filled].to(torch.promote_types(lexical.dtype, torch.float32))
        return cls(dense, filled.sum(1, dtype=torch.int32), filled.nonzero()[:, 1].int(), weights, lexical.shape[1])

    @classmethod
    def cat(cls, parts: Sequence[PriorKeys]) -> PriorKeys:
        """The keys of several parts, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.dense for part in parts]),
            torch.cat([part.counts for part in parts]),
            torch.cat([part.places for part in parts]),
            torch.cat([part.weights for part in parts]),
            parts[0].width,
        )

    def __len__(self) -> int:
        """K."""
        return len(self.dense)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in (self.dense, self.counts, self.places, self.weights))

    def kept(self, mask: Tensor) -> PriorKeys:
        """The keys of the documents where `mask` `[K]` is True; the same object if these are all."""
        if mask.all():
            return self
        entries = mask.repeat_interleave(self.counts)
        return PriorKeys(self.dense[mask], self.counts[mask], self.places[entries], self.weights[entries], self.width)

    def products(self, queries: Tensor) -> Tensor:
        """The product of every query with every key, `[B, K]`.

        Args:
            queries: `[B, P + L]`.
        """
        # With one column, with the keys on the right, or with columns that are not one behind the other, a product of
        # matrices goes to kernels that are several times slower.
        columns = queries[:, : self.dense.shape[1]].expand(max(2, len(queries)), -1).contiguous().T
        products = (self.dense @ columns)[:, : len(queries)].T
        if not self.width or not len(self.weights):
            return products
        lexical = queries[:, self.dense.shape[1] :].to(self.weights.dtype)
        if self.weights.device.type != "cpu":
            return products + (self._matrix @ lexical.T).T.to(products.dtype)
        return products + torch.stack([self._lexical_products(query) for query in lexical]).to(products.dtype)

    def _lexical_products(self, query: Tensor) -> Tensor:
        """The products with the lexical part `[L]` of one query, `[K]`: only those of the places that it has."""
        ends, documents, weights = self._postings
        products = weights.new_zeros(len(self))
        for place in query.nonzero()[:, 0].tolist():
            here = slice(int(ends[place]), int(ends[place + 1]))
            products.index_add_(0, documents[here], query[place] * weights[here])
        return products

    @cached_property
    def _postings(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each place of the lexical parts, the documents that have it, and their numbers there.

        Returns:
            Where each place begins among the others `[L + 1]`; documents, int32, and numbers, place after place.
        """
        small = self.places.numpy().astype(np.uint16 if self.width <= 1 << 16 else np.uint32)
        order = torch.from_numpy(np.argsort(small, kind="stable"))  # of 16 bits, a radix sort
        documents = torch.arange(len(self), dtype=torch.int32).repeat_interleave(self.counts)
        ends = torch.nn.functional.pad(torch.bincount(self.places, minlength=self.width).cumsum(0), (1, 0))
        return ends, documents[order], self.weights[order]

    def take(self, index: Tensor) -> Tensor:
        """The keys of some documents with all their zeros, `[n, P + L]`."""
        starts = self.counts.cumsum(0) - self.counts  # in int64
        counts = self.counts[index]
        row = torch.arange(len(index), device=index.device).repeat_interleave(counts)
        within = torch.arange(len(row), device=index.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        entries = starts[index].repeat_interleave(counts) + within
        lexical = self.dense.new_zeros(len(index), self.width)
        lexical[row, self.places[entries].long()] = self.weights[entries].to(lexical.dtype)
        return torch.cat([self.dense[index], lexical], 1)

    @cached_property
    def _matrix(self) -> Tensor:
        """The lexical parts `[K, L]` as a sparse matrix."""
        starts = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).to(torch.int32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            shape = len(self), self.width
            return torch.sparse_csr_tensor(starts, self.places, self.weights, shape, check_invariants=False)

"""Finds the rows with the highest document prior, so that the cost of a question need not grow with the bank.

Up to a configured number of rows the search is exact; beyond it FAISS searches an inverted file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mac_rag.errors import BankError

if TYPE_CHECKING:
    import numpy as np


# Rows up to which all products are computed: with keys of 384 numbers, some 300 MB of them. An exact search needs no
# FAISS and misses nothing.
EXACT_ROWS = 200_000


class PriorIndex:
    """Finds the N rows with the highest prior `s(x, d) = scale * query key`.

    Args:
        exact_rows: up to this many rows all products `[B, K]` are computed at once. Beyond it, FAISS keeps the keys in
            an inverted file of about sqrt(K) cells and searches the cells nearest to a question.
        probed: share of the cells that are searched; 1 finds the same rows as the exact search.
    """

    def __init__(self, *, exact_rows: int = EXACT_ROWS, probed: float = 0.25) -> None:
        self.exact_rows = exact_rows
        self.probed = probed
        self._row_keys = torch.empty(0, dtype=torch.int64)
        self._prior_keys = torch.empty(0, 0)
        self._faiss: Any = None
        self._learned_rows = 0  # number of rows when the cells were learned

    def __len__(self) -> int:
        return len(self._row_keys)

    def refresh(self, row_keys: Tensor, prior_keys: Tensor) -> None:
        """Follows a bank: replaces the rows by these.

        The FAISS index adds new rows and removes missing ones. It learns its cells again when the bank has grown to
        more than four times the rows that they were learned from.

        Args:
            row_keys: `[K]`, keys of the rows, ascending (`ProjectedBank.row_keys`).
            prior_keys: `[K, d_prior]`, keys of the document prior (`ProjectedBank.prior_keys`). They are not copied.

        Raises:
            BankError: when there are more than `exact_rows` rows and FAISS is not installed.
        """
        if row_keys is self._row_keys and prior_keys is self._prior_keys:
            return
        if len(row_keys) <= self.exact_rows:
            self._faiss = None
        elif self._faiss is None or len(row_keys) > 4 * self._learned_rows:
            self._faiss = _inverted_file(prior_keys)
            self._learned_rows = len(row_keys)
            self._add(row_keys, prior_keys)
        else:
            removed = self._row_keys[~torch.isin(self._row_keys, row_keys, assume_unique=True)]
            added = ~torch.isin(row_keys, self._row_keys, assume_unique=True)
            if len(removed):
                self._faiss.remove_ids(removed.numpy())
            self._add(row_keys[added], prior_keys[added.to(prior_keys.device)])
        self._row_keys, self._prior_keys = row_keys, prior_keys

    def _add(self, row_keys: Tensor, prior_keys: Tensor) -> None:
        if len(row_keys):
            self._faiss.add_with_ids(_array(prior_keys), row_keys.numpy())

    def search(self, queries: Tensor, scale: float | Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Finds the rows with the highest prior.

        Args:
            queries: `[B, d_prior]` (`DocumentPrior.queries`).
            scale: factor of the products (`exp(tau)` of the prior).
            n: number of rows to find; all rows if there are fewer.

        Returns:
            Row numbers `[B, N]`, ascending for each question; and the discarded prior `[B]`, the share of the prior's
            softmax over all rows that lies on the other rows. The share is exact for the exact search. With FAISS it
            is an upper bound that counts every other row as if it scored like the worst row in the result; the bound
            holds if the result has the best rows, which only `probed=1` guarantees.
        """
        rows = len(self)
        n = min(n, rows)
        scale = torch.as_tensor(scale, dtype=queries.dtype, device=queries.device)
        if self._faiss is None:
            scores = scale * (queries @ self._prior_keys.T)  # [B, K]
            best, index = scores.topk(n, dim=-1)
            log_all = scores.logsumexp(-1)
        else:
            products, index = self._search_faiss(queries, n)
            best = scale * products
            log_rest = best[:, -1] + (math.log(rows - n) if rows > n else -math.inf)
            log_all = torch.logaddexp(best.logsumexp(-1), log_rest)
        discarded = -torch.expm1(best.logsumexp(-1) - log_all)
        return index.sort(-1).values, discarded.clamp(0, 1)

    def _search_faiss(self, queries: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The highest products `[B, N]`, descending, and the numbers of their rows `[B, N]`."""
        import numpy as np

        vectors = _array(queries)
        cells = self._faiss.nlist
        self._faiss.nprobe = max(1, round(self.probed * cells))
        products, ids = self._faiss.search(vectors, n)
        short = (ids < 0).any(1)
        if short.any():  # the searched cells hold fewer than n rows
            self._faiss.nprobe = cells
            products[short], ids[short] = self._faiss.search(np.ascontiguousarray(vectors[short]), n)
        index = torch.searchsorted(self._row_keys, torch.from_numpy(ids))
        return torch.from_numpy(products).to(queries), index.to(queries.device)


def _inverted_file(prior_keys: Tensor) -> Any:
    """An empty inverted file for inner products, with cells learned from a sample of the keys."""
    try:
        import faiss
    except ImportError:
        raise BankError(
            f"a search among the priors of {len(prior_keys)} rows needs FAISS: pip install 'mac-rag[faiss]'"
        ) from None
    cells = max(1, round(math.sqrt(len(prior_keys))))
    width = prior_keys.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
    sample = torch.linspace(0, len(prior_keys) - 1, min(len(prior_keys), 64 * cells)).long()
    index.train(_array(prior_keys[sample.to(prior_keys.device)]))
    return index


def _array(vectors: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Vectors as FAISS takes them: float32, contiguous, on the CPU."""
    array: np.ndarray[Any, np.dtype[np.float32]] = vectors.detach().to("cpu", torch.float32).contiguous().numpy()
    return array

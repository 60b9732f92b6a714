"""The rows with the highest document prior for each question, so that a question's cost need not grow with the bank.

Up to a stated number of rows the prior of all is computed; beyond it FAISS looks only where high ones can be expected.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mac_rag.errors import BankError

if TYPE_CHECKING:
    import numpy as np


class PriorIndex:
    """Finds the N rows with the highest prior `s(x, d) = scale * query key`.

    Args:
        exact_rows: up to so many rows the product with all keys is computed, `[B, K]` scores at once. Beyond, an
            inverted file of FAISS holds them: about sqrt(K) cells, of which the `probed` share nearest to a question
            is searched.
        probed: the share of cells that is searched; 1 finds what the exact product finds.
    """

    def __init__(self, *, exact_rows: int = 200_000, probed: float = 0.25) -> None:
        self.exact_rows = exact_rows
        self.probed = probed
        self._row_keys = torch.empty(0, dtype=torch.int64)
        self._prior_keys = torch.empty(0, 0)
        self._faiss: Any = None
        self._learned_rows = 0  # that the cells were made for

    def __len__(self) -> int:
        return len(self._row_keys)

    def refresh(self, row_keys: Tensor, prior_keys: Tensor) -> None:
        """Follows a bank: from now on these are the rows.

        The FAISS index takes in only the rows that are new and forgets those that are gone; its cells are made anew
        when the bank has grown to four times what they were made for.

        Args:
            row_keys: `[K]`, what each row is known by, ascending (`ProjectedBank.row_keys`).
            prior_keys: `[K, d_prior]` (`ProjectedBank.prior_keys`). They are not copied.

        Raises:
            BankError: when there are more than `exact_rows` and FAISS is not installed.
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
            gone = self._row_keys[~torch.isin(self._row_keys, row_keys, assume_unique=True)]
            new = ~torch.isin(row_keys, self._row_keys, assume_unique=True)
            if len(gone):
                self._faiss.remove_ids(gone.numpy())
            self._add(row_keys[new], prior_keys[new.to(prior_keys.device)])
        self._row_keys, self._prior_keys = row_keys, prior_keys

    def _add(self, row_keys: Tensor, prior_keys: Tensor) -> None:
        if len(row_keys):
            self._faiss.add_with_ids(_array(prior_keys), row_keys.numpy())

    def search(self, queries: Tensor, scale: float | Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The rows with the highest prior.

        Args:
            queries: `[B, d_prior]` (`DocumentPrior.queries`).
            scale: of the product (`exp(tau)` of the prior).
            n: how many rows; all if there are fewer.

        Returns:
            Row numbers `[B, N]`, ascending for each question; and the share `[B]` of the prior's softmax over all rows
            that lies on the others. It is exact for the exact product. With FAISS it is an upper bound, for it counts
            every other row as if it were as good as the worst that was found; it holds as far as FAISS found the best
            rows, which it does for certain only with `probed=1`.
        """
        rows = len(self)
        n = min(n, rows)
        scale = torch.as_tensor(scale, dtype=queries.dtype, device=queries.device)
        if self._faiss is None:
            scores = scale * (queries @ self._prior_keys.T)  # [B, K]
            found, index = scores.topk(n, dim=-1)
            log_all = scores.logsumexp(-1)
        else:
            products, index = self._search_faiss(queries, n)
            found = scale * products
            log_rest = found[:, -1] + (math.log(rows - n) if rows > n else -math.inf)
            log_all = torch.logaddexp(found.logsumexp(-1), log_rest)
        discarded = -torch.expm1(found.logsumexp(-1) - log_all)
        return index.sort(-1).values, discarded.clamp(0, 1)

    def _search_faiss(self, queries: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The best products `[B, N]`, falling, and the row numbers."""
        import numpy as np

        asked = _array(queries)
        cells = self._faiss.nlist
        self._faiss.nprobe = max(1, round(self.probed * cells))
        products, ids = self._faiss.search(asked, n)
        short = (ids < 0).any(1)
        if short.any():  # fewer rows than n in the cells that were searched
            self._faiss.nprobe = cells
            products[short], ids[short] = self._faiss.search(np.ascontiguousarray(asked[short]), n)
        index = torch.searchsorted(self._row_keys, torch.from_numpy(ids))
        return torch.from_numpy(products).to(queries), index.to(queries.device)


def _inverted_file(prior_keys: Tensor) -> Any:
    """An empty inverted file by inner product, its cells learned from a sample of the keys."""
    try:
        import faiss
    except ImportError:
        raise BankError(
            f"a search among the priors of {len(prior_keys)} rows needs FAISS: pip install 'mac-rag[faiss]', or allow "
            "the exact product of so many (exact_rows)"
        ) from None
    cells = max(1, round(math.sqrt(len(prior_keys))))
    width = prior_keys.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
    sample = torch.linspace(0, len(prior_keys) - 1, min(len(prior_keys), 64 * cells)).long()
    index.train(_array(prior_keys[sample.to(prior_keys.device)]))
    return index


def _array(vectors: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As FAISS reads them."""
    array: np.ndarray[Any, np.dtype[np.float32]] = vectors.detach().to("cpu", torch.float32).contiguous().numpy()
    return array

"""Messages to shards, and their answers.

Tensors cross the network as numpy arrays, which Ray sends without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mac_rag.bank.entries import Entry

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
# A state of a shard: the name of the opening of its folder, and the bank's version since.
Version: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class ShardContents:
    """Everything about a shard's documents except their memory tokens.

    Attributes:
        version: the shard's state.
        records: the entries, in the order of their rows.
        row_shape: (T, D) of a row; None for an empty shard.
    """

    version: Version
    records: tuple[Entry, ...]
    row_shape: tuple[int, int] | None


@dataclass(frozen=True)
class ShardChange:
    """The effect of a change on a shard, and the return value of the bank's method.

    Attributes:
        added: entries that were added, in the order of their rows.
        removed: ids of the documents that were removed; some may be in `added` again.
    """

    version: Version
    added: tuple[Entry, ...] = ()
    removed: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardQuestion:
    """Data of B questions that a shard gets once, before their first block.

    Attributes:
        version: the state of the shard that they read.
        prior_queries: `[B, d_prior]`; None without a document prior.
        use_prior, use_recency: False leaves the document prior, or its recency term, out.
        asked: `[B]`, see `mac_rag.nn.prior.RecencyTerm.penalties`; None without the term.
        visible: which of the shard's rows the questions may see, as packed bits; None for all.
    """

    name: str
    version: Version
    prior_queries: Array | None
    use_prior: bool
    use_recency: bool
    asked: Array | None
    visible: Array | None
    cache_bytes: int


def to_array(tensor: Tensor) -> Array:
    """Converts a tensor for sending. numpy has no bfloat16, so half precision travels as float32."""
    exact = tensor if tensor.dtype == torch.float64 or not tensor.is_floating_point() else tensor.float()
    array: Array = exact.detach().cpu().contiguous().numpy()
    return array


def to_tensor(array: Array, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a received array, which is read-only, to a tensor."""
    return torch.tensor(array, device=device, dtype=dtype)

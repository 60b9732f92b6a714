"""phi* of a bank too large to be attended to as a whole, against direct attention to some of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mac_rag.memory.views.projection import ProjectedBank
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.bank_view import BankProjection
from mac_rag.nn.memory_tokens import MemoryTokens

if TYPE_CHECKING:
    from mac_rag.memory import MemoryBank
    from mac_rag.model import MACModel

# Rows that are attended to: those of the highest prior, and as many others at random.
_HIGHEST = 512


@torch.no_grad()
def sampled_difference(model: MACModel, bank: MemoryBank, asked: Sequence[str], seed: int) -> float:
    """The largest difference of phi*, relative to its norm, from direct attention to the rows of the highest prior.

    The prior of each row is a plain product with the keys that the bank keeps, and all chosen rows are read, projected
    and attended to without bounds. Rows beyond them would have to outweigh hundreds of better ones together.

    Args:
        model: a model with a document prior.
        bank: a bank that keeps what the prior needs to know of its rows.
        asked: questions.
        seed: random seed of the other rows.
    """
    network, differences = model.aggregation, []
    prior, generator = network.prior, torch.Generator().manual_seed(seed)
    assert prior is not None
    view = ProjectedBank(network, bank, device="cpu")
    keys = view.compact_prior_keys
    assert keys is not None
    for text in asked:
        question = model.input_encoder([model.input_encoder.ids(text)])
        scores = _prior_of_kept_keys(bank, prior.queries(question)[0], prior.key.out_features)
        highest = scores.topk(min(_HIGHEST, len(scores))).indices
        others = torch.randint(len(scores), (_HIGHEST,), generator=generator)
        index = torch.cat([highest, others]).unique()
        rows = network.project(MemoryTokens.split(bank.take(index), network.lexical_vectors))
        chosen = BankProjection(rows.keys, rows.values, keys.take(index))
        expected: Tensor = network(question, chosen, attention=direct_attention)[0]
        found: Tensor = network(question, view)[0]
        differences.append(float((found - expected).norm() / expected.norm()))
    return max(differences)


def _prior_of_kept_keys(bank: MemoryBank, query: Tensor, width: int) -> Tensor:
    """The product of a query `[d_prior]` with the keys of all rows, `[N]`."""
    parts = []
    for _, rows in bank.overview():
        products = rows.summaries[:, :width] @ query[:width]
        if "places" in rows.columns:
            words = query[width:][rows.columns["places"].long()]
            products = products + (rows.columns["weights"].float() * words).sum(1)
        parts.append(products)
    return torch.cat(parts)

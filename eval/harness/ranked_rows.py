"""The rows of a bank in the order in which the memory would read them for each question."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mac_rag.engine import MACEngine
from mac_rag.model import MACModel
from mac_rag.model.mac import BATCH_TOKENS
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.progress import progress_bar

_QUESTIONS = 32  # that are scored at a time


class RankedRows:
    """The rows of a bank, ranked for each question by the document prior, or without one by attention.

    Args:
        engine: an engine whose bank has merged no documents.
        questions: B texts.
        progress: shows a progress bar.

    Attributes:
        owners: id of the document of each of K rows.
        scores: `[B, K]`.
    """

    def __init__(self, engine: MACEngine, questions: Sequence[str], *, progress: bool = False) -> None:
        self._engine = engine
        self._rows = [(entry.members[0].document_id, row) for entry in engine.bank for row in range(entry.rows)]
        self.owners = [document_id for document_id, _ in self._rows]
        phi = engine.bank.phi.to(engine.model.device, torch.float32)
        parts = []
        with progress_bar("rank", len(questions), disable=not progress) as bar:
            for first in range(0, len(questions), _QUESTIONS):
                batch = questions[first : first + _QUESTIONS]
                parts.append(_scores(engine.model, batch, phi).cpu())
                bar.advance(len(batch))
        self.scores = torch.cat(parts)

    def best(self, count: int) -> list[list[int]]:
        """For each question its `count` best rows, best first; all rows where there are fewer."""
        rows: list[list[int]] = self.scores.topk(min(count, len(self.owners)), dim=1).indices.tolist()
        return rows

    def best_of(self, document_ids: Sequence[str]) -> list[list[int]]:
        """For each question the best row of one document."""
        rows: dict[str, list[int]] = {}
        for row, owner in enumerate(self.owners):
            rows.setdefault(owner, []).append(row)
        return [
            [max(rows[document_id], key=lambda row: float(scores[row]))]
            for document_id, scores in zip(document_ids, self.scores, strict=True)
        ]

    def tokens(self, rows: Sequence[int]) -> Tensor:
        """The memory tokens of rows side by side, `[rows * T, D]`, on the model's device."""
        model = self._engine.model
        parts = []
        for row in rows:
            document_id, place = self._rows[row]
            parts.append(self._engine.bank[document_id].phi[place, : model.config.tokens])
        return torch.cat(parts).to(model.device, torch.float32)


@torch.no_grad()
def _scores(model: MACModel, questions: Sequence[str], phi: Tensor) -> Tensor:
    """`[B, K]`: the document prior's scores of all rows, or the attention mass for a model without one."""
    prior = model.aggregation.prior
    if prior is None:
        return model.attention(questions, phi)
    encoder = model.input_encoder
    encoded = encoder.encode([encoder.ids(question) for question in questions], BATCH_TOKENS)
    keys = prior.keys(MemoryTokens.split(phi, model.config.lexical_vectors))
    return prior.score(prior.queries(encoded), keys)

"""The sentence encoder's vectors of all rows of a bank, and their cosines with questions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.bank.bank import Contents
from mac_rag.bank.directory import followed
from mac_rag.retrieval.dense import Encoder, check_finite

_QUESTIONS = 256  # questions whose vectors are kept


class SentenceKeys:
    """The part of the document prior that also finds rows that share no word with a question.

    Args:
        encoder: the encoder that made the summaries of the bank's rows: of each half of a row one vector.
        bank: the bank, or a snapshot of it.
    """

    def __init__(self, encoder: Encoder, bank: Contents) -> None:
        self.encoder = encoder
        self._questions: OrderedDict[str, Tensor] = OrderedDict()
        self._row_keys = torch.empty(0, dtype=torch.int64)
        self._vectors = torch.empty(0, 2, encoder.width)  # [N, 2, P], of length 1: two halves of each row
        self.follow(bank)

    def follow(self, bank: Contents) -> None:
        """Reads another state of the bank. Rows come in the order in which they were added, new ones last."""
        self._bank = bank
        if bank.row_keys is self._row_keys:
            return
        first, remains = followed(self._row_keys, bank.row_keys)
        new = [functional.normalize(part.summaries.unflatten(1, (2, -1)), dim=-1) for part in bank.overview(first)]
        self._vectors = torch.cat([self._vectors[remains], *new])
        self._row_keys = bank.row_keys

    def nearest(self, questions: Sequence[str], count: int, allowed: Container[str] | None) -> list[list[int]]:
        """The keys of the rows with the highest cosines, for each question.

        Args:
            questions: texts.
            count: number of rows for each question, or all if there are fewer.
            allowed: ids of the documents that may be found; None for all.
        """
        rows = torch.arange(len(self._row_keys))
        if allowed is not None:
            rows = self._bank.visible_rows(allowed).nonzero()[:, 0]
        vectors = self._vectors if allowed is None else self._vectors[rows]
        cosines = (self._encoded(questions) @ vectors.flatten(0, 1).T).unflatten(1, (-1, 2)).amax(2)
        best = cosines.topk(min(count, len(rows))).indices
        found: list[list[int]] = self._row_keys[rows[best]].tolist()
        return found

    def cosines(self, question: str, row_keys: Sequence[int]) -> list[float]:
        """The cosine of a question with the nearer half of each of some rows, by their keys."""
        places = torch.searchsorted(self._row_keys, torch.tensor(row_keys, dtype=torch.int64))
        cosines = self._vectors[places].double() @ self._encoded([question])[0].double()
        nearer: list[float] = cosines.amax(1).tolist()
        return nearer

    def _encoded(self, questions: Sequence[str]) -> Tensor:
        """Vectors of questions, `[B, P]`, of length 1."""
        missing = [text for text in dict.fromkeys(questions) if text not in self._questions]
        if missing:
            vectors = self.encoder.questions(missing)
            check_finite(vectors, [f"question {text!r}" for text in missing])
            self._questions |= zip(missing, functional.normalize(torch.from_numpy(vectors)), strict=True)
        found = torch.stack([self._questions[text] for text in questions])
        for text in questions:
            self._questions.move_to_end(text)
        while len(self._questions) > _QUESTIONS:
            self._questions.popitem(last=False)
        return found

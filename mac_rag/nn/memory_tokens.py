"""The encoders' output for texts: memory tokens, and lexical vectors for the document prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryTokens:
    """Memory tokens of K texts, and their lexical vectors if hashed BM25 makes them.

    Networks attend to the tokens only; the document prior alone reads lexical vectors. A bank stores both together in
    rows `[K, T + R, D]`: `stacked` makes these, `split` reads them.

    Attributes:
        tokens: `[K, T, D]`.
        lexical: `[K, R, D]`; None for R = 0.
    """

    tokens: Tensor
    lexical: Tensor | None = None

    @classmethod
    def split(cls, stacked: Tensor, lexical_vectors: int) -> MemoryTokens:
        """Reads a bank's rows.

        Args:
            stacked: `[K, T + R, D]`.
            lexical_vectors: R.
        """
        if not lexical_vectors:
            return cls(stacked)
        tokens = stacked.shape[1] - lexical_vectors
        return cls(stacked[:, :tokens], stacked[:, tokens:])

    def stacked(self) -> Tensor:
        """`[K, T + R, D]`, the form in which a bank stores rows."""
        return self.tokens if self.lexical is None else torch.cat([self.tokens, self.lexical], 1)

    @classmethod
    def cat(cls, parts: Sequence[MemoryTokens]) -> MemoryTokens:
        """The texts of several parts, in order."""
        lexical = [part.lexical for part in parts if part.lexical is not None]
        return cls(torch.cat([part.tokens for part in parts]), torch.cat(lexical) if lexical else None)

    def __len__(self) -> int:
        """K."""
        return len(self.tokens)

    def __getitem__(self, texts: Any) -> MemoryTokens:
        """A subset of the texts: by a slice, a list of indices or an index tensor."""
        return MemoryTokens(self.tokens[texts], None if self.lexical is None else self.lexical[texts])

    def to(self, *args: Any) -> MemoryTokens:
        """A copy on another device or in another dtype, as `Tensor.to`."""
        return MemoryTokens(self.tokens.to(*args), None if self.lexical is None else self.lexical.to(*args))

    def new_empty(self, count: int) -> MemoryTokens:
        """Uninitialised space for `count` texts of the same shape, to be filled by `put`."""
        lexical = None if self.lexical is None else self.lexical.new_empty(count, *self.lexical.shape[1:])
        return MemoryTokens(self.tokens.new_empty(count, *self.tokens.shape[1:]), lexical)

    def put(self, texts: Any, values: MemoryTokens) -> None:
        """Overwrites some of the texts in place; `texts` as for indexing."""
        self.tokens[texts] = values.tokens
        if self.lexical is not None and values.lexical is not None:
            self.lexical[texts] = values.lexical

    def detach(self) -> MemoryTokens:
        return MemoryTokens(self.tokens.detach(), None if self.lexical is None else self.lexical.detach())

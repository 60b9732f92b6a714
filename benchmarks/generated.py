"""Banks of any size that take no memory and whose aggregation has a known result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.memory.bank import MemoryBank
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import Chunk, direct_attention
from mac_rag.nn.memory_tokens import MemoryTokens

# With six, prior keys of a mixture are as near to their nearest neighbour as those of a real paragraph (cosine 0.26).
_SOURCES = 6


def mixed_documents(
    originals: Sequence[Document], real: Tensor, lexical: int, first: int, count: int, group: int, seed: int
) -> Iterator[tuple[list[Document], Tensor]]:
    """Documents with memory tokens, in groups: the originals, then mixtures of them.

    A mixture takes each memory token, and each number of its lexical vectors, from one of six originals. Noise is
    added to the tokens, with the standard deviation that they have in their place. So a mixture is as far from all
    other documents as a real one is from its neighbours: plain copies with a little noise would all compete.

    Args:
        originals: documents.
        real: `[n, T + R, D]`, memory tokens and lexical vectors of these documents, one row each.
        lexical: R.
        first: number of the first document.
        count: number of the last document, plus one.
        group: documents of a group.
        seed: random seed; a group depends on the number of its first document, and not on the groups before.
    """
    tokens, words = real[:, : real.shape[1] - lexical], real[:, real.shape[1] - lexical :].flatten(1)
    spread = tokens.std((0, 2))[:, None]
    for begin in range(first, count, group):
        stop = min(begin + group, count)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + begin)
        kept = real[begin:stop]
        size = stop - max(begin, len(real))
        if size > 0:
            sources = torch.randint(len(real), (size, _SOURCES), generator=generator)
            picks = torch.randint(_SOURCES, (size, tokens.shape[1]), generator=generator)
            mixed = tokens[sources.gather(1, picks), torch.arange(tokens.shape[1])]
            mixed += torch.randn(mixed.shape, generator=generator) * spread
            picks = torch.randint(_SOURCES, (size, words.shape[1]), generator=generator)
            chosen = words[sources.gather(1, picks), torch.arange(words.shape[1])]
            mixed = torch.cat([mixed, chosen.view(size, lexical, real.shape[2])], 1)
            kept = torch.cat([kept, mixed])
        yield [Document(f"{number}", originals[number % len(originals)].text) for number in range(begin, stop)], kept


class GeneratedBank(MemoryBank):
    """A bank that repeats a few random rows.

    Softmax attention to n copies of a row equals attention to one row with log n added to its logits. So `answer`
    computes the aggregation of the whole bank from the distinct rows.

    Args:
        rows: number K of rows.
        shape: T and D of a row.
        period: number of distinct rows.
    """

    def __init__(self, rows: int, shape: tuple[int, int], *, period: int) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens, width = shape
        super().__init__("generated")
        self._count = rows
        self._shape = shape
        period = min(period, rows)
        self._distinct = torch.randn(period, tokens, width, generator=generator)
        self._keys = torch.arange(rows)

    @property
    def row_keys(self) -> Tensor:
        return self._keys

    @property
    def row_shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def phi(self) -> Tensor:
        return self.read(0, self._count)

    def read(self, start: int, stop: int) -> Tensor:
        return self.take(self._keys[start:stop])

    def take(self, index: Tensor) -> Tensor:
        return self._distinct[index % len(self._distinct)]

    @torch.no_grad()
    def answer(self, network: AggregationNetwork, question: MemoryTokens) -> Tensor:
        """phi* `[B, T, D]` by direct attention to the distinct rows, each weighted by the count of its copies."""
        distinct = len(self._distinct)
        counts = self._count // distinct + (torch.arange(distinct) < self._count % distinct).long()
        rows = network.project(MemoryTokens(self._distinct.to(question.tokens.device)))
        log_counts = counts.to(question.tokens).log()

        def weighted(
            query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
        ) -> tuple[Tensor, Tensor | None]:
            [chunk] = chunks
            bias = log_counts.expand(*query.shape[:2], -1)
            return direct_attention(query, [replace(chunk, bias=bias)], floor=floor, mass=mass)

        phi: Tensor = network(question, rows, attention=weighted)[0]
        return phi

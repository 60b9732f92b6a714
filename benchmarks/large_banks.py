"""Banks for benchmarks: large ones without encoding, and a view of a bank without the bounds of its prior."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mac_rag.bank.projection import ProjectedBank
from mac_rag.data.types import Document
from mac_rag.nn.bank_view import BankView
from mac_rag.nn.prior import PriorKeys

# With six, prior keys of a mixture are as near to their nearest neighbour as those of a real paragraph (cosine 0.26).
_SOURCES = 6


def mixed_documents(
    originals: Sequence[Document], real: Tensor, lexical: int, first: int, count: int, group: int, seed: int
) -> Iterator[tuple[list[Document], Tensor]]:
    """Documents with memory tokens, in groups: the originals, then mixtures of them.

    A mixture takes each memory token, and each number of its lexical vectors, from one of six originals. Noise is added
    to each token, with the standard deviation of the tokens at its position. So a mixture is as far from all other
    documents as a real one is from its neighbours. Plain copies with a little noise would all compete.

    Args:
        real: `[n, T + R, D]`, memory tokens and lexical vectors of the originals, one row each.
        lexical: R.
        first, count: numbers of the first document, and of the last one plus one.
        group: documents of a group.
        seed: random seed. A group depends on the number of its first document, and not on the groups before it.
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


@dataclass(frozen=True)
class UnboundedBank:
    """A view that reads all rows: it lacks the bounds that tell, before a row is read, that it cannot matter."""

    view: ProjectedBank

    @property
    def documents(self) -> int:
        return self.view.documents

    @property
    def prior_keys(self) -> PriorKeys | None:
        return self.view.prior_keys

    @property
    def dates(self) -> Tensor | None:
        return self.view.dates

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self.view.chunks(block)

    def select(self, index: Tensor) -> BankView:
        return self.view.select(index)

"""Large banks of product codes, filled without encoding: rows of a bank, and mixtures of their codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.memory.bank import MemoryBank
from mac_rag.memory.entries import new_entries
from mac_rag.memory.rows import Rows
from mac_rag.memory.views.overview import keep_rows_for
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import longest_keys
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.progress import progress_bar

# As in `benchmarks.generated`: six sources of a mixture, so that prior keys are as far apart as those of paragraphs.
_SOURCES = 6
# Rows that are mixed; more would take longer to project, and a token of each comes in hundreds of mixtures in any case.
_MIXED = 4096
# Documents of a commit. Their segment is so large that no later one is merged with it.
_GROUP = 16384


class CodesBank(MemoryBank):
    """A bank that takes rows as they are kept."""

    def put_rows(self, documents: Sequence[Document], rows: Rows) -> None:
        """Adds documents of one row each."""
        self._append(rows, new_entries(documents, None, len(rows), keep_texts=False))


class _Mixtures:
    """Rows of product codes, and mixtures of them.

    A mixture takes the codes of each memory token, and each number of its lexical vectors, from one of six rows. Its
    first token, which the document prior compares, gets noise with the standard deviation that such tokens have. Norms
    and prior keys are what the mixture's own tokens have, as in any bank.

    Args:
        bank: a bank with rows pq, one row for each document.
        network: the network that reads it; it has a document prior that compares the first token.
    """

    def __init__(self, bank: MemoryBank, network: AggregationNetwork) -> None:
        self._network, self._layout = network, bank.layout
        rows = bank._consecutive(0, min(_MIXED, len(bank.row_keys)))
        self._codes = rows.columns["product_codes"]
        phi = bank.read(0, len(rows))
        tokens = phi.shape[1] - network.lexical_vectors
        self._first, self._words = rows.columns["phi"][:, 0].float(), phi[:, tokens:].flatten(1)
        self._longest = torch.cat([self._norms(part) for part in phi[:, 1:tokens].split(256)])  # [n, T - 1, norms]

    @torch.no_grad()
    def _norms(self, tokens: Tensor) -> Tensor:
        """Norms of the keys of tokens `[n, T, D]`, `[n, T, blocks H]`."""
        bank = self._network.bank_norm(tokens)
        blocks = (block for block in self._network.blocks if isinstance(block, CrossAttentionBlock))
        return torch.cat(
            [longest_keys(block.project_keys(bank)[..., None, :]).permute(1, 2, 0) for block in blocks], -1
        )

    @torch.no_grad()
    def rows(self, count: int, generator: torch.Generator) -> Rows:
        """So many mixtures."""
        originals, tokens, code_bytes = self._codes.shape
        sources = torch.randint(originals, (count, _SOURCES), generator=generator)
        chosen = sources.gather(1, torch.randint(_SOURCES, (count, tokens), generator=generator))
        place = torch.arange(tokens)
        first = self._first[sources[:, 0]]
        first = (first + torch.randn(first.shape, generator=generator) * self._first.std()).bfloat16()
        own = first.float()[:, None]
        longest = torch.maximum(self._longest[chosen, place].amax(1), self._norms(own)[:, 0])
        prior = self._network.prior
        assert prior is not None
        summaries = torch.cat([prior.summary_keys(MemoryTokens(own, None)), longest], 1)
        chosen_words = sources.gather(1, torch.randint(_SOURCES, (count, self._words.shape[1]), generator=generator))
        words = self._words.gather(0, chosen_words)
        lexical = self._layout._sparse(words) if self._layout.lexical_vectors else {}
        codes = {"product_codes": self._codes[chosen, place].view(count, tokens, code_bytes), "phi": first[:, None]}
        return self._layout.summarised(Rows(codes | lexical), summaries)


def fill_with_codes(place: Path, originals: MemoryBank, network: AggregationNetwork, count: int, seed: int) -> None:
    """Makes a bank of `count` documents: those of another bank, then mixtures; goes on with one that was begun.

    Args:
        place: folder of the bank.
        originals: a bank with rows pq.
        network: the network that reads it.
        count: documents of the new bank.
        seed: random seed; a group depends on the number of its first document, and not on the groups before.
    """
    if not MemoryBank.exists(place):
        with MemoryBank.create(place, originals.fingerprint, rows="pq") as new:
            keep_rows_for(new, network)
            new.commit()
    with CodesBank.open(place, write=True) as bank, progress_bar("fill", count, done=len(bank)) as bar:
        assert isinstance(bank, CodesBank)
        keep_rows_for(bank, network)
        real = len(originals.row_keys)
        mixtures = _Mixtures(originals, network)
        for begin in range(len(bank), count, _GROUP):
            stop = min(begin + _GROUP, count)
            kept = originals._consecutive(min(begin, real), min(stop, real))
            generator = torch.Generator().manual_seed(seed * 1_000_003 + begin)
            mixed = mixtures.rows(stop - begin - len(kept), generator)
            bank.put_rows([Document(f"{number}", "") for number in range(begin, stop)], Rows.cat([kept, mixed]))
            bank.commit()
            bar.advance(stop - begin)

"""The document prior, a learned score of a document for a question; and its keys of a whole bank, in little memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.nn.memory_tokens import MemoryTokens


class DocumentPrior(nn.Module):
    """A learned score of a document for a question, `s(x, d) = exp(tau) cos(W_q mean(x), W_k mean(phi_d))`.

    With a sentence encoder (`mac_rag.config.SentenceEncoderConfig`), its token takes the place of the mean. Where texts
    have lexical vectors, their product is added to the cosine, `cos(...) + w u(x) v(d)`, where v(d) are the document's
    vectors and u(x) the question's (`AmortizationNetwork.lexical`). Both together are one product of longer vectors.

    The prior is added to the attention logits of all tokens of the document. It keeps attention sharp over thousands of
    documents, where a plain softmax spreads over them. It is a function of one document and one question, so
    aggregation stays invariant to the order of the documents. Not part of the paper.

    Args:
        width: D, the width of question and memory tokens.
        prior_width: width of the space in which they are compared.
        sentence_token: True if the first token is the sentence encoder's.
        lexical_weight: w.
    """

    def __init__(self, width: int, prior_width: int, sentence_token: bool, lexical_weight: float = 1.0) -> None:
        super().__init__()
        self.sentence_token = sentence_token
        self.lexical_weight = lexical_weight
        self.query = nn.Linear(width, prior_width, bias=False)
        self.key = nn.Linear(width, prior_width, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        with torch.no_grad():
            self.key.weight.copy_(self.query.weight)  # what is alike from the start scores high from the start

    def summary(self, texts: MemoryTokens) -> Tensor:
        """The vector by which texts are compared, `[K, D]`."""
        return texts.tokens[:, 0] if self.sentence_token else texts.tokens.mean(1)

    def keys(self, phi: MemoryTokens) -> Tensor:
        """The prior's keys of K documents, `[K, d_prior]`; d_prior is the prior's width P plus R D."""
        keys = self.summary_keys(phi)
        return keys if phi.lexical is None else torch.cat([keys, phi.lexical.flatten(1)], -1)

    def summary_keys(self, phi: MemoryTokens) -> Tensor:
        """The part of the keys that compares summaries, `[K, P]`."""
        return functional.normalize(self.key(self.summary(phi)), dim=-1)

    def queries(self, question: MemoryTokens, lexical_weight: float | Tensor | None = None) -> Tensor:
        """The prior's queries of B questions, `[B, d_prior]`.

        Args:
            question: question tokens.
            lexical_weight: w in place of the prior's own, as a scalar; None for that.
        """
        weight = self.lexical_weight if lexical_weight is None else lexical_weight
        queries = functional.normalize(self.query(self.summary(question)), dim=-1)
        if question.lexical is None:
            return queries
        return torch.cat([queries, weight * question.lexical.flatten(1)], -1)

    def score(self, queries: Tensor, keys: Tensor | PriorKeys) -> Tensor:
        """Scores `[B, K]`.

        Args:
            queries: `[B, d_prior]`.
            keys: `[K, d_prior]`, or `[G, K, d_prior]` where each run of B / G questions has documents of its own.
        """
        if isinstance(keys, PriorKeys):
            products = keys.products(queries)
        elif keys.ndim == 3:
            products = (queries.unflatten(0, (len(keys), -1)) @ keys.mT).flatten(0, 1)
        else:
            products = queries @ keys.T
        scores: Tensor = self.log_scale.exp() * products
        return scores


class PriorKeys:
    """Keys of K documents: `[dense, lexical]`, each of width P + L.

    Examples:
        >>> keys = PriorKeys.of(torch.ones(1, 2), torch.tensor([[0.0, 3.0, 0.0]]))
        >>> keys.products(torch.tensor([[1.0, 1.0, 5.0, 1.0, 7.0]]))
        tensor([[5.]])
        >>> keys.take(torch.tensor([0]))
        tensor([[1., 1., 0., 3., 0.]])

    Args:
        dense: `[K, P]`.
        counts: `[K]`, int32, how many numbers of each document's lexical part are not zero.
        places: `[sum of counts]`, int32, where they stand in it; document after document.
        weights: `[sum of counts]`, the numbers, in float32 at least.
        width: L; 0 without lexical parts.
    """

    def __init__(self, dense: Tensor, counts: Tensor, places: Tensor, weights: Tensor, width: int) -> None:
        self.dense = dense
        self.counts = counts
        self.places = places
        self.weights = weights
        self.width = width

    @classmethod
    def of(cls, dense: Tensor, lexical: Tensor | None) -> PriorKeys:
        """Keys whose lexical parts are given with their zeros, `[K, L]`; None without them."""
        if lexical is None:
            lexical = dense.new_empty(len(dense), 0)
        filled = lexical != 0
        weights = lexical[filled].to(torch.promote_types(lexical.dtype, torch.float32))
        return cls(dense, filled.sum(1, dtype=torch.int32), filled.nonzero()[:, 1].int(), weights, lexical.shape[1])

    @classmethod
    def cat(cls, parts: Sequence[PriorKeys]) -> PriorKeys:
        """The keys of several parts, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.dense for part in parts]),
            torch.cat([part.counts for part in parts]),
            torch.cat([part.places for part in parts]),
            torch.cat([part.weights for part in parts]),
            parts[0].width,
        )

    def __len__(self) -> int:
        """K."""
        return len(self.dense)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in (self.dense, self.counts, self.places, self.weights))

    def kept(self, mask: Tensor) -> PriorKeys:
        """The keys of the documents where `mask` `[K]` is True; the same object if these are all."""
        if mask.all():
            return self
        entries = mask.repeat_interleave(self.counts)
        return PriorKeys(self.dense[mask], self.counts[mask], self.places[entries], self.weights[entries], self.width)

    def products(self, queries: Tensor) -> Tensor:
        """The product of every query with every key, `[B, K]`.

        Args:
            queries: `[B, P + L]`.
        """
        # With one column, with the keys on the right, or with columns that are not one behind the other, a product of
        # matrices goes to kernels that are several times slower.
        columns = queries[:, : self.dense.shape[1]].expand(max(2, len(queries)), -1).contiguous().T
        products = (self.dense @ columns)[:, : len(queries)].T
        if not self.width or not len(self.weights):
            return products
        lexical = queries[:, self.dense.shape[1] :].to(self.weights.dtype)
        if self.weights.device.type != "cpu":
            return products + (self._matrix @ lexical.T).T.to(products.dtype)
        return products + torch.stack([self._lexical_products(query) for query in lexical]).to(products.dtype)

    def _lexical_products(self, query: Tensor) -> Tensor:
        """The products with the lexical part `[L]` of one query, `[K]`: only those of the places that it has."""
        ends, documents, weights = self._postings
        products = weights.new_zeros(len(self))
        for place in query.nonzero()[:, 0].tolist():
            here = slice(int(ends[place]), int(ends[place + 1]))
            products.index_add_(0, documents[here], query[place] * weights[here])
        return products

    @cached_property
    def _postings(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each place of the lexical parts, the documents that have it, and their numbers there.

        Returns:
            Where each place begins among the others `[L + 1]`; documents, int32, and numbers, place after place.
        """
        small = self.places.numpy().astype(np.uint16 if self.width <= 1 << 16 else np.uint32)
        order = torch.from_numpy(np.argsort(small, kind="stable"))  # of 16 bits, a radix sort
        documents = torch.arange(len(self), dtype=torch.int32).repeat_interleave(self.counts)
        ends = torch.nn.functional.pad(torch.bincount(self.places, minlength=self.width).cumsum(0), (1, 0))
        return ends, documents[order], self.weights[order]

    def take(self, index: Tensor) -> Tensor:
        """The keys of some documents with all their zeros, `[n, P + L]`."""
        starts = self.counts.cumsum(0) - self.counts  # in int64
        counts = self.counts[index]
        row = torch.arange(len(index), device=index.device).repeat_interleave(counts)
        within = torch.arange(len(row), device=index.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        entries = starts[index].repeat_interleave(counts) + within
        lexical = self.dense.new_zeros(len(index), self.width)
        lexical[row, self.places[entries].long()] = self.weights[entries].to(lexical.dtype)
        return torch.cat([self.dense[index], lexical], 1)

    @cached_property
    def _matrix(self) -> Tensor:
        """The lexical parts `[K, L]` as a sparse matrix."""
        starts = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).to(torch.int32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            shape = len(self), self.width
            return torch.sparse_csr_tensor(starts, self.places, self.weights, shape, check_invariants=False)

"""The document prior, a learned score of a document for a question; and its keys of a whole bank, in little memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

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


# The recency term of the document prior: of documents on the same subject, the newest that a question can mean counts.
#
# The prior compares texts, and two versions of one text are equally near to a question about them. So the term takes
# from a document's score for each newer one on the same subject:
#
#     r(x, d) = -softplus(a) sum_d' [d' is newer than d] same(x, d, d')     same(x, d, d') = sigmoid(alpha e^tau
# (cos(k_d, k_d') - 1) + gamma (s(x, d') - s(x, d)) + beta)
#
# where k are the prior's keys of the documents, s the scores of the prior, and the sum goes over the documents that the
# prior ranks first. a, alpha, beta and gamma are learned. The term is never positive: it can only take from a score.
#
# A question may name a time. Then a document from after it is newer than no other. It takes nothing from the documents
# that the question can mean, and neither do two such documents from each other, because the question asks for none of
# them. A question that names no time asks for the newest.
#
# Not part of the paper.


# Documents of each question among which the newest is looked for. Those behind them weigh next to nothing in any case.
CANDIDATES = 64
_BEFORE_ALL = torch.iinfo(torch.int64).min


class Candidates(NamedTuple):
    """The documents that the prior ranks first for each of B questions.

    Attributes:
        scores: `[B, n]`, the prior's scores, descending; `-inf` for a document that a question may not see.
        keys: `[B, n, P]`, the part of their prior keys that compares summaries, of length 1.
        dates: `[B, n]`, int64, in microseconds since 1970.
    """

    scores: Tensor
    keys: Tensor
    dates: Tensor

    @classmethod
    def of_all(cls, parts: list[Candidates]) -> Candidates:
        """Those of all rows from those of several parts of them, which are at least one.

        Where scores are equal, those of the first part come first.
        """
        scores, keys, dates = (torch.cat(column, 1) for column in zip(*parts, strict=True))
        index = scores.sort(dim=1, descending=True, stable=True).indices[:, :CANDIDATES]
        return cls(scores.gather(1, index), _gathered(keys, index), dates.gather(1, index))

    def padded(self) -> Candidates:
        """With `CANDIDATES` documents for each question; those that are not there may not be seen."""
        missing = CANDIDATES - self.scores.shape[1]
        return Candidates(
            functional.pad(self.scores, (0, missing), value=-torch.inf),
            functional.pad(self.keys, (0, 0, 0, missing)),
            functional.pad(self.dates, (0, missing)),
        )


class RecencyTerm(nn.Module):
    """The term, with the numbers in it that are learned. It has no other weights, and banks know nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(5.0))  # a
        self.alike = nn.Parameter(torch.tensor(1.0))  # alpha
        self.bias = nn.Parameter(torch.tensor(3.0))  # beta
        self.about = nn.Parameter(torch.tensor(1.0))  # gamma

    def penalties(self, own: Candidates, among: Candidates, asked: Tensor | None, scale: Tensor) -> Tensor:
        """What is taken from the scores of documents, `[B, n]`, never positive.

        Args:
            own: the documents.
            among: those that may be newer, n' of them: the same, or where they are part of a bank, those of all of it.
            asked: `[B]`, int64, the last moment of the time that each question names; None if none names one.
            scale: e^tau of the prior.
        """
        ours, theirs = own.dates, among.dates
        if asked is not None:
            # After the time of a question all are equal, and before what can be meant.
            ours, theirs = (dates.where(dates <= asked[:, None], _BEFORE_ALL) for dates in (ours, theirs))
        seen, theirs_seen = own.scores.isfinite(), among.scores.isfinite()
        newer = seen[:, :, None] & theirs_seen[:, None] & (theirs[:, None] > ours[:, :, None])  # [B, n, n']
        cosines = own.keys @ among.keys.mT  # keys have length 1
        # Without the scores of what may not be seen: no gradient passes through inf - inf.
        gaps = among.scores.where(theirs_seen, 0.0)[:, None] - own.scores.where(seen, 0.0)[:, :, None]
        same = torch.sigmoid(self.alike * scale * (cosines - 1) + self.about * gaps + self.bias)
        # With fewer candidates in all of the bank, each is one of them.
        is_candidate = own.scores >= among.scores[:, -1:] if among.scores.shape[1] == CANDIDATES else None
        taken = functional.softplus(self.strength) * torch.where(newer, same, 0.0).sum(-1)
        return -taken if is_candidate is None else -torch.where(is_candidate, taken, 0.0)


class RankedFirst(NamedTuple):
    """The candidates among K rows, and where they are.

    Attributes:
        rows: `[B, n]`, their numbers.
        candidates: the candidates.
    """

    rows: Tensor
    candidates: Candidates

    @classmethod
    def among(cls, scores: Tensor, keys: Tensor, dates: Tensor) -> RankedFirst:
        """Those of all rows; of equal scores, the first rows.

        Args:
            scores: `[B, K]`, the prior's scores; `-inf` for rows that a question may not see.
            keys: `[K, P]`, or `[G, K, P]` where each run of B / G questions has rows of its own.
            dates: `[K]` or `[G, K]`.
        """
        count = min(CANDIDATES, scores.shape[1])
        # Sorted by number first: `topk` returns equal scores in any order, and sums would round in any order with it.
        index = scores.topk(count, 1).indices.sort(1).values
        order = scores.gather(1, index).sort(dim=1, descending=True, stable=True).indices
        index = index.gather(1, order)
        if keys.ndim == 3:
            run = torch.arange(len(scores), device=index.device)[:, None] // (len(scores) // len(keys))
            found = keys[run, index], dates[run, index]
        else:
            found = keys[index], dates[index]
        return cls(index, Candidates(scores.gather(1, index), *found))

    def added(self, scores: Tensor, penalties: Tensor) -> Tensor:
        """The scores `[B, K]` with the penalties `[B, n]` of the candidates."""
        return scores.scatter_add(1, self.rows, penalties.to(scores.dtype))


def _gathered(keys: Tensor, index: Tensor) -> Tensor:
    """`[B, n, P]` by `[B, m] -> [B, m, P]`."""
    found: Tensor = keys.gather(1, index[:, :, None].expand(-1, -1, keys.shape[-1]))
    return found

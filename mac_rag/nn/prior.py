"""The document prior, a learned score of a document for a question; and compact prior keys for a whole bank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.nn.memory_tokens import MemoryTokens

# The offsets of the places in the other two `[L + 1]`; documents, int32, and numbers, place after place.
Postings: TypeAlias = tuple[Tensor, Tensor, Tensor]
# Lexical vectors of K documents without their zeros: counts, places and weights, as in `PriorKeys`, and their postings,
# where they are known.
Lexical: TypeAlias = tuple[Tensor, Tensor, Tensor, Postings | None]
_ENTRIES = 1 << 20  # of postings that are chosen from at a time, as int64 numbers of all would take much memory
# Keys of a part from which on a change does not copy it, unless it is larger than one `_SHARE`th of the part. Below, a
# copy takes some milliseconds at most.
_LARGE, _SHARE = 1 << 14, 8


class DocumentPrior(nn.Module):
    """A learned score of a document for a question, `s(x, d) = exp(tau) cos(W_q mean(x), W_k mean(phi_d))`.

    With a sentence encoder (`mac_rag.config.SentenceEncoderConfig`), its token replaces the mean. If texts have lexical
    vectors, their product is added to the cosine, `cos(...) + w u(x) v(d)`, where v(d) are the document's vectors and
    u(x) the question's (`AmortizationNetwork.lexical`). Both together are one product of longer vectors.

    The prior is added to the attention logits of all tokens of the document. It keeps attention sharp over thousands of
    documents, over which a plain softmax spreads. It depends on one document and one question only, so aggregation
    stays invariant to the order of the documents. Not part of the paper.

    Args:
        width: D, the width of question and memory tokens.
        prior_width: P, the width of the space in which the two are compared.
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
            self.key.weight.copy_(self.query.weight)  # so that similar texts have high scores from the start

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
            question: tokens of B questions.
            lexical_weight: replaces w, as a scalar; None for the prior's own w.
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
            keys: `[K, d_prior]`, or `[G, K, d_prior]` if each run of B / G questions has its own documents.
        """
        if isinstance(keys, PriorKeys):
            products = keys.products(queries)
        elif keys.ndim == 3:
            products = (queries.unflatten(0, (len(keys), -1)) @ keys.mT).flatten(0, 1)
        else:
            products = queries @ keys.T
        scores: Tensor = self.log_scale.exp() * products
        return scores


def postings_of(counts: Tensor, places: Tensor, weights: Tensor, width: int) -> Postings:
    """For each place of the lexical parts, the documents that are not zero there, and their numbers there.

    Args:
        counts, places, weights, width: see `PriorKeys`.
    """
    small = places.numpy().astype(np.uint16 if width <= 1 << 16 else np.uint32)
    order = torch.from_numpy(np.argsort(small, kind="stable"))  # a radix sort for 16 bits
    documents = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
    ends = torch.nn.functional.pad(torch.bincount(places, minlength=width).cumsum(0), (1, 0))
    return ends, documents[order], weights[order]


def kept_postings(postings: Postings, mask: Tensor) -> Postings:
    """The postings of those of K documents where `mask` `[K]` is True, which are numbered anew, without a sort."""
    ends, documents, weights = postings
    numbers = mask.cumsum(0, dtype=torch.int32) - 1
    found, dropped, start = [], [], 0
    for some, of_some in zip(documents.split(_ENTRIES), weights.split(_ENTRIES), strict=True):
        remains = mask.index_select(0, some)
        dropped.append((~remains).nonzero()[:, 0] + start)
        found.append((numbers.index_select(0, some.masked_select(remains)), of_some.masked_select(remains)))
        start += len(some)
    documents, weights = map(torch.cat, zip(*found, strict=True))
    return ends - torch.searchsorted(torch.cat(dropped), ends), documents, weights


def joined_postings(postings: Postings, documents: int, counts: Tensor, places: Tensor, weights: Tensor) -> Postings:
    """The postings of K documents and of others after them; only those of the others are sorted.

    Args:
        postings: those of the K documents.
        documents: K.
        counts, places, weights: of the others, as in `PriorKeys`.
    """
    ends = postings[0]
    new_ends, others, their_weights = postings_of(counts, places, weights, len(ends) - 1)
    at = ends[1:].repeat_interleave(new_ends.diff()) + torch.arange(len(others))
    is_former = torch.ones(len(postings[1]) + len(others), dtype=torch.bool)
    is_former[at] = False

    def woven(former: Tensor, new: Tensor) -> Tensor:
        whole = torch.empty(len(is_former), dtype=torch.promote_types(former.dtype, new.dtype))
        whole[at] = new.to(whole.dtype)
        return whole.masked_scatter_(is_former, former.to(whole.dtype))

    return ends + new_ends, woven(postings[1], others + documents), woven(postings[2], their_weights)


def joined_lexical(parts: Sequence[Lexical]) -> Lexical:
    """The lexical vectors of several parts, at least one, in order; their postings if those of the first are known."""
    first_counts, first_places, first_weights, postings = parts[0]
    counts, places, weights = map(torch.cat, list(zip(*parts, strict=True))[:-1])
    if postings is not None:
        new = counts[len(first_counts) :], places[len(first_places) :], weights[len(first_weights) :]
        postings = joined_postings(postings, len(first_counts), *new)
    return counts, places, weights, postings


def kept_lexical(lexical: Lexical, mask: Tensor) -> Lexical:
    """The lexical vectors of those of K documents where `mask` `[K]` is True."""
    counts, places, weights, postings = lexical
    entries = mask.repeat_interleave(counts)
    if postings is not None:
        postings = kept_postings(postings, mask)
    # For one dimension, `masked_select` takes a third of the time of an index.
    return counts[mask], places.masked_select(entries), weights.masked_select(entries), postings


class PriorKeys:
    """Keys of K documents, each `[dense, lexical]` of width P + L, without the zeros of the lexical parts.

    A change of many keys copies none of them: those that come are another part, and those that go are no longer chosen.
    Parts are joined once the last ones have an eighth of the keys before them, and copied once an eighth is gone.

    Examples:
        >>> keys = PriorKeys.of(torch.ones(1, 2), torch.tensor([[0.0, 3.0, 0.0]]))
        >>> keys.products(torch.tensor([[1.0, 1.0, 5.0, 1.0, 7.0]]))
        tensor([[5.]])
        >>> keys.take(torch.tensor([0]))
        tensor([[1., 1., 0., 3., 0.]])

    Args:
        dense: `[K, P]`.
        counts: `[K]`, int32, how many numbers of each document's lexical part are not zero.
        places: `[sum of counts]`, int32, the indices of these numbers in the part; document after document.
        weights: `[sum of counts]`, the numbers. Products are computed in float32 at least.
        width: L; 0 without lexical parts.
        postings: `postings_of` these, where they are known already.
    """

    def __init__(
        self,
        dense: Tensor,
        counts: Tensor,
        places: Tensor,
        weights: Tensor,
        width: int,
        postings: Postings | None = None,
    ) -> None:
        self._parts = [_Part(dense, (counts, places, weights, postings), width)]

    @classmethod
    def _of_parts(cls, parts: list[_Part]) -> PriorKeys:
        keys = cls.__new__(cls)
        keys._parts = parts
        return keys

    @classmethod
    def of(cls, dense: Tensor, lexical: Tensor | None) -> PriorKeys:
        """Keys from lexical parts with their zeros, `[K, L]`; None for keys without lexical parts."""
        if lexical is None:
            lexical = dense.new_empty(len(dense), 0)
        filled = lexical != 0
        weights = lexical[filled].to(torch.promote_types(lexical.dtype, torch.float32))
        return cls(dense, filled.sum(1, dtype=torch.int32), filled.nonzero()[:, 1].int(), weights, lexical.shape[1])

    @classmethod
    def cat(cls, several: Sequence[PriorKeys]) -> PriorKeys:
        """The keys of several, at least one, in order."""
        groups: list[list[_Part]] = []  # the last one first
        for part in reversed([part for keys in several for part in keys._parts]):
            if groups and len(part) < max(_LARGE, _SHARE * sum(map(len, groups[-1]))):
                groups[-1].insert(0, part)
            else:
                groups.append([part])
        return cls._of_parts([_Part.cat(group) for group in reversed(groups)])

    def __len__(self) -> int:
        """K."""
        return sum(map(len, self._parts))

    @property
    def device(self) -> torch.device:
        return self._parts[0].dense.device

    def kept(self, mask: Tensor) -> PriorKeys:
        """The keys of the documents where `mask` `[K]` is True; this object itself if that is all of them."""
        if mask.all():
            return self
        masks = mask.split(list(map(len, self._parts)))
        parts = [part.kept(some) for part, some in zip(self._parts, masks, strict=True)]
        return self._of_parts([part for part in parts if len(part)] or parts[:1])

    def products(self, queries: Tensor) -> Tensor:
        """The product of every query with every key, `[B, K]`.

        Args:
            queries: `[B, P + L]`.
        """
        products = [part.products(queries) for part in self._parts]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def take(self, index: Tensor) -> Tensor:
        """The keys of the documents `index` `[n]`, including all zeros, `[n, P + L]`."""
        return self._found(index, _Part.take)

    def summaries(self, index: Tensor) -> Tensor:
        """The part of the keys that compares summaries, of the documents `index` `[n]`: `[n, P]`."""
        return self._found(index, _Part.summaries)

    def _found(self, index: Tensor, read: Callable[[_Part, Tensor], Tensor]) -> Tensor:
        """What `read` gives for the documents `index` `[n]`, each read from its part."""
        if len(self._parts) == 1:
            return read(self._parts[0], index)
        starts = torch.tensor([0, *map(len, self._parts)], device=index.device).cumsum(0)
        owner = torch.bucketize(index, starts[1:], right=True)
        found = torch.cat([read(part, index[owner == n] - starts[n]) for n, part in enumerate(self._parts)])
        return found[owner.sort(stable=True).indices.argsort()]


class _Part:
    """Some keys; some of these may be gone, but still take memory.

    Args:
        dense, lexical, width: see `PriorKeys`.
        chosen: `[k]`, ascending, the indices of those that are not gone; None for all.
    """

    def __init__(self, dense: Tensor, lexical: Lexical, width: int, chosen: Tensor | None = None) -> None:
        self.dense = dense
        self.counts, self.places, self.weights, postings = lexical
        if postings is not None:
            self._postings = postings
        self.width = width
        self.chosen = chosen

    @classmethod
    def cat(cls, parts: Sequence[_Part]) -> _Part:
        """One part of several, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        copies = [part if part.chosen is None else part._copied(part.chosen) for part in parts]
        lexical = joined_lexical([copy._lexical for copy in copies])
        return cls(torch.cat([copy.dense for copy in copies]), lexical, copies[0].width)

    def __len__(self) -> int:
        return len(self.dense if self.chosen is None else self.chosen)

    def kept(self, mask: Tensor) -> _Part:
        """Those where `mask` `[k]` is True; this object itself if that is all of them."""
        if mask.all():
            return self
        chosen = mask.nonzero()[:, 0] if self.chosen is None else self.chosen[mask]
        if len(self.dense) < _LARGE or _SHARE * (len(self.dense) - len(chosen)) > len(self.dense):
            return self._copied(chosen)
        return _Part(self.dense, self._lexical, self.width, chosen)

    def _copied(self, chosen: Tensor) -> _Part:
        """A copy of some."""
        mask = torch.zeros(len(self.dense), dtype=torch.bool, device=self.dense.device)
        mask[chosen] = True
        return _Part(self.dense[chosen], kept_lexical(self._lexical, mask), self.width)

    def products(self, queries: Tensor) -> Tensor:
        """As `PriorKeys.products`."""
        products = self._products(queries)
        return products if self.chosen is None else products[:, self.chosen]

    def _products(self, queries: Tensor) -> Tensor:
        # With one column, with the keys on the right, or with columns that are not contiguous, a matrix product uses
        # kernels that are several times slower.
        columns = queries[:, : self.dense.shape[1]].expand(max(2, len(queries)), -1).contiguous().T
        products = (self.dense @ columns)[:, : len(queries)].T
        if not self.width or not len(self.weights):
            return products
        lexical = queries[:, self.dense.shape[1] :].to(torch.promote_types(self.weights.dtype, torch.float32))
        if self.weights.device.type != "cpu":
            return products + (self._matrix @ lexical.T).T.to(products.dtype)
        return products + torch.stack([self._lexical_products(query) for query in lexical]).to(products.dtype)

    def _lexical_products(self, query: Tensor) -> Tensor:
        """The products with the lexical part `[L]` of one query; reads only the places where it is not zero."""
        ends, documents, weights = self._postings
        products = query.new_zeros(len(self.dense))
        for place in query.nonzero()[:, 0].tolist():
            here = slice(int(ends[place]), int(ends[place + 1]))
            products.index_add_(0, documents[here], query[place] * weights[here].to(query.dtype))
        return products

    @property
    def _lexical(self) -> Lexical:
        return self.counts, self.places, self.weights, self.__dict__.get("_postings")

    @cached_property
    def _postings(self) -> Postings:
        return postings_of(self.counts, self.places, self.weights, self.width)

    def summaries(self, index: Tensor) -> Tensor:
        """As `PriorKeys.summaries`."""
        return self.dense[index if self.chosen is None else self.chosen[index]]

    def take(self, index: Tensor) -> Tensor:
        """As `PriorKeys.take`."""
        index = index if self.chosen is None else self.chosen[index]
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
        """The lexical parts as a sparse matrix."""
        starts = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).to(torch.int32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            shape = len(self.dense), self.width
            weights = self.weights.to(torch.promote_types(self.weights.dtype, torch.float32))
            return torch.sparse_csr_tensor(starts, self.places, weights, shape, check_invariants=False)


# The recency term of the document prior: of documents on the same subject, the newest that a question can mean counts.
#
# The prior compares texts, and two versions of one text are equally near to a question about them. So the term reduces
# a document's score for each newer document on the same subject:
#
#     r(x, d) = -softplus(a) sum_d' [d' is newer than d] same(x, d, d')     same(x, d, d') = sigmoid(alpha e^tau
# (cos(k_d, k_d') - 1) + gamma (s(x, d') - s(x, d)) + beta)
#
# where k are the prior's keys of the documents, s the scores of the prior, and the sum goes over the documents that the
# prior ranks first. a, alpha, beta and gamma are learned. The term is never positive: it can only reduce a score.
#
# A question may name a time. Then documents from after that time count as newer than no other. They reduce neither the
# scores of the documents that the question can mean, nor each other's, because the question asks for none of them. A
# question that names no time asks for the newest.
#
# Not part of the paper.


# Number of documents per question among which the term looks for newer ones. All others have next to no weight anyway.
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
        """Merges the candidates of one or more parts to those of all rows.

        Of equal scores, those of the first part come first.
        """
        scores, keys, dates = (torch.cat(column, 1) for column in zip(*parts, strict=True))
        index = scores.sort(dim=1, descending=True, stable=True).indices[:, :CANDIDATES]
        return cls(scores.gather(1, index), _gathered(keys, index), dates.gather(1, index))

    def padded(self) -> Candidates:
        """Padded to `CANDIDATES` documents for each question; the padding has scores of `-inf`."""
        missing = CANDIDATES - self.scores.shape[1]
        return Candidates(
            functional.pad(self.scores, (0, missing), value=-torch.inf),
            functional.pad(self.keys, (0, 0, 0, missing)),
            functional.pad(self.dates, (0, missing)),
        )


class RecencyTerm(nn.Module):
    """The term and its four learned numbers. It has no other weights, and banks do not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(5.0))  # a
        self.alike = nn.Parameter(torch.tensor(1.0))  # alpha
        self.bias = nn.Parameter(torch.tensor(3.0))  # beta
        self.about = nn.Parameter(torch.tensor(1.0))  # gamma

    def penalties(self, own: Candidates, among: Candidates, asked: Tensor | None, scale: Tensor) -> Tensor:
        """The numbers added to the documents' scores, `[B, n]`, never positive.

        Args:
            own: the documents.
            among: the n' documents that may be newer: `own`, or the candidates of the whole bank if `own` is a part.
            asked: `[B]`, int64, the last moment of the time that each question names; None if none names a time.
            scale: e^tau of the prior.
        """
        ours, theirs = own.dates, among.dates
        if asked is not None:
            # Documents from after a question's time count as equally old, and older than all others.
            ours, theirs = (dates.where(dates <= asked[:, None], _BEFORE_ALL) for dates in (ours, theirs))
        seen, theirs_seen = own.scores.isfinite(), among.scores.isfinite()
        newer = seen[:, :, None] & theirs_seen[:, None] & (theirs[:, None] > ours[:, :, None])  # [B, n, n']
        cosines = own.keys @ among.keys.mT  # keys have length 1
        # Leave out the scores of documents that may not be seen: no gradient passes through inf - inf.
        gaps = among.scores.where(theirs_seen, 0.0)[:, None] - own.scores.where(seen, 0.0)[:, :, None]
        same = torch.sigmoid(self.alike * scale * (cosines - 1) + self.about * gaps + self.bias)
        # If the whole bank has fewer candidates, every document is one of them.
        is_candidate = own.scores >= among.scores[:, -1:] if among.scores.shape[1] == CANDIDATES else None
        taken = functional.softplus(self.strength) * torch.where(newer, same, 0.0).sum(-1)
        return -taken if is_candidate is None else -torch.where(is_candidate, taken, 0.0)


class RankedFirst(NamedTuple):
    """The candidates among K rows, and their indices.

    Attributes:
        rows: `[B, n]`, indices of the candidates' rows.
        candidates: the candidates.
    """

    rows: Tensor
    candidates: Candidates

    @classmethod
    def among(cls, scores: Tensor, keys: Tensor | PriorKeys, dates: Tensor) -> RankedFirst:
        """The candidates of all rows; of equal scores, the first rows.

        Args:
            scores: `[B, K]`, the prior's scores; `-inf` for rows that a question may not see.
            keys: the part that compares summaries, `[K, P]`, or `[G, K, P]` if each run of B / G questions has its own
                rows; or whole keys of the bank.
            dates: `[K]` or `[G, K]`.
        """
        count = min(CANDIDATES, scores.shape[1])
        # Sort by index first: `topk` returns equal scores in any order, and rounding of sums would depend on it.
        index = scores.topk(count, 1).indices.sort(1).values
        order = scores.gather(1, index).sort(dim=1, descending=True, stable=True).indices
        index = index.gather(1, order)
        if isinstance(keys, PriorKeys):
            found = keys.summaries(index.flatten()).unflatten(0, index.shape), dates[index]
        elif keys.ndim == 3:
            run = torch.arange(len(scores), device=index.device)[:, None] // (len(scores) // len(keys))
            found = keys[run, index], dates[run, index]
        else:
            found = keys[index], dates[index]
        return cls(index, Candidates(scores.gather(1, index), *found))

    def added(self, scores: Tensor, penalties: Tensor) -> Tensor:
        """The scores `[B, K]` plus the penalties `[B, n]` of the candidates."""
        return scores.scatter_add(1, self.rows, penalties.to(scores.dtype))


def _gathered(keys: Tensor, index: Tensor) -> Tensor:
    """Gathers keys by index: `[B, n, P], [B, m] -> [B, m, P]`."""
    found: Tensor = keys.gather(1, index[:, :, None].expand(-1, -1, keys.shape[-1]))
    return found

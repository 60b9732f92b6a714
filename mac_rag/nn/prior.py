"""The document prior, a learned score of a document for a question; and compact prior keys for a whole bank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.nn.memory_tokens import MemoryTokens

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

    def score(self, queries: Tensor, keys: Tensor | PriorKeys | ChosenKeys) -> Tensor:
        """Scores `[B, K]`.

        Args:
            queries: `[B, d_prior]`.
            keys: `[K, d_prior]`, or `[G, K, d_prior]` if each run of B / G questions has its own documents.
        """
        if not isinstance(keys, Tensor):
            products = keys.products(queries)
        elif keys.ndim == 3:
            products = (queries.unflatten(0, (len(keys), -1)) @ keys.mT).flatten(0, 1)
        else:
            products = queries @ keys.T
        scores: Tensor = self.log_scale.exp() * products
        return scores


class Postings(NamedTuple):
    """Lexical vectors of K documents without their zeros, place by place, as a question reads them.

    Attributes:
        ends: int64 `[L + 1]`, the offsets of the places in the other two.
        documents: int32, for each place the documents that are not zero there, ascending.
        weights: their numbers there.
    """

    ends: Tensor
    documents: Tensor
    weights: Tensor

    @classmethod
    def of(cls, counts: Tensor, places: Tensor, weights: Tensor, width: int) -> Postings:
        """Sorts what stands document after document.

        Args:
            counts: int32 `[K]`, how many numbers of each document are not zero.
            places: int32 `[sum of counts]`, the indices of these numbers.
            weights: `[sum of counts]`, the numbers.
            width: L.
        """
        documents = torch.arange(len(counts), dtype=torch.int32, device=counts.device).repeat_interleave(counts)
        return cls._sorted(places, documents, weights, width)

    @classmethod
    def _sorted(cls, places: Tensor, documents: Tensor, weights: Tensor, width: int) -> Postings:
        ends = functional.pad(torch.bincount(places, minlength=width).cumsum(0), (1, 0))
        small = places.cpu().numpy().astype(np.uint16 if width <= 1 << 16 else np.uint32)
        order = torch.from_numpy(np.argsort(small, kind="stable")).to(places.device)  # a radix sort for 16 bits
        return cls(ends, documents[order], weights[order])

    @classmethod
    def cat(cls, parts: Sequence[Postings], documents: Sequence[int]) -> Postings:
        """Those of several parts, at least one, in order; only what comes after the first part is sorted.

        Args:
            parts: the parts.
            documents: K of each.
        """
        if len(parts) == 1:
            return parts[0]
        starts = accumulate(documents[:-1])
        rest = [(part._places(), part.documents + start, part.weights) for part, start in zip(parts[1:], starts)]
        places, others, weights = (torch.cat(column) for column in zip(*rest, strict=True))
        return parts[0]._joined(cls._sorted(places, others, weights, parts[0].width))

    @property
    def width(self) -> int:
        """L."""
        return len(self.ends) - 1

    def at(self, place: int, index: Tensor) -> Tensor:
        """The numbers of the documents `index` `[n]` at a place."""
        start, stop = self.ends[place : place + 2].tolist()
        if start == stop:
            return self.weights.new_zeros(len(index))
        documents, index = self.documents[start:stop], index.int()
        found = torch.searchsorted(documents, index).clamp(max=stop - start - 1)
        return self.weights[start:stop][found] * (documents[found] == index)

    def _places(self) -> Tensor:
        """The place of each number."""
        numbers = torch.arange(self.width, dtype=torch.int32, device=self.ends.device)
        return numbers.repeat_interleave(self.ends.diff())

    def _joined(self, others: Postings) -> Postings:
        """These, and those of other documents, whose numbers are larger."""
        at = self.ends[1:].repeat_interleave(others.ends.diff())
        at += torch.arange(len(at), device=at.device)
        is_former = torch.ones(len(self.documents) + len(at), dtype=torch.bool, device=at.device)
        is_former[at] = False

        def woven(former: Tensor, new: Tensor) -> Tensor:
            whole = former.new_empty(len(is_former), dtype=torch.promote_types(former.dtype, new.dtype))
            whole[at] = new.to(whole.dtype)
            return whole.masked_scatter_(is_former, former.to(whole.dtype))

        documents, weights = woven(self.documents, others.documents), woven(self.weights, others.weights)
        return Postings(self.ends + others.ends, documents, weights)

    def kept(self, mask: Tensor) -> Postings:
        """Those of the documents where `mask` `[K]` is True, which are numbered anew, without a sort."""
        numbers = mask.cumsum(0, dtype=torch.int32) - 1
        found, dropped, start = [], [], 0
        for some, of_some in zip(self.documents.split(_ENTRIES), self.weights.split(_ENTRIES), strict=True):
            remains = mask.index_select(0, some)
            dropped.append((~remains).nonzero()[:, 0] + start)
            found.append((numbers.index_select(0, some.masked_select(remains)), of_some.masked_select(remains)))
            start += len(some)
        documents, weights = map(torch.cat, zip(*found, strict=True))
        return Postings(self.ends - torch.searchsorted(torch.cat(dropped), self.ends), documents, weights)


class PriorKeys:
    """Keys of K documents, each `[dense, lexical]` of width P + L, without the zeros of the lexical parts.

    A change of many keys copies none of them: those that come are another part, and those that go are no longer chosen.
    Parts are joined once the last ones have an eighth of the keys before them, and copied once an eighth is gone.

    Examples:
        >>> keys = PriorKeys.of(torch.ones(1, 2), torch.tensor([[0.0, 3.0, 0.0]]))
        >>> keys.products(torch.tensor([[1.0, 1.0, 5.0, 1.0, 7.0]]))
        tensor([[5.]])
        >>> keys.summaries(torch.tensor([0]))
        tensor([[1., 1.]])

    Args:
        dense: `[K, P]`.
        lexical: the lexical parts; None for keys without them. Products are computed in float32 at least.
    """

    def __init__(self, dense: Tensor, lexical: Postings | None) -> None:
        self._parts = [_Part(dense, lexical)]

    @classmethod
    def _of_parts(cls, parts: list[_Part]) -> PriorKeys:
        keys = cls.__new__(cls)
        keys._parts = parts
        return keys

    @classmethod
    def of(cls, dense: Tensor, lexical: Tensor | None) -> PriorKeys:
        """Keys from lexical parts with their zeros, `[K, L]`; None for keys without lexical parts."""
        if lexical is None:
            return cls(dense, None)
        filled = lexical != 0
        weights = lexical[filled].to(torch.promote_types(lexical.dtype, torch.float32))
        counts, places = filled.sum(1, dtype=torch.int32), filled.nonzero()[:, 1].int()
        return cls(dense, Postings.of(counts, places, weights, lexical.shape[1]))

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

    def summaries(self, index: Tensor) -> Tensor:
        """The part of the keys that compares summaries, of the documents `index` `[n]`: `[n, P]`."""
        return self._found(index, _Part.summaries)

    def products_of(self, queries: Tensor, index: Tensor) -> Tensor:
        """The products of queries `[B, P + L]` with the keys of a few documents `index` `[n]`: `[B, n]`."""
        return self._found(index, lambda part, own: part.products_of(queries, own).T).T

    def _found(self, index: Tensor, read: Callable[[_Part, Tensor], Tensor]) -> Tensor:
        """What `read` gives for each of the documents `index` `[n]`, each read from its part."""
        if len(self._parts) == 1:
            return read(self._parts[0], index)
        starts = torch.tensor([0, *map(len, self._parts)], device=index.device).cumsum(0)
        owner = torch.bucketize(index, starts[1:], right=True)
        found = torch.cat([read(part, index[owner == n] - starts[n]) for n, part in enumerate(self._parts)])
        return found[owner.sort(stable=True).indices.argsort()]


@dataclass(frozen=True)
class ChosenKeys:
    """Keys of documents that were chosen among many.

    Attributes:
        keys: those of all.
        index: `[G, n]`, the chosen ones; each run of B / G questions has its own.
    """

    keys: PriorKeys
    index: Tensor

    def products(self, queries: Tensor) -> Tensor:
        """The products of `[B, P + L]` queries with the keys that are theirs, `[B, n]`."""
        runs = queries.unflatten(0, (len(self.index), -1))
        return torch.cat([self.keys.products_of(*run) for run in zip(runs, self.index, strict=True)])

    @property
    def summaries(self) -> Tensor:
        """The part of the keys that compares summaries, `[G, n, P]`."""
        found: Tensor = self.keys.summaries(self.index.flatten()).unflatten(0, self.index.shape)
        return found


class _Part:
    """Some keys; some of these may be gone, but still take memory.

    Args:
        dense, lexical: see `PriorKeys`.
        chosen: `[k]`, ascending, the indices of those that are not gone; None for all.
    """

    def __init__(self, dense: Tensor, lexical: Postings | None, chosen: Tensor | None = None) -> None:
        self.dense, self.lexical, self.chosen = dense, lexical, chosen

    @classmethod
    def cat(cls, parts: Sequence[_Part]) -> _Part:
        """One part of several, at least one, in order."""
        if len(parts) == 1:
            return parts[0]
        copies = [part if part.chosen is None else part._copied(part.chosen) for part in parts]
        lexical = [copy.lexical for copy in copies if copy.lexical is not None]
        joined = Postings.cat(lexical, list(map(len, copies))) if lexical else None
        return cls(torch.cat([copy.dense for copy in copies]), joined)

    def __len__(self) -> int:
        return len(self.dense if self.chosen is None else self.chosen)

    def kept(self, mask: Tensor) -> _Part:
        """Those where `mask` `[k]` is True; this object itself if that is all of them."""
        if mask.all():
            return self
        chosen = mask.nonzero()[:, 0] if self.chosen is None else self.chosen[mask]
        if len(self.dense) < _LARGE or _SHARE * (len(self.dense) - len(chosen)) > len(self.dense):
            return self._copied(chosen)
        return _Part(self.dense, self.lexical, chosen)

    def _copied(self, chosen: Tensor) -> _Part:
        """A copy of some."""
        mask = torch.zeros(len(self.dense), dtype=torch.bool, device=self.dense.device)
        mask[chosen] = True
        return _Part(self.dense[chosen], None if self.lexical is None else self.lexical.kept(mask))

    def products(self, queries: Tensor) -> Tensor:
        """As `PriorKeys.products`."""
        products = self._products(queries)
        return products if self.chosen is None else products[:, self.chosen]

    def _products(self, queries: Tensor) -> Tensor:
        # With one column, with the keys on the right, or with columns that are not contiguous, a matrix product uses
        # kernels that are several times slower.
        columns = queries[:, : self.dense.shape[1]].expand(max(2, len(queries)), -1).contiguous().T
        products = (self.dense @ columns)[:, : len(queries)].T
        if self.lexical is None or not len(self.lexical.weights):
            return products
        weights = self.lexical.weights
        lexical = queries[:, self.dense.shape[1] :].to(torch.promote_types(weights.dtype, torch.float32))
        if weights.device.type != "cpu":
            return products + (self._matrix @ lexical.T).T.to(products.dtype)
        found = [self._lexical_products(self.lexical, query) for query in lexical]
        return products + torch.stack(found).to(products.dtype)

    def _lexical_products(self, postings: Postings, query: Tensor) -> Tensor:
        """The products with the lexical part `[L]` of one query; reads only the places where it is not zero."""
        ends, documents, weights = postings
        products = query.new_zeros(len(self.dense))
        for place in query.nonzero()[:, 0].tolist():
            here = slice(int(ends[place]), int(ends[place + 1]))
            products.index_add_(0, documents[here], query[place] * weights[here].to(query.dtype))
        return products

    def summaries(self, index: Tensor) -> Tensor:
        """As `PriorKeys.summaries`."""
        return self.dense[index if self.chosen is None else self.chosen[index]]

    def products_of(self, queries: Tensor, index: Tensor) -> Tensor:
        """As `PriorKeys.products_of`."""
        products = queries[:, : self.dense.shape[1]] @ self.summaries(index).T
        if self.lexical is None or not len(self.lexical.weights):
            return products
        index = index if self.chosen is None else self.chosen[index]
        lexical = queries[:, self.dense.shape[1] :]
        for place in lexical.any(0).nonzero()[:, 0].tolist():
            products += lexical[:, place, None] * self.lexical.at(place, index).to(products.dtype)
        return products

    @cached_property
    def _matrix(self) -> Tensor:
        """The lexical parts as a sparse matrix `[K, L]`."""
        assert self.lexical is not None
        ends, documents, weights = self.lexical
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CS. tensor support is in beta state")
            shape = len(self.dense), self.lexical.width
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            columns = torch.sparse_csc_tensor(ends.int(), documents, weights, shape, check_invariants=False)
            return columns.to_sparse_csr()


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
    def among(cls, scores: Tensor, keys: Tensor | PriorKeys | ChosenKeys, dates: Tensor) -> RankedFirst:
        """The candidates of all rows; of equal scores, the first rows.

        Args:
            scores: `[B, K]`, the prior's scores; `-inf` for rows that a question may not see.
            keys: the part that compares summaries, `[K, P]`, or `[G, K, P]` if each run of B / G questions has its own
                rows; or whole keys.
            dates: `[K]` or `[G, K]`.
        """
        count = min(CANDIDATES, scores.shape[1])
        # Sort by index first: `topk` returns equal scores in any order, and rounding of sums would depend on it.
        index = scores.topk(count, 1).indices.sort(1).values
        order = scores.gather(1, index).sort(dim=1, descending=True, stable=True).indices
        index = index.gather(1, order)
        if isinstance(keys, ChosenKeys):
            keys = keys.summaries
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

"""The document prior: a learned score of a document for a question."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DocumentPrior(nn.Module):
    """A learned score of a document for a question, `s(x, d) = exp(tau) cos(W_q mean(x), W_k mean(phi_d))`.

    With an index (`mac_rag.config.IndexConfig`), the first token takes the place of the mean. With words, the product
    of those is added to the cosine, `cos(...) + w u(x) v(d)`, where v are a document's words, and u a question's scaled
    to length 1. Cosine and product together are one product of longer vectors.

    Added to the attention logits of all tokens of the document, it keeps attention sharp over thousands of documents,
    where a plain softmax spreads over them. It is a function of one document and one question, so aggregation stays
    invariant to the order of the documents. Not part of the paper.

    Args:
        width: D, of question and memory tokens.
        prior_width: of the space that they are compared in.
        index: whether the first token is the text's index.
        words: R, vectors of words behind the tokens.
        words_weight: w.
    """

    def __init__(self, width: int, prior_width: int, index: bool, words: int = 0, words_weight: float = 1.0) -> None:
        super().__init__()
        self.index = index
        self.words = words
        self.words_weight = words_weight
        self.query = nn.Linear(width, prior_width, bias=False)
        self.key = nn.Linear(width, prior_width, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        with torch.no_grad():
            self.key.weight.copy_(self.query.weight)  # what is alike from the start scores high from the start

    def summary(self, tokens: Tensor) -> Tensor:
        """What stands for a text, `[K, T, D] -> [K, D]`."""
        return tokens[:, 0] if self.index else tokens.mean(1)

    def keys(self, phi: Tensor) -> Tensor:
        """`[K, T + R, D] -> [K, d_prior]`."""
        keys = functional.normalize(self.key(self.summary(phi)), dim=-1)
        return torch.cat([keys, phi[:, -self.words :].flatten(1)], -1) if self.words else keys

    def queries(self, question: Tensor) -> Tensor:
        """`[B, T + R, D] -> [B, d_prior]`."""
        queries = functional.normalize(self.query(self.summary(question)), dim=-1)
        if not self.words:
            return queries
        words = functional.normalize(question[:, -self.words :].flatten(1), dim=-1)
        return torch.cat([queries, self.words_weight * words], -1)

    def score(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[B, d_prior]`, and `[K, d_prior]` or `[G, K, d_prior]` for runs of questions, to `[B, K]`."""
        if keys.ndim == 3:
            products = (queries.unflatten(0, (len(keys), -1)) @ keys.mT).flatten(0, 1)
        else:
            products = queries @ keys.T
        scores: Tensor = self.log_scale.exp() * products
        return scores

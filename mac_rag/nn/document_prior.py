"""The document prior: a learned score of a document for a question."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior_keys import PriorKeys


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

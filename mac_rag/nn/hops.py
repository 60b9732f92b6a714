"""Hops: what one slot of phi* has read leads the next slot to its documents.

"Who left the board of the company that Bell Press bought?" No word of this question stands in the document that answers
it, so no score of that document alone can find it: another document has to say first which company is meant. With hops
the query of the document prior moves on from slot to slot,

    q_1 = W_q mean(x) / |W_q mean(x)|,    q_(j+1) = v / |v|,    v = q_1 + W_o mean(Transformer([x; phi*_j])_x)

where phi*_j are the tokens that slot j has read, x the question's, and the mean goes over the question's tokens behind
the transformer. A slot does not see the documents that the slots before it rank first. W_o is zero before training:
slots then rank as they do without hops, and training moves them from there.

Retrievers that read before they search again do the same with text (Xiong et al., 2021, "Answering Complex Open-Domain
Questions with Multi-Hop Dense Retrieval"). Not part of the paper.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

_LAYERS = 2


class Hops(nn.Module):
    """The next query of the document prior, from the question and what a slot has read.

    Args:
        width: D.
        prior_width: P, width of the part of the prior's queries that compares summaries.
        heads: attention heads, if they divide D; else the largest number below that does.
        feed_forward: hidden width of the feed-forward networks, as a multiple of D.
    """

    def __init__(self, width: int, prior_width: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.width = prior_width
        self.norm = nn.LayerNorm(width)
        self.kinds = nn.Parameter(0.02 * torch.randn(2, width))  # of the question's tokens, and of those that were read
        layer = nn.TransformerEncoderLayer(
            width,
            math.gcd(width, heads),
            feed_forward * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.reader = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.to_query = nn.Linear(width, prior_width)
        nn.init.zeros_(self.to_query.weight)
        nn.init.zeros_(self.to_query.bias)

    def forward(self, query: Tensor, question: Tensor, read: Tensor) -> Tensor:
        """The query of the next slot, `[B, d_prior]`.

        Args:
            query: `[B, d_prior]`, the question's own, of which the first P numbers have length 1 and move on. Lexical
                vectors behind them stay.
            question: `[B, T, D]`, the question's tokens.
            read: `[B, T, D]`, what the slot before has read.
        """
        tokens = torch.cat([self.norm(question) + self.kinds[0], self.norm(read) + self.kinds[1]], 1)
        summary = self.reader(tokens)[:, : question.shape[1]].mean(1)
        moved = functional.normalize(query[:, : self.width] + self.to_query(summary), dim=-1)
        return torch.cat([moved, query[:, self.width :]], 1)

"""A block of the aggregation network: cross-attention to the bank, and a feed-forward network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def weighed(scores: Tensor, weights: Tensor) -> Tensor:
    """`weights * scores`. Scores of `-inf` stay, and are left out of the weights' gradient, where 0 * inf is NaN."""
    if not torch.is_grad_enabled():
        return weights * scores
    hidden = scores.isneginf()
    return (weights * scores.masked_fill(hidden, 0.0)).masked_fill(hidden, -torch.inf)


class CrossAttentionBlock(nn.Module):
    """One pre-norm block: cross-attention to the bank, then a feed-forward network, each with a residual.

    Args:
        width: D.
        heads: H.
        head_width: d, width of one head.
        feed_forward: width of the hidden layer as a multiple of D.
        prior: True adds a document prior to the logits, times a learned scale for each head.
        prior_sharpness: a further factor on the prior, except in training.
        readout: True leaves out the residual around the attention: the output consists of memory tokens, without the
            question's tokens.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        feed_forward: int,
        prior: bool,
        prior_sharpness: float = 1.0,
        *,
        readout: bool = False,
    ) -> None:
        super().__init__()
        self.readout = readout
        self.prior_sharpness = prior_sharpness
        self.heads = heads
        self.hidden_width = feed_forward * width
        self.norm = nn.LayerNorm(width)
        self.to_query = nn.Linear(width, heads * head_width, bias=False)
        self.to_key = nn.Linear(width, heads * head_width, bias=False)
        self.to_value = nn.Linear(width, heads * head_width, bias=False)
        self.to_out = nn.Linear(heads * head_width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, self.hidden_width),
            nn.GELU(),
            nn.Linear(self.hidden_width, width),
        )
        self.prior_scale = nn.Parameter(torch.ones(heads)) if prior else None
        # An untrained block already aggregates: queries match keys by similarity, and attended memory tokens pass
        # through unchanged. From a random start, a small network takes long to learn this.
        nn.init.orthogonal_(self.to_query.weight)
        nn.init.orthogonal_(self.to_value.weight)
        with torch.no_grad():
            self.to_key.weight.copy_(self.to_query.weight)
            self.to_out.weight.copy_(self.to_value.weight.T)
        nn.init.zeros_(self.to_out.bias)
        if readout:
            for parameter in self.feed_forward[-1].parameters():
                nn.init.zeros_(parameter)

    def project(self, bank: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, K, T, d]` from a normalised bank `[K, T, D]`."""
        return self.project_keys(bank), self._by_heads(self.to_value(bank))

    def project_keys(self, bank: Tensor) -> Tensor:
        """Keys `[H, K, T, d]` from a normalised bank `[K, T, D]`."""
        return self._by_heads(self.to_key(bank))

    def _by_heads(self, states: Tensor) -> Tensor:
        by_heads: Tensor = states.unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3).contiguous()
        return by_heads

    def prior_bias(self, scores: Tensor) -> Tensor | None:
        """The document prior's scores `[B, k]` weighted by this block's heads, `[B, H, k]`; None without a prior."""
        scale = self.prior_weights
        return None if scale is None else weighed(scores[:, None], scale[:, None])

    @property
    def prior_weights(self) -> Tensor | None:
        """Each head's weight of the document prior's scores, `[H]`; None without a prior."""
        if self.prior_scale is None or self.training:
            return self.prior_scale
        return self.prior_sharpness * self.prior_scale

    def forward(
        self, tokens: Tensor, attend: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the block.

        Args:
            tokens: `[B, T, D]`.
            attend: function from the block's queries `[B, H, T, d]` to attended values and attention mass.

        Returns:
            The new tokens `[B, T, D]`; and the attention mass `[B, K]`, or None if `attend` returns none.
        """
        query = self.to_query(self.norm(tokens)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        attended, shares = attend(query * query.shape[-1] ** -0.5)
        read = self.to_out(attended.transpose(1, 2).flatten(2))
        tokens = read if self.readout else tokens + read
        return tokens + self.feed_forward(tokens), shares

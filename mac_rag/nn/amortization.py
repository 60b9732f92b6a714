"""The amortization network g_amort and the input encoder g_input: a text becomes T memory tokens, in three designs.

The backbone is any transformers model as it is; the T learned vectors are given as embeddings, and one two-layer MLP
for each output token maps the backbone's width to D (appendix A). Padding is masked everywhere and takes up no
position, so a text has the same memory tokens whatever it is batched with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TokenMLPs(nn.Module):
    """T separate two-layer MLPs with a skip connection, one for each token position.

    Args:
        tokens: T.
        width_in: width of the backbone.
        width_out: D.
        inner_width: of the hidden layer; None for the backbone's.
    """

    def __init__(self, tokens: int, width_in: int, width_out: int, inner_width: int | None = None) -> None:
        super().__init__()
        inner_width = inner_width or width_in
        self.norm = nn.LayerNorm(width_in)
        self.inner = nn.Parameter(torch.empty(tokens, width_in, inner_width))
        self.inner_bias = nn.Parameter(torch.zeros(tokens, inner_width))
        self.outer = nn.Parameter(torch.empty(tokens, inner_width, width_out))
        self.outer_bias = nn.Parameter(torch.zeros(tokens, width_out))
        self.skip = nn.Identity() if width_in == width_out else nn.Linear(width_in, width_out, bias=False)
        for weight in (self.inner, self.outer):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, states: Tensor) -> Tensor:
        """`[K, T, width_in] -> [K, T, D]`."""
        hidden = torch.einsum("kti,tio->kto", self.norm(states), self.inner) + self.inner_bias
        mapped = torch.einsum("kti,tio->kto", hidden.tanh(), self.outer) + self.outer_bias
        skipped: Tensor = self.skip(states)
        return mapped + skipped


class AmortizationNetwork(nn.Module):
    """A backbone, T learned input vectors and T MLPs; subclasses say how the vectors meet the text.

    Args:
        backbone: a transformers model without a language-modelling head.
        tokens: T.
        width: D.
        mlp_width: hidden width of the MLPs; None for the backbone's.
    """

    def __init__(self, backbone: Any, tokens: int, width: int, mlp_width: int | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        backbone_width: int = backbone.config.hidden_size
        self.queries = nn.Parameter(self.initial_scale() * torch.randn(tokens, backbone_width))
        self.mlps = TokenMLPs(tokens, backbone_width, width, mlp_width)

    def initial_scale(self) -> float:
        """Standard deviation of the learned vectors at their start: that of the embeddings they stand beside."""
        return float(self.backbone.get_input_embeddings().weight.detach().float().std())

    @property
    def tokens(self) -> int:
        return self.queries.shape[0]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encodes a batch of texts.

        Args:
            input_ids: `[K, L]`, padded on the right.
            attention_mask: `[K, L]`, 1 for tokens and 0 for padding.

        Returns:
            Memory tokens `[K, T, D]`.
        """
        states = self.states(input_ids, attention_mask)
        tokens: Tensor = self.mlps(states.to(self.queries.dtype))
        return tokens

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The backbone's outputs for the learned vectors, `[K, T, backbone width]`."""
        raise NotImplementedError

    def _embedded(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the text `[K, L, w]` and the learned vectors for each text `[K, T, w]`."""
        embedded = self.backbone.get_input_embeddings()(input_ids)
        return embedded, self.queries.to(embedded.dtype).expand(len(input_ids), -1, -1)


class EncoderDecoder(AmortizationNetwork):
    """T5 with the learned vectors as its decoder's input: the paper's default."""

    def initial_scale(self) -> float:
        return 0.02  # alone in the decoder, as published

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        queries = self.queries.to(self.backbone.get_input_embeddings().weight.dtype)
        output = self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_inputs_embeds=queries.expand(len(input_ids), -1, -1),
            use_cache=False,
        )
        states: Tensor = output.last_hidden_state
        return states


class EncoderOnly(AmortizationNetwork):
    """A bidirectional encoder with the learned vectors in front of the text.

    In front, because there their positions do not depend on the length of the text or its padding.
    """

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        embedded, queries = self._embedded(input_ids)
        output = self.backbone(
            inputs_embeds=torch.cat([queries, embedded], 1),
            attention_mask=torch.cat([attention_mask.new_ones(queries.shape[:2]), attention_mask], 1),
        )
        states: Tensor = output.last_hidden_state[:, : self.tokens]
        return states


class DecoderOnly(AmortizationNetwork):
    """A causal LM with the learned vectors behind the text; positions skip the padding between them."""

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        embedded, queries = self._embedded(input_ids)
        mask = torch.cat([attention_mask, attention_mask.new_ones(queries.shape[:2])], 1)
        output = self.backbone(
            inputs_embeds=torch.cat([embedded, queries], 1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        )
        states: Tensor = output.last_hidden_state[:, -self.tokens :]
        return states


DESIGNS: dict[str, type[AmortizationNetwork]] = {
    "encoder-decoder": EncoderDecoder,
    "encoder-only": EncoderOnly,
    "decoder-only": DecoderOnly,
}

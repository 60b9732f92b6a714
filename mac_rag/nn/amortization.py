"""The amortization network g_amort and the input encoder g_input: a text becomes T memory tokens, in four designs.

The backbone is any unchanged transformers model. T learned vectors are its input or attend to its output, and one
two-layer MLP for each of them maps the backbone's width to D (appendix A). Padding is masked everywhere and takes up no
position, so a text has the same memory tokens in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

from mac_rag.nn.dtypes import widest_dtype
from mac_rag.nn.lexical import HashedBM25, NamedYears
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.unpadded_bert import Reading, last_states


class ResidualLinear(nn.Module):
    """`x + W x`, where W starts at zero: a map that starts as the identity.

    W is stored apart from the identity: added to its ones, the small weights would be lost in rounding.

    Args:
        width: width of x.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.added = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.added.weight)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., width] -> [..., width]`."""
        added: Tensor = self.added(states)
        return states + added


# Initial values of a pooling encoder: the standard deviation of a memory token's attention, in stretches; and the scale
# of its MLPs relative to their skip connection.
_REACH, _MLP_SCALE = 0.5, 0.1
_LEAST_SALIENCE = 1e-4


class TokenMLPs(nn.Module):
    """T separate two-layer MLPs with a skip connection, one for each token position.

    Args:
        tokens: T.
        width_in: the backbone's width.
        width_out: D.
        inner_width: width of the hidden layer; None for the backbone's width.
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
    """A backbone, T learned input vectors and T MLPs. Subclasses define how the vectors read the text.

    Args:
        backbone: a transformers model without a language-modelling head.
        tokens: T.
        width: D.
        mlp_width: hidden width of the MLPs; None for the backbone's width.
        sentence_encoder: a transformers model of width D; its mean state of the text is the first of the T tokens. None
            without one.
        hashed_bm25: makes R lexical vectors of the text; None without them.

    Attributes:
        years: makes one more lexical vector, of the years that the text names; None without it.
        encodes_questions: True if the texts are questions; their lexical vectors (without years) have length 1 in all.
        normalises: True if memory tokens, except a sentence encoder's, have a mean of 0 and a variance of 1.
    """

    normalises = False

    def __init__(
        self,
        backbone: Any,
        tokens: int,
        width: int,
        mlp_width: int | None = None,
        sentence_encoder: Any = None,
        hashed_bm25: HashedBM25 | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.sentence_encoder = sentence_encoder
        self.hashed_bm25 = hashed_bm25
        self.years: NamedYears | None = None
        self.encodes_questions = False
        learned = tokens if sentence_encoder is None else tokens - 1
        backbone_width: int = backbone.config.hidden_size
        self.queries = nn.Parameter(self.initial_scale() * torch.randn(learned, backbone_width))
        self.mlps = TokenMLPs(learned, backbone_width, width, mlp_width)

    def initial_scale(self) -> float:
        """Initial standard deviation of the learned vectors: that of the token embeddings, which they stand beside."""
        weight = self.backbone.get_input_embeddings().weight
        return 1.0 if weight.is_meta else float(weight.detach().float().std())

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.queries) if self.sentence_encoder is None else len(self.queries) + 1

    def forward(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> MemoryTokens:
        """Encodes a batch of texts.

        Args:
            input_ids: `[K, L]`, padded on the right.
            attention_mask: `[K, L]`, 1 for tokens and 0 for padding.
            read: computes the states of encoders that read the text without the learned vectors.

        Returns:
            Memory tokens of K texts.
        """
        return self.memory_tokens(self.states(input_ids, attention_mask, read), input_ids, attention_mask, read)

    def memory_tokens(
        self, states: Tensor, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states
    ) -> MemoryTokens:
        """Memory tokens of K texts from their `states`; other arguments as for `forward`."""
        tokens: Tensor = self.mlps(states.to(self.queries.dtype))
        if self.normalises:
            tokens = functional.layer_norm(tokens, tokens.shape[-1:])
        if self.sentence_encoder is not None:
            with torch.no_grad():
                sentence = self.sentence_token(input_ids, attention_mask, read)
            tokens = torch.cat([sentence.to(tokens.dtype), tokens], 1)
        lexical = self.lexical(input_ids, attention_mask)
        return MemoryTokens(tokens, None if lexical is None else lexical.to(tokens.dtype))

    def lexical(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | None:
        """Lexical vectors `[K, R, D]`; None without hashed BM25."""
        if self.hashed_bm25 is None:
            return None
        vectors: Tensor = self.hashed_bm25(input_ids, attention_mask)
        if self.encodes_questions:
            vectors = functional.normalize(vectors.flatten(1), dim=-1).view_as(vectors)
        if self.years is None:
            return vectors
        years: Tensor = self.years(input_ids, attention_mask, self.encodes_questions)
        return torch.cat([vectors, years[:, None].to(vectors.dtype)], 1)

    def sentence_token(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> Tensor:
        """The sentence encoder's mean state of each text, `[K, 1, D]`; with gradients if that encoder is trained."""
        text = read(self.sentence_encoder, input_ids, attention_mask)
        shares = attention_mask[..., None] / attention_mask.sum(1)[:, None, None]
        return (text * shares).sum(1, keepdim=True)

    def states(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> Tensor:
        """The backbone's outputs for the learned vectors, `[K, learned vectors, backbone width]`."""
        raise NotImplementedError

    def _embedded(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the text `[K, L, w]` and the learned vectors for each text `[K, T, w]`."""
        embedded = self.backbone.get_input_embeddings()(input_ids)
        return embedded, self.queries.to(embedded.dtype).expand(len(input_ids), -1, -1)


class EncoderDecoder(AmortizationNetwork):
    """T5, with the learned vectors as its decoder's input: the paper's default."""

    def initial_scale(self) -> float:
        return 0.02  # as published; in the decoder there are no embeddings beside them

    def states(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> Tensor:
        # A quantised encoder is frozen and may be bf16, but its decoder is trained in fp32.
        dtype = widest_dtype(self.backbone.get_decoder())
        encoded = self.backbone.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        output = self.backbone(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded.to(dtype)),
            attention_mask=attention_mask,
            # A copy: without gradients, a view of a parameter would still claim them, and PyTorch's FLOP counter fails.
            decoder_inputs_embeds=self.queries.to(dtype).repeat(len(input_ids), 1, 1),
            use_cache=False,
        )
        states: Tensor = output.last_hidden_state
        return states


class EncoderOnly(AmortizationNetwork):
    """A bidirectional encoder with the learned vectors before the text.

    There, their positions do not depend on the length of the text or its padding.
    """

    def states(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> Tensor:
        embedded, queries = self._embedded(input_ids)
        output = self.backbone(
            inputs_embeds=torch.cat([queries, embedded], 1),
            attention_mask=torch.cat([attention_mask.new_ones(queries.shape[:2]), attention_mask], 1),
        )
        states: Tensor = output.last_hidden_state[:, : len(self.queries)]
        return states


class EncoderPooling(AmortizationNetwork):
    """A bidirectional encoder that reads the text alone, and one layer of attention from the learned vectors to it.

    The cross-attention is that of T5's decoder or of Lee et al. (2019, "Set Transformer"), but each memory token has
    its own stretch of the text: the log of a normal density around the stretch, whose width each head learns, is added
    to the logits. So a memory token starts as the mean of the states of a few words, which an LM can read, and the mean
    of all memory tokens starts as the vector by which sentence encoders compare texts. A word's share of the stretches
    is its learned salience: a name or a number may have a memory token to itself while other words share one.
    """

    def __init__(
        self,
        backbone: Any,
        tokens: int,
        width: int,
        mlp_width: int | None = None,
        sentence_encoder: Any = None,
        hashed_bm25: HashedBM25 | None = None,
    ) -> None:
        super().__init__(backbone, tokens, width, mlp_width, sentence_encoder, hashed_bm25)
        inner: int = backbone.config.hidden_size
        self.heads: int = backbone.config.num_attention_heads
        self.norm = nn.LayerNorm(inner)
        self.to_key, self.to_value, self.to_out = (ResidualLinear(inner) for _ in range(3))
        self.log_reach = nn.Parameter(torch.full((self.heads,), _REACH).log())
        self.salience = nn.Linear(inner, 1)
        with torch.no_grad():
            self.mlps.outer.mul_(_MLP_SCALE)
            self.salience.weight.zero_()

    def initial_scale(self) -> float:
        return 0.0  # training learns what a memory token attends to within its stretch

    def states(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> Tensor:
        return self.pooled(self.text_states(input_ids, attention_mask, read), attention_mask)

    def pooled(self, text: Tensor, attention_mask: Tensor) -> Tensor:
        """The result of `states` from the texts' `text_states`, `[K, L, backbone width]`."""
        query, key, value = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.queries.expand(len(text), -1, -1), self.to_key(self.norm(text)), self.to_value(text))
        )
        pooled = functional.scaled_dot_product_attention(
            query.to(key.dtype), key, value, attn_mask=self.places(text, attention_mask).to(key.dtype)
        )
        states: Tensor = self.to_out(pooled.transpose(1, 2).flatten(2))
        return states

    def text_states(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> Tensor:
        """The backbone's outputs for the text, `[K, L, backbone width]`."""
        return read(self.backbone, input_ids, attention_mask).to(self.queries.dtype)

    def places(self, text: Tensor, attention_mask: Tensor) -> Tensor:
        """Bias of the logits, `[K, H, T, L]`: each word's log salience and its distance from each token's stretch."""
        room = functional.softplus(self.salience(text).squeeze(-1).float()) * attention_mask
        words = (room.cumsum(1) - 0.5 * room) / room.sum(1, keepdim=True)  # in (0, 1)
        count = len(self.queries)
        centres = (torch.arange(count, device=words.device) + 0.5) / count
        stretches = (words[:, None] - centres[:, None]) * count  # [K, T, L]
        logits = -0.5 * (stretches[:, None] / self.log_reach.exp()[:, None, None]).square()
        logits = logits + room.clamp(min=_LEAST_SALIENCE).log()[:, None, None]
        return logits.masked_fill(~attention_mask[:, None, None].bool(), -torch.inf)


class DecoderOnly(AmortizationNetwork):
    """A causal LM with the learned vectors after the text; position numbers skip the padding between them."""

    def states(self, input_ids: Tensor, attention_mask: Tensor, read: Reading = last_states) -> Tensor:
        embedded, queries = self._embedded(input_ids)
        mask = torch.cat([attention_mask, attention_mask.new_ones(queries.shape[:2])], 1)
        output = self.backbone(
            inputs_embeds=torch.cat([embedded, queries], 1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        )
        states: Tensor = output.last_hidden_state[:, -len(self.queries) :]
        return states


DESIGNS: dict[str, type[AmortizationNetwork]] = {
    "encoder-decoder": EncoderDecoder,
    "encoder-only": EncoderOnly,
    "encoder-pooling": EncoderPooling,
    "decoder-only": DecoderOnly,
}

"""BERT's states of a batch of texts without its padding, for a CPU and without gradients.

The tokens of all texts are concatenated, `[N, width]`, so that everything except attention skips padding. Query, key
and value are one matrix product, GELU is fused into another, and weights are laid out once for the CPU's kernels. The
states equal the model's up to rounding. Products stay in fp32: in bf16, on a CPU with instructions for it, memory
tokens change by 0.5 % and answers from them become worse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertGenerationEncoder, BertModel

from mac_rag.nn.cpu_linear import CPULinear, PackedLinear

# Computes the states `[K, L, width]` of texts from a backbone, token ids and mask.
Reading: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]

_LINEAR = ("query", "key", "value", "dense")


class UnpaddedBert:
    """A transformers BERT with bidirectional attention. Later changes of the model's weights have no effect.

    Args:
        model: a model for which `is_supported` is True.
    """

    def __init__(self, model: Any) -> None:
        heads = model.config.num_attention_heads
        self._embeddings: nn.Module = model.embeddings
        self._layers = [_Layer(layer, heads) for layer in model.encoder.layer]

    @staticmethod
    def is_supported(model: Any) -> bool:
        """True for a bidirectional BERT in fp32 on the CPU, not in training, without adapters or quantised layers."""
        if not isinstance(model, BertModel | BertGenerationEncoder) or model.training:
            return False
        reads_both_ways: bool = getattr(model, "bidirectional", not model.config.is_decoder)
        linear = [module for name, module in model.encoder.named_modules() if name.endswith(_LINEAR)]
        return (
            reads_both_ways
            and model.config.hidden_act == "gelu"
            and all(type(module) in (nn.Linear, CPULinear) for module in linear)
            and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in model.parameters())
        )

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The model's `last_hidden_state` `[B, L, width]`, with zeros for padding.

        Args:
            input_ids: `[B, L]`.
            attention_mask: `[B, L]`, 1 for tokens and 0 for padding.
        """
        shown = attention_mask.bool()
        where = shown.flatten().nonzero()[:, 0]
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids).flatten()[where]
        # As texts of one token: an embedding depends only on the token and its position.
        embedded = self._embeddings(input_ids=input_ids.flatten()[where, None], position_ids=places[:, None])
        x: Tensor = embedded[:, 0]
        mask = None if len(where) == shown.numel() else shown[:, None, None]
        heads = x.new_zeros(*shown.shape, 3 * x.shape[1])
        for layer in self._layers:
            x = layer(x, where, heads, mask)
        states = x.new_zeros(*shown.shape, x.shape[1])
        states.flatten(0, 1).index_copy_(0, where, x)
        return states


class _Layer:
    def __init__(self, layer: Any, heads: int) -> None:
        attention, after = layer.attention.self, layer.attention.output
        parts = attention.query, attention.key, attention.value
        self._heads = heads
        self._query_key_value = PackedLinear(
            torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        )
        self._out = PackedLinear(after.dense.weight, after.dense.bias)
        self._up = PackedLinear(layer.intermediate.dense.weight, layer.intermediate.dense.bias)
        self._down = PackedLinear(layer.output.dense.weight, layer.output.dense.bias)
        self._norm: nn.Module = after.LayerNorm
        self._last_norm: nn.Module = layer.output.LayerNorm

    def __call__(self, x: Tensor, where: Tensor, room: Tensor, mask: Tensor | None) -> Tensor:
        """The states after this layer.

        Args:
            x: `[N, width]`.
            where: `[N]`, indices of these tokens in the flattened padded batch, below B L.
            room: `[B, L, 3 width]`, zeros for padding; the rest is overwritten.
            mask: `[B, 1, 1, L]`, False for padding; None without padding.
        """
        x = self._norm(x + self._out(self._attended(self._query_key_value(x), where, room, mask)))
        states: Tensor = self._last_norm(x + self._down(self._up(x, gelu=True)))
        return states

    def _attended(self, projected: Tensor, where: Tensor, room: Tensor, mask: Tensor | None) -> Tensor:
        """The attended values of each token, `[N, width]`.

        Only here are texts padded: with one call for each text, threads would wait for each other all the time.
        """
        room.flatten(0, 1).index_copy_(0, where, projected)
        query, key, value = room.unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, where)


_State: TypeAlias = tuple[object, ...]  # identifies the weights that a model has at the moment
_KNOWN: WeakKeyDictionary[nn.Module, tuple[_State, UnpaddedBert | None]] = WeakKeyDictionary()


def unpadded(model: nn.Module) -> UnpaddedBert | None:
    """The `UnpaddedBert` of a model; None if it is not supported. It is reused until the model's weights change.

    An optimiser may change weights without a new version of their tensors: call `forget` after training the model.
    """
    weights = [*model.parameters()]
    versions = (-1 if weight.is_inference() else weight._version for weight in weights)
    state = (*zip(map(Tensor.data_ptr, weights), versions), model.training, getattr(model, "bidirectional", None))
    known = _KNOWN.get(model)
    if known is None or known[0] != state:
        known = state, UnpaddedBert(model) if UnpaddedBert.is_supported(model) else None
        _KNOWN[model] = known
    return known[1]


def forget(model: nn.Module) -> None:
    """Drops the `UnpaddedBert` of every model within a module."""
    for module in model.modules():
        _KNOWN.pop(module, None)


def last_states(backbone: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The backbone's own `last_hidden_state`."""
    states: Tensor = backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return states


@torch.no_grad()
def last_states_without_gradients(backbone: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """As `last_states`, but faster if `UnpaddedBert` supports the backbone; the states of padding may differ."""
    fast = unpadded(backbone)
    return last_states(backbone, input_ids, attention_mask) if fast is None else fast(input_ids, attention_mask)

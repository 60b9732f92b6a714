"""What the base LM keeps of a text that it has read, which the memory of the text can be taught to imitate.

A model with attention keeps keys and values of every word and answers by them. A prefix holds keys and values, too, so
the LM itself shows what should stand there, in each layer and for each document: a denser lesson than answers are, that
asks for no questions. It is distillation from the LM with the document in front of it (Snell et al., 2022, "Learning by
distilling context"), of what it keeps rather than of what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mac_rag.encoder import similar_lengths
from mac_rag.errors import ConfigError
from mac_rag.nn.amortization import EncoderPooling
from mac_rag.nn.modulation import PrefixModulation, PrefixTuning
from mac_rag.prefix_lm import parts_argument

if TYPE_CHECKING:
    from mac_rag.model import MACModel

_ALIKE = 1.5  # the longest of texts that are read together, in lengths of the shortest


def require_imitation(model: MACModel) -> EncoderPooling:
    """The amortization network of a model whose memory can imitate what the LM keeps.

    Raises:
        ConfigError: when its memory tokens do not stand for words of the text, or its prefix not for memory tokens.
    """
    network, prefix = model.amortization.network, model.modulation
    if not isinstance(network, EncoderPooling) or not isinstance(prefix, PrefixTuning) or prefix.slots > 1:
        raise ConfigError("only a prefix of one slot, of encoders of design encoder-pooling, can imitate the base LM")
    if model.amortization.tokenizer.get_vocab() != model.base_lm.tokenizer.get_vocab():
        raise ConfigError(
            f"the amortization network {model.config.amortization.name!r} cannot imitate a base LM that cuts texts "
            "into other tokens"
        )
    return network


@torch.no_grad()
def kept_by_lm(model: MACModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Keys and values that the LM keeps of texts, each the mean over the words that a memory token stands for.

    Args:
        model: whose memory tokens stand for words; see `require_imitation`.
        rows: token ids of K texts.

    Returns:
        `[K, layers, 2, heads, T, head width]`, as a prefix has them.
    """
    network = require_imitation(model)
    kept: list[Tensor] = []
    groups = similar_lengths([len(row) for row in rows], _ALIKE)
    for group in groups:
        length = len(rows[group[-1]])
        filled = [[*rows[i], *[0] * (length - len(rows[i]))] for i in group]
        ids = torch.tensor(filled, device=model.device)
        mask = torch.tensor([[1] * len(rows[i]) + [0] * (length - len(rows[i])) for i in group], device=model.device)
        lm = model.base_lm.model
        cache = lm(
            input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **parts_argument(lm, mask)
        ).past_key_values
        layers = torch.stack([torch.stack([layer[0], layer[1]], 1) for layer in cache], 1)  # [K, layers, 2, H, L, d]
        words = network.stretches(ids, mask).to(layers.dtype)
        kept.append(torch.einsum("btl,bnkhld->bnkhtd", words, layers))
    order = torch.tensor([i for group in groups for i in group], device=model.device)
    return torch.cat(kept)[order.argsort()]


def imitation_loss(model: MACModel, rows: Sequence[Sequence[int]], phi: Tensor) -> Tensor:
    """The share of the variance of what the LM keeps that the prefix misses, a mean over layers, keys and values.

    Args:
        model: as for `kept_by_lm`.
        rows: token ids of K texts.
        phi: their memory tokens `[K, T, D]`.

    Raises:
        ConfigError: as `require_imitation`.
    """
    kept = kept_by_lm(model, rows).float()
    prefix = model.modulation(phi)
    assert isinstance(prefix, PrefixModulation)
    others = (0, 3, 4, 5)
    missed = (prefix.keys_values.float() - kept).square().mean(others)
    varied = (kept - kept.mean((0, 4), keepdim=True)).square().mean(others)
    return (missed / varied).mean()

"""An LM to start from: the weights of all-MiniLM-L6-v2 as a causal decoder.

A bidirectional encoder becomes a decoder by masking the words to come (Rothe et al., 2020, "Leveraging Pre-trained
Checkpoints for Sequence Generation Tasks"): it keeps what it knows of words and learns to write. On a CPU this is the
way to an LM that reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BertGenerationConfig, BertGenerationDecoder

from mac_rag.minilm import minilm_encoder

_SAID = 6.0  # strength of what the last layer attends to, beside its own token
_READ = 16  # sequences are enough to know the mean state
_UNSEEN = 0.05  # how often a token counts as seen that never was


def minilm_decoder(positions: int) -> BertGenerationDecoder:
    """MiniLM as a causal LM with its embeddings tied to the output.

    Args:
        positions: longest sequence.

    Raises:
        ModelLoadError: when MiniLM's package is missing or damaged.
    """
    encoder = minilm_encoder(positions)
    config = BertGenerationConfig(**{**encoder.config.to_dict(), "is_decoder": True, "tie_word_embeddings": True})
    lm: Any = BertGenerationDecoder(config)
    lm.bert.load_state_dict(encoder.state_dict())
    result: BertGenerationDecoder = lm
    return result


@torch.no_grad()
def say_what_is_attended(lm: BertGenerationDecoder, ids: Tensor, targets: Tensor) -> None:
    """Turns the last layer, which described the text, into one that says the tokens that it attends to.

    MiniLM's states still show which token they stand for. The last layer's values and outputs become the identity, so
    that attention moves tokens to the output, as in a pointer network; what it attends to is left to training. The
    output's bias becomes the tokens' log frequency, which training would otherwise spend its first steps on.

    Args:
        lm: `minilm_decoder`'s.
        ids, targets: `[B, L]` of some training batches; targets of -100 are none.
    """
    body: Any = lm.bert
    ids = ids[:_READ]
    text = ids != lm.config.pad_token_id
    last = body.encoder.layer[-1]
    before = body(ids, output_hidden_states=True, use_cache=False).hidden_states[-2][text].mean(0)
    attention, output = last.attention.self, last.attention.output
    identity = torch.eye(len(before), device=before.device)
    attention.value.weight.copy_(identity)
    attention.value.bias.copy_(-before)  # what all tokens share says nothing
    output.dense.weight.copy_(_SAID * identity)
    last.output.dense.weight.zero_()
    for bias in (output.dense.bias, output.LayerNorm.bias, last.output.dense.bias, last.output.LayerNorm.bias):
        bias.zero_()
    for norm in (output.LayerNorm, last.output.LayerNorm):
        norm.weight.fill_(1)
    shared = body(ids, use_cache=False).last_hidden_state[text].mean(0)
    counts = torch.bincount(targets[targets != -100], minlength=lm.config.vocab_size) + _UNSEEN
    head: Any = lm.lm_head
    head.bias.copy_((counts / counts.sum()).log() - body.embeddings.word_embeddings.weight @ shared)

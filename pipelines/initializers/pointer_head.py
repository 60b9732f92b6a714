"""What an LM from MiniLM's weights starts with: a last layer that says the words that it attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mac_rag.lm.prefix_lm import PrefixLM

_SAID = 6.0  # strength of what the last layer attends to, beside its own token
_UNSEEN = 0.05  # how often a token counts as seen that never was


@torch.no_grad()
def say_what_is_attended(lm: PrefixLM, prompts: Tensor, answers: Tensor) -> None:
    """Turns the last layer, which described the text, into one that says the tokens that it attends to.

    MiniLM's states still show which token they stand for. The last layer's values and outputs become the identity, so
    that attention moves tokens to the output, as in a pointer network; what it attends to is left to training. The
    output's bias becomes the tokens' log frequency, which training would otherwise spend its first steps on.

    Args:
        lm: the LM.
        prompts: `[B, L]`, some prompts, padded.
        answers: `[N]`, tokens of answers.
    """
    body: Any = lm.bert
    text = prompts.ne(int(lm.config.pad_token_id or 0))
    last = body.encoder.layer[-1]
    mask = text.long()
    before = body(prompts, mask, output_hidden_states=True, use_cache=False).hidden_states[-2][text].mean(0)
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
    shared = body(prompts, mask, use_cache=False).last_hidden_state[text].mean(0)
    counts = torch.bincount(answers, minlength=lm.config.vocab_size) + _UNSEEN
    head: Any = lm.lm_head
    head.bias.copy_((counts / counts.sum()).log() - body.embeddings.word_embeddings.weight @ shared)

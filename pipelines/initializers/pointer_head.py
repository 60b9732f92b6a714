"""First weights of an LM made of MiniLM: its last layer outputs the tokens that it attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mac_rag.lm.prefix_lm import PrefixLM

_ATTENDED = 6.0  # scale of the attended tokens beside a position's own token
_UNSEEN = 0.05  # count of a token that occurs in no answer


@torch.no_grad()
def init_pointer_head(lm: PrefixLM, prompts: Tensor, answers: Tensor) -> None:
    """Makes the last layer output the tokens that it attends to, as a pointer network does (Vinyals et al., 2015).

    MiniLM's states still encode their own token. The last layer's values and outputs become the identity, so that
    attention moves tokens to the output; training learns what to attend to. The output's bias becomes the log frequency
    of tokens in answers, on which training would otherwise spend its first steps.

    Args:
        lm: the LM; it is changed in place.
        prompts: token ids `[B, L]` of some prompts, padded.
        answers: token ids `[N]` of answers.
    """
    body: Any = lm.bert
    text = prompts.ne(int(lm.config.pad_token_id or 0))
    last = body.encoder.layer[-1]
    mask = text.long()
    before = body(prompts, mask, output_hidden_states=True, use_cache=False).hidden_states[-2][text].mean(0)
    attention, output = last.attention.self, last.attention.output
    identity = torch.eye(len(before), device=before.device)
    attention.value.weight.copy_(identity)
    attention.value.bias.copy_(-before)  # the mean of all tokens carries no information
    output.dense.weight.copy_(_ATTENDED * identity)
    last.output.dense.weight.zero_()
    for bias in (output.dense.bias, output.LayerNorm.bias, last.output.dense.bias, last.output.LayerNorm.bias):
        bias.zero_()
    for norm in (output.LayerNorm, last.output.LayerNorm):
        norm.weight.fill_(1)
    shared = body(prompts, mask, use_cache=False).last_hidden_state[text].mean(0)
    counts = torch.bincount(answers, minlength=lm.config.vocab_size) + _UNSEEN
    head: Any = lm.lm_head
    head.bias.copy_((counts / counts.sum()).log() - body.embeddings.word_embeddings.weight @ shared)

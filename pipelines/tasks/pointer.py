"""A prefix LM whose last layer points at what an answer copies: its first weights, and a loss on its attention.

The answer's own loss says which token comes next, and leaves open which of hundreds of tokens it is copied from. A
reader that is told so learns from fewer questions (Liu et al., 2016, "Neural Machine Translation with Supervised
Attention").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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


class LastAttention:
    """Queries, keys and mask of an LM's last attention layer, kept from one forward pass.

    Attributes:
        queries, keys: `[B, L, D]`.
        mask: `[B, 1, L, L]`, true or zero where attention is allowed.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor

    def scores(self, rows: int, heads: int) -> Tensor:
        """Log-probabilities `[B, H, rows, L]` with which the heads attend from the last `rows` positions."""
        queries, keys = (
            states.unflatten(-1, (heads, -1)).transpose(1, 2).float() for states in (self.queries[:, -rows:], self.keys)
        )
        allowed = self.mask[:, :, -rows:]
        allowed = allowed if allowed.dtype == torch.bool else allowed == 0
        scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[-1])
        log_weights: Tensor = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        return log_weights


@contextmanager
def last_attention(lm: Any) -> Iterator[LastAttention]:
    """Keeps queries, keys and mask of the last attention layer of a prefix LM while the block runs."""
    kept = LastAttention()
    layer: Any = lm.base_model.encoder.layer[-1].attention.self

    def keep_mask(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        kept.mask = named["attention_mask"] if "attention_mask" in named else inputs[1]

    def keep_queries(_: nn.Module, __: object, output: Tensor) -> None:
        kept.queries = output

    def keep_keys(_: nn.Module, __: object, output: Tensor) -> None:
        kept.keys = output

    hooks = [
        layer.register_forward_pre_hook(keep_mask, with_kwargs=True),
        layer.query.register_forward_hook(keep_queries),
        layer.key.register_forward_hook(keep_keys),
    ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def places_of(answer: list[int], ids: list[int]) -> list[int]:
    """Positions at which an answer begins in a text; both are token ids."""
    length = len(answer)
    return [i for i in range(len(ids) - length + 1) if length and ids[i : i + length] == answer]


def pointer_loss(
    attention: LastAttention,
    heads: int,
    lengths: Sequence[int],
    answers: Sequence[int],
    copied: Sequence[Sequence[int]],
) -> Tensor:
    """Negative log of the share of attention, over all heads, on the tokens that each token of an answer copies: a sum.

    Args:
        attention: of B rows, padded on the left.
        lengths: number of tokens of each row.
        answers: number of tokens of each row's answer, which ends it, with the token that ends an answer.
        copied: for each row, the beginnings of the spans that equal the answer; none if nothing holds it.
    """
    longest, width = max(answers), attention.keys.shape[1]
    # Token t of the answer is predicted at the place before it. The one that ends it is not copied.
    told = [
        (row, longest - answer + step, width - length + place + step)
        for row, (length, answer, places) in enumerate(zip(lengths, answers, copied, strict=True))
        for place in places
        for step in range(answer - 1)
    ]
    target = torch.zeros(len(lengths), longest, width, dtype=torch.bool)
    if told:
        target[torch.tensor(told).unbind(1)] = True
    # The last place predicts nothing, so one place more is read, and the last one is left out.
    scores = attention.scores(longest + 1, heads)[:, :, :-1]
    target = target.to(scores.device) & scores[:, 0].isfinite()  # tokens may be hidden from what follows them
    chosen = target.any(-1)
    if not bool(chosen.any()):
        return scores.new_zeros(())
    pointed = scores.masked_fill(~target[:, None], -torch.inf).logsumexp(-1).transpose(1, 2)[chosen]
    return (math.log(heads) - pointed.logsumexp(-1)).sum()

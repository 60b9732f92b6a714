"""A start for a small LM: attention heads that copy what followed a token the last time it stood in the text.

Small LMs find these "induction heads" (Olsson et al., 2022, "In-context Learning and Induction Heads") late, and
nothing that answers from a document works before. They can be written down: a head of the first layer that attends to
the token before and notes it, and heads of the second layer that look for the note of the present token and say what
they find there. Training starts from there, as from any initialisation, and changes them freely.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_CONSTANT = 0.5  # first component of every embedding: what the positional head sees in all tokens alike
_SHARPNESS = 8.0  # of the attention to the token before
_MATCH = 3.0  # of the attention to the note of the present token
_NOTE = 4.0  # strength of the note
_COPY = 8.0  # strength of what is said
_REACH = 512  # tokens over which rotary positions may turn a query's channels by one radian at most


@torch.no_grad()
def wire_copying(lm: Any) -> None:
    """Writes the copying heads into the first two layers of a Llama-style LM.

    Its embeddings, which must be tied to the output, are scaled to length one.

    Args:
        lm: its config's `rope_theta` must be large enough (500,000) to leave channels that rotary positions hardly
            turn within 512 tokens: by these the second layer matches.
    """
    config = lm.config
    width, heads = config.hidden_size, config.num_attention_heads
    channels = width // heads
    theta = config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(channels // 2) * 2 / channels)
    slow = (frequencies * _REACH < 1).nonzero()[:, 0]
    slow = torch.cat([slow, slow + channels // 2])
    embeddings = lm.model.embed_tokens.weight
    embeddings.copy_(functional.normalize(embeddings))
    embeddings[:, 0] = _CONSTANT
    # Directions of the residual stream at right angles to each other and to the constant.
    basis = functional.pad(torch.linalg.qr(torch.randn(width - 1, width - 1)).Q, (1, 0))
    present, note = basis[: len(slow)], basis[len(slow) : 2 * len(slow)]
    first, second = (layer.self_attn for layer in lm.model.layers[:2])
    _attend_to_previous(first, frequencies, _SHARPNESS / (_CONSTANT / (1 + _CONSTANT**2) ** 0.5 * width**0.5))
    _carry(first, slice(0, channels), present, note, _NOTE / width**0.5)
    for head in range(heads):
        rows = slice(head * channels, (head + 1) * channels)
        for projection, directions in ((second.q_proj, present), (second.k_proj, note)):
            projection.weight[rows] = 0
            projection.weight[rows].index_copy_(0, slow, directions * _MATCH)
        _carry(second, rows, basis[rows], basis[rows], _COPY / width**0.5)


def _attend_to_previous(attention: Any, frequencies: Tensor, strength: float) -> None:
    """Makes the first head attend one token back, whatever the tokens are.

    Query and key are the same for all tokens; turned by their positions, they agree most where the query's is the
    key's plus one.
    """
    half = len(frequencies)
    query, key = (p.weight[: 2 * half] for p in (attention.q_proj, attention.k_proj))
    query.zero_()
    key.zero_()
    key[:half, 0] = strength
    query[:half, 0] = torch.cos(frequencies) * strength
    query[half:, 0] = -torch.sin(frequencies) * strength


def _carry(attention: Any, rows: slice, read: Tensor, write: Tensor, gain: float) -> None:
    """Makes a head read some directions `[N, D]` of what it attends to, and write them as others `[N, D]`.

    Both matrices share the gain: Adam moves all weights at one pace, and would lose the small ones within few steps.
    """
    attention.v_proj.weight[rows] = 0
    attention.o_proj.weight[:, rows] = 0
    attention.v_proj.weight[rows][: len(read)] = read * gain**0.5
    attention.o_proj.weight[:, rows][:, : len(write)] = write.T * gain**0.5

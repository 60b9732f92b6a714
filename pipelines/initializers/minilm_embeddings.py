"""Token embeddings to start from: those of all-MiniLM-L6-v2, on our tokens and in our width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.lm.minilm import minilm_folder

_RANDOM = 0.5  # length of the random part, where the other has length one


def minilm_embeddings(tokenizer: Any, width: int) -> Tensor:
    """Embeddings `[V, width]` for our tokens: the mean over MiniLM's pieces of each token's text.

    They are centred, turned to their principal axes (of which the first `width` stay), scaled to the same deviation on
    each of these, and blended with a random part that tells tokens of one text apart, such as a word in lower and upper
    case. All have length one. Tokens without a text of their own (special tokens, parts of characters) are random.

    Raises:
        ModelLoadError: as `minilm_folder`.
    """
    from transformers import AutoModel, AutoTokenizer

    folder = str(minilm_folder())
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    encoder = AutoModel.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
    table = encoder.embeddings.word_embeddings.weight.detach().float()
    means = _means(tokenizer, theirs, table)
    known = ~means.isnan().any(1)
    centred = means[known] - means[known].mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:width]
    projected = centred @ axes.T
    result = functional.normalize(torch.randn(len(tokenizer), width))
    result[known, : projected.shape[1]] *= _RANDOM
    result[known, : projected.shape[1]] += functional.normalize(projected / projected.std(0))
    return functional.normalize(result)


def _means(tokenizer: Any, theirs: Any, table: Tensor) -> Tensor:
    """The mean of MiniLM's embeddings `table` over the pieces of each of our tokens; NaN where there is none."""
    pieces = theirs.get_vocab()
    if tokenizer.get_vocab() == pieces:
        return table
    means = torch.full((len(tokenizer), table.shape[1]), torch.nan)
    for index in range(len(tokenizer)):
        text = "" if index in tokenizer.all_special_ids else tokenizer.decode([index])
        word = text.strip().lower()
        if not word or "\N{REPLACEMENT CHARACTER}" in word:
            continue
        # A token that continues a word is one there, too, if it can.
        inside = pieces.get(f"##{word}") if text[0] != " " and text[0].islower() else None
        rows = [inside] if inside is not None else theirs(word, add_special_tokens=False).input_ids
        means[index] = table[rows].mean(0)
    return means

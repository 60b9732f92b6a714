"""Token embeddings to start from: those of all-MiniLM-L6-v2, in our width."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mac_rag.lm.minilm import minilm_folder

_RANDOM = 0.5  # length of the random part, where the other has length one


def minilm_embeddings(width: int) -> Tensor:
    """Embeddings `[V, width]` of MiniLM's own tokens.

    They are centred, turned to their principal axes (of which the first `width` stay), scaled to the same deviation on
    each of these, and blended with a random part that tells tokens of one meaning apart. All have length one.

    Raises:
        ModelLoadError: as `minilm_folder`.
    """
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(str(minilm_folder()), use_safetensors=True, trust_remote_code=False)
    table = encoder.embeddings.word_embeddings.weight.detach().float()
    centred = table - table.mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:width]
    projected = centred @ axes.T
    result = functional.normalize(torch.randn(len(table), width))
    result[:, : projected.shape[1]] *= _RANDOM
    result[:, : projected.shape[1]] += functional.normalize(projected / projected.std(0))
    return functional.normalize(result)

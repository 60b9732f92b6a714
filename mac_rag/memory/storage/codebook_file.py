"""The file of a codebook: one float32 tensor `codebook` [C, D] in safetensors."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from mac_rag.untrusted_files import MalformedError, read_file

# Bytes of the file; a codebook has a few thousand codes.
_LARGEST = 256 << 20


def read_codebook(path: Path, digest: str) -> tuple[Tensor, bytes]:
    """The codebook `[C, D]` and the bytes of its file.

    Args:
        path: the file.
        digest: its sha256.

    Raises:
        FileNotFoundError: when it is missing.
        MalformedError: when it is not what was written, or not a codebook.
    """
    data = read_file(path, _LARGEST)
    if hashlib.sha256(data).hexdigest() != digest:
        raise MalformedError("its checksum differs from the manifest's")
    try:
        codebook = load_tensors(data)["codebook"]
    except (SafetensorError, KeyError) as error:
        raise MalformedError(f"it holds no codebook: {error!r:.200}") from None
    if codebook.ndim != 2 or codebook.dtype != torch.float32 or not math.prod(codebook.shape):
        raise MalformedError(f"its codebook is {list(codebook.shape)} in {codebook.dtype}, not [C, D] in float32")
    if not codebook.isfinite().all():
        raise MalformedError("its codebook has numbers that are not finite")
    return codebook, data

"""The file of what a bank's codes are looked up in, as safetensors.

It is one float32 tensor `codebook` [C, D], or in a bank with dtype pq the parts of a product quantizer.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from mac_rag.memory.rows import Codebook
from mac_rag.memory.storage.manifest import Manifest
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.untrusted_files import MalformedError, read_file

# Bytes of the file; a codebook has a few thousand codes.
_LARGEST = 256 << 20


def codebook_bytes(codebook: Codebook) -> bytes:
    """The bytes of the file."""
    tensors = {"codebook": codebook} if isinstance(codebook, Tensor) else codebook.tensors
    data: bytes = tensor_bytes({name: tensor.contiguous() for name, tensor in tensors.items()})
    return data


def read_codebook(path: Path, manifest: Manifest) -> tuple[Codebook, bytes]:
    """What codes are looked up in, and the bytes of its file.

    Args:
        path: the file.
        manifest: the manifest, which has its sha256, and says what it is and for which rows.

    Raises:
        FileNotFoundError: when it is missing.
        MalformedError: when it is not what was written, or not what the manifest says.
    """
    data = read_file(path, _LARGEST)
    if hashlib.sha256(data).hexdigest() != manifest.codebook:
        raise MalformedError("its checksum differs from the manifest's")
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise MalformedError(f"it holds no codebook: {error!r:.200}") from None
    return (_quantizer(tensors, manifest) if manifest.layout.dtype == "pq" else _codebook(tensors)), data


def _codebook(tensors: dict[str, Tensor]) -> Tensor:
    codebook = tensors.get("codebook")
    if codebook is None:
        raise MalformedError("it holds no codebook")
    if codebook.ndim != 2 or codebook.dtype != torch.float32 or not math.prod(codebook.shape):
        raise MalformedError(f"its codebook is {list(codebook.shape)} in {codebook.dtype}, not [C, D] in float32")
    if not codebook.isfinite().all():
        raise MalformedError("its codebook has numbers that are not finite")
    return codebook


def _quantizer(tensors: dict[str, Tensor], manifest: Manifest) -> ProductQuantizer:
    try:
        quantizer = ProductQuantizer.of_tensors(tensors)
    except ValueError as error:
        raise MalformedError(f"it holds {error}") from None
    if (fault := misfit(quantizer, manifest)) is not None:
        raise MalformedError(fault)
    return quantizer


def misfit(quantizer: ProductQuantizer, manifest: Manifest) -> str | None:
    """Why a quantizer cannot be that of a bank, as text; None if it can."""
    layout = manifest.layout
    if layout != layout.quantized(quantizer):
        return "its codebooks are for rows of another layout than those of the bank"
    if any(info.shape[1:] != quantizer.row_shape for info in manifest.segments):
        return "its codebooks are for rows of another shape than those of the bank"
    if quantizer.fingerprint != manifest.fingerprint:
        return "its codebooks are another model's"
    return None

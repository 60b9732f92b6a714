"""The file of a product quantizer, in a bank with rows pq: its parts as safetensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes

from mac_rag.memory.storage.manifest import Manifest
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.untrusted_files import MalformedError, read_file

# Bytes of the file; a quantizer has a few million numbers.
_LARGEST = 256 << 20


def quantizer_bytes(quantizer: ProductQuantizer) -> bytes:
    """The bytes of the file."""
    data: bytes = tensor_bytes({name: tensor.contiguous() for name, tensor in quantizer.tensors.items()})
    return data


def read_quantizer(path: Path, manifest: Manifest) -> tuple[ProductQuantizer, bytes]:
    """A quantizer, and the bytes of its file.

    Args:
        path: the file.
        manifest: the manifest, which has its sha256, and says for which rows it is.

    Raises:
        FileNotFoundError: when it is missing.
        MalformedError: when it is not what was written, or not what the manifest says.
    """
    data = read_file(path, _LARGEST)
    if hashlib.sha256(data).hexdigest() != manifest.codebook:
        raise MalformedError("its checksum differs from the manifest's")
    try:
        quantizer = ProductQuantizer.of_tensors(load_tensors(data))
    except SafetensorError as error:
        raise MalformedError(f"it holds no codebooks: {error!r:.200}") from None
    except ValueError as error:
        raise MalformedError(f"it holds {error}") from None
    if (fault := misfit(quantizer, manifest)) is not None:
        raise MalformedError(fault)
    return quantizer, data


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

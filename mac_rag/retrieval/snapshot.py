"""A retriever on disk: a manifest in JSON and a safetensors file, replaced together.

    retriever.json          format, kind, the contents of the retriever, checksums
    <sha256>.safetensors    its arrays

The arrays are written and synced first under a new name, and then the manifest replaces its predecessor in one rename.
So a reader sees the old state or the new. Document ids are data and never become part of a path.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as array_bytes

from mac_rag.atomic_files import sync_folder, write_file
from mac_rag.data.types import Document
from mac_rag.errors import BankError

FORMAT = 1
MANIFEST = "retriever.json"
_ARRAYS_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


def write(folder: Path, kind: str, body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Replaces the retriever in a folder.

    Args:
        folder: folder of the retriever; it is made if it does not exist.
        kind: name of the retriever's class on disk.
        body: everything that the retriever keeps as JSON.
        arrays: everything that it keeps as arrays, by name.

    Raises:
        BankError: when `body` cannot be written as JSON.
    """
    data = array_bytes({name: np.ascontiguousarray(values) for name, values in arrays.items()})
    digest = hashlib.sha256(data).hexdigest()
    try:
        text = json.dumps(body)
    except (TypeError, ValueError) as error:
        raise BankError(f"the documents' metadata cannot be kept as JSON: {error}") from error
    manifest = {"format": FORMAT, "kind": kind, "arrays": digest, "sha256": _digest(kind, digest, text), "body": text}
    target = folder / f"{digest}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    write_file(target, [data])
    sync_folder(folder)
    write_file(folder / MANIFEST, [json.dumps(manifest).encode()])
    sync_folder(folder)
    for old in folder.iterdir():
        if old != target and _ARRAYS_NAME.fullmatch(old.name):  # never another kind of file
            old.unlink()


def exists(folder: Path) -> bool:
    """True if the folder holds a retriever."""
    return (folder / MANIFEST).exists()


def read(folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Reads the body and the arrays that `write` wrote.

    Raises:
        BankError: when there is no retriever, it has another kind or format, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        identity = (manifest["format"], manifest["kind"])
        digest, checksum, text = (str(manifest[name]) for name in ("arrays", "sha256", "body"))
    except FileNotFoundError:
        raise BankError(f"there is no retriever in {folder}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BankError(f"{path} is damaged: {error}") from error
    if identity != (FORMAT, kind):
        raise BankError(
            f"{path} holds a retriever of kind {identity[1]!r} in format {identity[0]!r}, but {kind!r} in format "
            f"{FORMAT} was asked for; name the retriever that was saved, or another folder"
        )
    arrays = folder / f"{digest}.safetensors"
    try:
        if _digest(kind, digest, text) != checksum:
            raise ValueError("its checksum does not fit its content")
        data = arrays.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"the checksum of {arrays.name} is another")
        return json.loads(text), load_arrays(data)
    except (OSError, ValueError, SafetensorError) as error:
        raise BankError(f"the retriever in {folder} is damaged: {error}; build it again from its documents") from error


def describe(documents: Iterable[Document]) -> list[list[Any]]:
    """Documents as JSON: a list of id, text and metadata for each."""
    return [[document.id, document.text, dict(document.metadata)] for document in documents]


def documents(described: Iterable[list[Any]]) -> list[Document]:
    """The inverse of `describe`."""
    return [Document(document_id, text, metadata) for document_id, text, metadata in described]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

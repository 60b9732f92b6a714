"""A bank on disk: one safetensors file of memory tokens and one manifest.

    manifest.json           format version, model fingerprint, the documents in order, name and sha256 of the tokens
    <sha256>.safetensors    the memory tokens `[N, T, D]` of all documents, one after another

The tokens are written and synced first and the manifest replaces its predecessor in one rename, so a reader meets
either the old bank or the new one. Document ids are only ever data in the manifest, never parts of a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes

from mac_rag.errors import BankError
from mac_rag.memory.bank import BankEntry, Member, MemoryBank

FORMAT = 1
MANIFEST = "manifest.json"
_TOKENS_NAME = re.compile("[0-9a-f]{64}")


def save(bank: MemoryBank, folder: Path) -> None:
    """Writes a bank, replacing the one that the folder may hold.

    Raises:
        BankError: when metadata cannot be written as JSON; names the document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = tensor_bytes({"phi": bank.phi}) if len(bank) else b""
    digest = hashlib.sha256(tokens).hexdigest()
    manifest = {
        "format": FORMAT,
        "fingerprint": bank.fingerprint,
        "sha256": digest,
        "documents": [_described(entry) for entry in bank],
    }
    target = folder / f"{digest}.safetensors"
    _write(target, tokens)
    _write(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    for old in folder.glob("*.safetensors"):
        if old != target and _TOKENS_NAME.fullmatch(old.stem):  # never a file of anyone else's
            old.unlink()


def load(folder: Path) -> MemoryBank:
    """Reads a bank.

    Raises:
        BankError: when there is none, its format is unknown, or its tokens are missing or damaged.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        found, digest = manifest["format"], manifest["sha256"]
    except FileNotFoundError:
        raise BankError(f"there is no memory bank in {folder}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BankError(f"{path} is damaged: {error}") from error
    if found != FORMAT:
        raise BankError(f"{path} has format {found!r}, this version reads format {FORMAT}; update mac_rag")
    if not _TOKENS_NAME.fullmatch(str(digest)):
        raise BankError(f"{path} is damaged: sha256 is {digest!r}")
    tokens = folder / f"{digest}.safetensors"
    try:
        data = tokens.read_bytes()
    except OSError as error:
        raise BankError(f"the bank's memory tokens cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise BankError(f"{tokens} is damaged: its checksum differs from the manifest's")
    bank = MemoryBank(manifest["fingerprint"])
    described = manifest["documents"]
    if described:
        try:
            phi = load_tensors(data)["phi"]
        except (SafetensorError, KeyError) as error:
            raise BankError(f"{tokens} is damaged: {error}") from error
        bank.restore(
            ((Member(entry["id"], entry["content_hash"], entry["metadata"], ""),), part)
            for entry, part in zip(described, phi.split([entry["rows"] for entry in described]), strict=True)
        )
    return bank


def _described(entry: BankEntry) -> dict[str, Any]:
    described = {
        "id": entry.document_id,
        "rows": len(entry.phi),
        "content_hash": entry.content_hash,
        "metadata": dict(entry.metadata),
    }
    try:
        json.dumps(described)
    except (TypeError, ValueError) as error:
        raise BankError(f"metadata of document {entry.document_id!r} cannot be kept as JSON: {error}") from error
    return described


def _write(path: Path, data: bytes) -> None:
    """Writes a file so that after a crash it is whole, old or new."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

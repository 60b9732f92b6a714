"""A retriever on disk: a manifest in JSON and a safetensors file, replaced together.

    retriever.json          format, kind, the contents of the retriever, checksums
    <sha256>.safetensors    its arrays

The arrays are written under a new name and synced first; then the manifest replaces its predecessor in one rename. So a
process that reads them sees the old state or the new. Document ids are data and never become part of a path.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as array_bytes

from mac_rag.atomic_files import make_folder, sync_folder, write_file
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.untrusted_files import MalformedError, parse_json, read_file, read_json

FORMAT = 1
# Most bytes of a manifest, which holds all texts.
_LARGEST = 16 << 30
# Most bytes of a vector.
_LARGEST_VECTOR = 1 << 20
MANIFEST = "retriever.json"
_ARRAYS_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


def write(folder: Path, kind: str, body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Replaces the retriever in a folder.

    Args:
        folder: folder of the retriever; it is created if missing.
        kind: name of the retriever's class on disk.
        body: everything that the retriever stores as JSON.
        arrays: name -> array, for everything that it stores as arrays.

    Raises:
        BankError: if JSON cannot hold `body`, or the folder cannot be written.
    """
    data = array_bytes({name: np.ascontiguousarray(values) for name, values in arrays.items()})
    digest = hashlib.sha256(data).hexdigest()
    try:
        text = json.dumps(body, allow_nan=False)
        parse_json(text)  # nothing may be written that cannot be read again
    except (TypeError, ValueError, RecursionError) as error:
        raise BankError(
            f"JSON cannot hold the documents' metadata: {error}; write such values as texts, or leave them out"
        ) from error
    manifest = {"format": FORMAT, "kind": kind, "arrays": digest, "sha256": _digest(kind, digest, text), "body": text}
    target = folder / f"{digest}.safetensors"
    try:
        make_folder(folder)
        write_file(target, [data])
        sync_folder(folder)
        write_file(folder / MANIFEST, [json.dumps(manifest).encode()])
        sync_folder(folder)
        for old in folder.iterdir():
            if old != target and _ARRAYS_NAME.fullmatch(old.name) and not old.is_dir():  # no other files
                old.unlink()
    except OSError as error:
        raise BankError(f"{folder} cannot be written: {error}; make it writable, or save to another folder") from error


def exists(folder: Path) -> bool:
    """True if the folder holds a retriever.

    Raises:
        BankError: if the folder cannot be read.
    """
    try:
        return (folder / MANIFEST).exists()
    except OSError as error:
        raise BankError(f"{folder} cannot be read: {error}; make it readable, or give another folder") from error


def read(folder: Path, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Reads the body and the arrays that `write` wrote.

    Raises:
        BankError: if there is no retriever, it has another kind or format, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path, _LARGEST)
        identity = (manifest["format"], manifest["kind"])
        digest, checksum, text = (str(manifest[name]) for name in ("arrays", "sha256", "body"))
    except FileNotFoundError:
        raise BankError(f"there is no retriever in {folder}; give the folder to which it was saved") from None
    except OSError as error:
        raise BankError(f"{path} cannot be read: {error.strerror}; make it readable, or give another folder") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BankError(f"{path} is damaged: {error}; build the retriever again from its documents") from error
    if identity != (FORMAT, kind):
        raise BankError(
            f"{path} holds a retriever of kind {identity[1]!r:.80} in format {identity[0]!r:.80}, not {kind!r} in "
            f"format {FORMAT}; name the retriever that was saved, or another folder"
        )
    with damaged(folder):
        if _digest(kind, digest, text) != checksum:
            raise MalformedError(f"the checksum of {path.name} does not match its content")
        body = parse_json(text)
        if not isinstance(body, dict) or not isinstance(body.get("documents"), list):
            raise MalformedError(f"{path.name} holds no documents")
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise MalformedError(f"{path.name} names the arrays {digest!r:.80}")
        return body, _arrays(folder / f"{digest}.safetensors", digest, len(text), len(body["documents"]))


@contextmanager
def damaged(folder: Path) -> Iterator[None]:
    """A context for reading a retriever's folder: any error in its content becomes a `BankError` that names the folder.

    Raises:
        BankError: for content that is malformed, has a wrong type, or is missing.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise BankError(
            f"the retriever in {folder} is damaged: {error.filename} is missing; build it again from its documents"
        ) from error
    except OSError as error:
        raise BankError(
            f"the retriever in {folder} cannot be read: {error}; build it again from its documents"
        ) from error
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        detail = str(error) if isinstance(error, MalformedError) else repr(error)
        raise BankError(
            f"the retriever in {folder} is damaged: {detail[:500]}; build it again from its documents"
        ) from error


def _arrays(path: Path, digest: str, characters: int, documents: int) -> dict[str, NDArray[Any]]:
    # The bound: 8 bytes for each character of the manifest, for BM25's terms, and a vector for each document.
    data = read_file(path, 8 * characters + (documents + 1) * _LARGEST_VECTOR)
    if hashlib.sha256(data).hexdigest() != digest:
        raise MalformedError(f"the checksum of {path.name} does not match its content")
    try:
        return load_arrays(data)
    except Exception as error:  # the library raises errors of all kinds for malformed data
        raise MalformedError(f"{path.name} holds no arrays: {error!r:.200}") from None


def describe(documents: Iterable[Document]) -> list[list[Any]]:
    """Documents as JSON: a list of id, text and metadata for each."""
    return [[document.id, document.text, dict(document.metadata)] for document in documents]


def documents(described: Iterable[object]) -> list[Document]:
    """The inverse of `describe`.

    Raises:
        MalformedError: for a value that `describe` never returns: other types, or an id that comes twice.
    """
    by_id: dict[str, Document] = {}
    for number, fields in enumerate(described):
        if not isinstance(fields, list) or [type(field) for field in fields] != [str, str, dict]:
            raise MalformedError(f"document {number:,} is not an id, a text and metadata")
        if fields[0] in by_id:
            raise MalformedError(f"document {number:,} has the id {fields[0]!r:.80} of another")
        by_id[fields[0]] = Document(*fields)
    return list(by_id.values())


def array(arrays: Mapping[str, NDArray[Any]], name: str, kind: type, shape: tuple[int | None, ...]) -> NDArray[Any]:
    """One of the stored arrays, checked for its dtype and shape.

    Args:
        arrays: name -> array.
        name: name of the array.
        kind: the dtype that it must have.
        shape: the shape that it must have; None for any length.

    Raises:
        MalformedError: if the array is missing, has another dtype or shape, or has numbers that are not finite.
    """
    values = arrays.get(name)
    if values is None or values.dtype != kind or len(values.shape) != len(shape):
        raise MalformedError(f"{name} is not an array of {kind.__name__} with {len(shape)} dimensions")
    if any(length not in (None, there) for length, there in zip(shape, values.shape)):
        raise MalformedError(f"{name} has the shape {list(values.shape)}, not {list(shape)}")
    if not np.isfinite(values).all():
        raise MalformedError(f"{name} has numbers that are not finite")
    return values


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

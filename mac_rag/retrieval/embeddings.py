"""Embeddings that survive an interruption: written as soon as they are computed, found by the hash of their text.

Each group of embeddings is one safetensors file, named by its own sha256. Its header names the encoder and the hashes
of the texts. A damaged file, or one of another encoder, is ignored, and its embeddings are computed again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as array_bytes

from mac_rag.atomic_files import make_folder, sync_folder, write_file
from mac_rag.errors import BankError, DocumentError
from mac_rag.untrusted_files import MalformedError, open_file, parse_json, read_file

Vectors: TypeAlias = NDArray[np.float32]  # [N, D]

_LARGEST = 1 << 30  # bytes of a file, which has some thousand vectors
_NAME = re.compile(r"([0-9a-f]{64})\.part\.safetensors")


def text_hash(text: str) -> str:
    """Hex sha256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_finite(vectors: Vectors, what: Sequence[str]) -> None:
    """Refuses vectors that no product can rank.

    Args:
        vectors: `[N, D]`, from an encoder.
        what: names of the N texts, for the message.

    Raises:
        DocumentError: for NaN or infinity; names the text.
    """
    for row in np.flatnonzero(~np.isfinite(vectors).all(1)).tolist():
        raise DocumentError(
            f"the encoder's vector for {what[row]} is not finite, so it cannot be ranked; check the encoder's weights "
            "and precision, or change the text"
        )


class EmbeddingCache:
    """Embeddings that an encoder has computed while its work is not finished.

    Args:
        folder: folder of the files; it is made at the first `put`.
        encoder: fingerprint of the encoder; embeddings of other encoders are never returned.
        width: D, the length of its vectors.
    """

    def __init__(self, folder: Path, encoder: str, width: int) -> None:
        self.folder = folder
        self._encoder, self._width = encoder, width
        self._places: dict[str, tuple[Path, int]] = {}  # hash of a text -> file and row
        for path in self._files():
            self._learn(path)

    def get(self, hashes: Iterable[str]) -> dict[str, Vectors]:
        """The cached embeddings `[D]` of texts, by hash; hashes that are not cached are left out."""
        rows_of: dict[Path, list[tuple[str, int]]] = {}
        for name in hashes:
            if name in self._places:
                path, row = self._places[name]
                rows_of.setdefault(path, []).append((name, row))
        cached: dict[str, Vectors] = {}
        for path, rows in rows_of.items():
            vectors = self._vectors(path)
            if vectors is not None:
                cached.update((name, vectors[row]) for name, row in rows if row < len(vectors))
        return cached

    def _vectors(self, path: Path) -> Vectors | None:
        """The embeddings `[N, D]` of a file; None if it is not what was written."""
        try:
            data = read_file(path, _LARGEST)
            if not path.name.startswith(hashlib.sha256(data).hexdigest()):
                return None
            vectors = load_arrays(data)["embeddings"]
        except (OSError, MalformedError, SafetensorError, KeyError):
            return None
        sound = vectors.dtype == np.float32 and vectors.ndim == 2 and vectors.shape[1] == self._width
        return vectors if sound and np.isfinite(vectors).all() else None

    def put(self, hashes: Sequence[str], vectors: Vectors) -> None:
        """Writes embeddings `[N, D]` of the texts with these N hashes.

        Raises:
            BankError: when the folder cannot be written to.
        """
        header = {"encoder": self._encoder, "hashes": json.dumps(list(hashes))}
        data = array_bytes({"embeddings": np.ascontiguousarray(vectors)}, metadata=header)
        path = self.folder / f"{hashlib.sha256(data).hexdigest()}.part.safetensors"
        try:
            make_folder(self.folder)
            write_file(path, [data])
            sync_folder(self.folder)
        except OSError as error:
            raise BankError(f"{self.folder} cannot be written to: {error}") from error
        self._places.update((name, (path, row)) for row, name in enumerate(hashes))

    def clear(self) -> None:
        """Removes all files, once their embeddings are saved elsewhere.

        Raises:
            BankError: when the folder cannot be written to.
        """
        self._places.clear()
        try:
            for path in self._files():
                if not path.is_dir():
                    path.unlink()
        except OSError as error:
            raise BankError(f"{self.folder} cannot be written to: {error}") from error

    def _files(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.glob("*.part.safetensors") if _NAME.fullmatch(path.name))
        except OSError as error:
            raise BankError(f"{self.folder} cannot be read: {error}") from error

    def _learn(self, path: Path) -> None:
        """Registers the embeddings of a file, unless it cannot be read or is of another encoder."""
        try:
            with open_file(path), safe_open(path, framework="numpy") as file:
                header = file.metadata()
            hashes = parse_json(header["hashes"]) if header["encoder"] == self._encoder else []
        except (OSError, SafetensorError, KeyError, TypeError, MalformedError):
            return
        if isinstance(hashes, list) and all(isinstance(name, str) for name in hashes):
            self._places.update((name, (path, row)) for row, name in enumerate(hashes))

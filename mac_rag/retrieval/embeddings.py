"""Embeddings that survive an interruption: on disk as soon as they are computed, filed under the hash of their text.

Each group of embeddings is one safetensors file, named by its own sha256, whose header tells the encoder and the
hashes of the texts. A file that is damaged, or of another encoder, is passed over: what it held is computed again.
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

from mac_rag.retrieval.snapshot import write_file

Vectors: TypeAlias = NDArray[np.float32]  # [N, D]

_NAME = re.compile(r"([0-9a-f]{64})\.part\.safetensors")


def text_hash(text: str) -> str:
    """The sha256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class EmbeddingCache:
    """What an encoder has computed of a work that is not yet finished.

    Args:
        folder: where the files lie; made at the first `put`.
        encoder: fingerprint of the encoder; embeddings of others are never returned.
    """

    def __init__(self, folder: Path, encoder: str) -> None:
        self.folder = folder
        self._encoder = encoder
        self._places: dict[str, tuple[Path, int]] = {}  # hash of a text -> file and row
        for path in self._files():
            self._learn(path)

    def get(self, hashes: Iterable[str]) -> dict[str, Vectors]:
        """The embeddings `[D]` of those texts that are known, by hash."""
        wanted: dict[Path, list[tuple[str, int]]] = {}
        for name in hashes:
            if name in self._places:
                path, row = self._places[name]
                wanted.setdefault(path, []).append((name, row))
        found: dict[str, Vectors] = {}
        for path, rows in wanted.items():
            data = path.read_bytes()
            if not path.name.startswith(hashlib.sha256(data).hexdigest()):
                continue
            vectors = load_arrays(data)["embeddings"]
            found.update((name, vectors[row]) for name, row in rows)
        return found

    def put(self, hashes: Sequence[str], vectors: Vectors) -> None:
        """Keeps embeddings `[N, D]` of texts with these hashes."""
        header = {"encoder": self._encoder, "hashes": json.dumps(list(hashes))}
        data = array_bytes({"embeddings": np.ascontiguousarray(vectors)}, metadata=header)
        path = self.folder / f"{hashlib.sha256(data).hexdigest()}.part.safetensors"
        write_file(path, data)
        self._places.update((name, (path, row)) for row, name in enumerate(hashes))

    def clear(self) -> None:
        """Removes all files: their embeddings are kept elsewhere now."""
        self._places.clear()
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.part.safetensors") if _NAME.fullmatch(path.name))

    def _learn(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                header = file.metadata()
            hashes = json.loads(header["hashes"]) if header["encoder"] == self._encoder else []
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return
        self._places.update((name, (path, row)) for row, name in enumerate(hashes))

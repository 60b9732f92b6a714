"""Dense retrieval: documents and questions as vectors, ranked by dot product."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as array_bytes

from mac_rag.atomic_files import make_folder, sync_folder, write_file
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DocumentError, FingerprintError
from mac_rag.progress import progress_bar
from mac_rag.retrieval import snapshot
from mac_rag.retrieval.base import Hit, RowRetriever, check_request
from mac_rag.untrusted_files import MalformedError, open_file, parse_json, read_file

Vectors: TypeAlias = NDArray[np.float32]  # [N, D]

KIND = "dense"
_GROUP = 1024  # documents encoded between two writes, which is the most that an interruption loses
_ROWS = 16_384  # documents in one matrix product
_LARGEST = 1 << 30  # most bytes of a file of cached vectors, which holds about a thousand
_NAME = re.compile(r"([0-9a-f]{64})\.part\.safetensors")


class Encoder(Protocol):
    """Maps texts to vectors whose dot products measure relevance (see `mac_rag.retrieval.encoders`).

    Attributes:
        width: D, the length of a vector.
        fingerprint: a text that differs for encoders whose vectors differ.
    """

    width: int
    fingerprint: str

    def documents(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> Vectors:
        """Encodes N documents to `[N, D]`; calls `advance` with the number of texts after each batch."""

    def questions(self, texts: Sequence[str]) -> Vectors:
        """Encodes N questions to `[N, D]`."""


class DenseRetriever(RowRetriever):
    """Ranks documents by the dot product of their vector with the question's; every document is a hit.

    The search is exact. With `allowed`, its matrix products have the same shapes as in a retriever that never held the
    other documents, so equal vectors give equal scores, bit by bit. Equal texts are encoded once.

    Examples:
        >>> from mac_rag.retrieval.encoders import minilm
        >>> retriever = DenseRetriever(minilm())
        >>> documents = [Document("bridge", "Anna Berg opened the bridge."), Document("soup", "Boil the carrots.")]
        >>> retriever.add(documents)
        >>> [hits] = retriever.retrieve(["How are vegetables cooked?"], k=2)  # shares no word with a document
        >>> [hit.document_id for hit in hits]
        ['soup', 'bridge']

    Args:
        encoder: encoder of documents and questions.
        folder: folder for vectors while documents are being encoded, so that an interrupted `add` continues where it
            stopped, in this process or another; None to start over.
        progress: True to show a progress bar while documents are encoded.
    """

    _most_scores = 16_000_000  # questions times documents that are scored at once

    def __init__(self, encoder: Encoder, *, folder: Path | None = None, progress: bool = False) -> None:
        self.encoder = encoder
        self._cache = None if folder is None else EmbeddingCache(folder, encoder.fingerprint, encoder.width)
        self._progress = progress
        super().__init__()
        self._matrix: Vectors = np.zeros((0, encoder.width), dtype=np.float32)  # [rows and spare rows, D]
        self._by_hash: dict[str, int] = {}  # hash of a text -> a row with that text

    def _index(self, documents: Sequence[Document]) -> Vectors:
        texts = {text_hash(document.text): document.text for document in documents}
        known = {name: self._matrix[row] for name in texts if (row := self._by_hash.get(name)) is not None}
        if self._cache is not None:
            known |= self._cache.get(texts.keys() - known.keys())
        missing = [name for name in texts if name not in known]
        ids = {text_hash(document.text): document.id for document in documents}
        with progress_bar("encode", len(texts), done=len(known), disable=not self._progress) as bar:
            for first in range(0, len(missing), _GROUP):
                group = missing[first : first + _GROUP]
                vectors = self.encoder.documents([texts[name] for name in group], bar.advance)
                check_finite(vectors, [f"document {ids[name]!r}" for name in group])
                if self._cache is not None:
                    self._cache.put(group, vectors)
                known.update(zip(group, vectors, strict=True))
        if not documents:
            return np.zeros((0, self.encoder.width), dtype=np.float32)
        return np.stack([known[text_hash(document.text)] for document in documents])

    def _remove(self, document_id: str) -> None:
        row, document = self._rows.remove(document_id)
        name = text_hash(document.text)
        if self._by_hash.get(name) == row:  # else the hash belongs to a later document with the same text
            del self._by_hash[name]

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        check_request(questions, k)
        if not questions or not len(self):
            return [[] for _ in questions]
        vectors = self.encoder.questions(questions)
        check_finite(vectors, [f"question {question!r}" for question in questions])
        with self._lock:
            mask = self._rows.mask(allowed)
            rows = np.arange(self._rows.size) if mask is None else np.flatnonzero(mask)
            if not len(rows):
                return [[] for _ in questions]
            block = max(1, self._most_scores // len(rows))
            hits = []
            for first in range(0, len(vectors), block):
                for scores in self._scores(vectors[first : first + block], rows):
                    hits.append(self._rows.hits(rows, scores, k))
            return hits

    def _scores(self, questions: Vectors, rows: NDArray[np.int64]) -> Vectors:
        """Products `[B, n]` of questions `[B, D]` with some rows `[n]`, ascending."""
        parts = []
        for part in np.split(rows, range(_ROWS, len(rows), _ROWS)):
            first, stop = int(part[0]), int(part[-1]) + 1
            is_run = stop - first == len(part)  # then nothing needs to be copied
            parts.append(questions @ self._matrix[slice(first, stop) if is_run else part].T)
        return np.concatenate(parts, axis=1)

    def save(self, folder: Path) -> None:
        """Writes documents and vectors to a folder, from which `load` reads them.

        Raises:
            BankError: if JSON cannot hold the metadata.
        """
        with self._lock:
            self._compact()
            body = {"encoder": self.encoder.fingerprint, "documents": snapshot.describe(self._rows)}
            snapshot.write(folder, KIND, body, {"embeddings": self._matrix})
            if self._cache is not None and self._cache.folder == folder:
                self._cache.clear()

    @classmethod
    def load(cls, folder: Path, encoder: Encoder, *, progress: bool = False) -> DenseRetriever:
        """Reads a retriever from a folder; it uses the folder for documents that it encodes later.

        Args:
            folder: folder to which the retriever was saved.
            encoder: the encoder that made its vectors.
            progress: see the class.

        Raises:
            BankError: if the folder holds no retriever, or a damaged one.
            FingerprintError: if another encoder made the vectors.
        """
        body, arrays = snapshot.read(folder, KIND)
        if body.get("encoder") != encoder.fingerprint:
            raise FingerprintError(
                f"the vectors in {folder} were made by the encoder {body.get('encoder')!r:.200}, not by "
                f"{encoder.fingerprint!r}; load them with that one, or encode the documents again into another folder"
            )
        retriever = cls(encoder, folder=folder, progress=progress)
        with snapshot.damaged(folder):
            documents = snapshot.documents(body["documents"])
            vectors = snapshot.array(arrays, "embeddings", np.float32, (len(documents), encoder.width))
        retriever._append(documents, vectors)
        return retriever

    def _append(self, documents: Sequence[Document], indexed: Vectors) -> None:
        first, stop = self._rows.size, self._rows.size + len(documents)
        if stop > len(self._matrix):
            grown = np.zeros((max(stop, 2 * len(self._matrix)), indexed.shape[1]), dtype=np.float32)
            grown[:first] = self._matrix[:first]
            self._matrix = grown
        self._matrix[first:stop] = indexed
        self._rows.append(documents)
        self._by_hash.update((text_hash(document.text), row) for row, document in enumerate(documents, first))

    def _compact(self) -> None:
        self._matrix = self._matrix[self._rows.compact()]
        self._by_hash = {text_hash(document.text): row for row, document in enumerate(self._rows)}


def text_hash(text: str) -> str:
    """Hex sha256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_finite(vectors: Vectors, what: Sequence[str]) -> None:
    """Refuses vectors with NaN or infinity, which cannot be ranked.

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
    """Embeddings of an unfinished `add`, by the hash of their text.

    They are written as soon as they are computed, so they survive an interruption. Each group of embeddings is one
    safetensors file, named by its own sha256. Its header names the encoder and the hashes of the texts. A damaged file,
    or one of another encoder, is ignored, and its embeddings are computed again.

    Args:
        folder: folder of the files; the first `put` creates it.
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
        """Hash of a text -> its cached embedding `[D]`; hashes that are not cached are left out."""
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
        """The embeddings `[N, D]` of a file; None for a damaged file."""
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
            BankError: if the folder cannot be written.
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
        """Removes all files. Call it once their embeddings are saved elsewhere.

        Raises:
            BankError: if the folder cannot be written.
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
        """Registers the embeddings of a file, unless it cannot be read or another encoder made it."""
        try:
            with open_file(path), safe_open(path, framework="numpy") as file:
                header = file.metadata()
            hashes = parse_json(header["hashes"]) if header["encoder"] == self._encoder else []
        except (OSError, SafetensorError, KeyError, TypeError, MalformedError):
            return
        if isinstance(hashes, list) and all(isinstance(name, str) for name in hashes):
            self._places.update((name, (path, row)) for row, name in enumerate(hashes))

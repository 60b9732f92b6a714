"""Retrieval for training: the best documents for every question, retrieved once and cached for later runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as array_bytes

from mac_rag.atomic_files import make_folder, sync_folder, write_file
from mac_rag.cache import cache_folder
from mac_rag.data.types import Document, QADataset
from mac_rag.progress import progress_bar
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever, Retriever
from mac_rag.retrieval.registry import make_retriever, needs_folder

_BATCH = 256  # questions retrieved in one call

Rows = NDArray[np.int32]  # [questions, depth]: indices of documents, the best first; -1 for none


class Retrieved:
    """The best documents for each question of a data set.

    The cache folder holds the results under a sha256 of everything that they depend on: the retriever's settings and
    weights, the documents, the questions and `depth`. So later runs on the same data find them there, and an
    interrupted run finds the documents that it has encoded. Processes that need the same results wait for the first.
    Nobody knows what an imported retriever depends on, so its results are not cached.

    Args:
        name: name of the retriever; see `make_retriever`.
        data: documents to search, and questions to search for.
        depth: number of documents for each question.

    Raises:
        ConfigError: for an unknown retriever, or one that takes no documents.
        ModelLoadError: if an encoder cannot be loaded.
    """

    def __init__(self, name: str, data: QADataset, depth: int) -> None:
        self._name = name
        self._documents = data.documents
        self._depth = depth
        texts = list(dict.fromkeys(question.question for question in data.questions))
        self._rows = self._retrieved(texts)
        self._place = {text: place for place, text in enumerate(texts)}

    def __getitem__(self, question: str) -> list[Document]:
        """At most `depth` documents, the best first."""
        return [self._documents[row] for row in self._rows[self._place[question]].tolist() if row >= 0]

    def _retrieved(self, texts: Sequence[str]) -> Rows:
        """Reads the cached results, or retrieves and caches them."""
        retriever = self._retriever(None)
        if not needs_folder(self._name):
            return self._search(texts, retriever)
        folder = cache_folder() / "retrieved" / self._key(fingerprint(retriever), texts)
        make_folder(folder)
        file, encoded = folder / "rows.safetensors", folder / "encoded"
        with FileLock(folder / "lock"):
            rows = _read(file, (len(texts), self._depth))
            if rows is None:
                rows = self._search(texts, self._retriever(encoded))
                write_file(file, [array_bytes({"rows": rows})])
                sync_folder(folder)
                shutil.rmtree(encoded, ignore_errors=True)
        return rows

    def _retriever(self, folder: Path | None) -> Retriever:
        retriever = make_retriever(self._name, folder=folder, progress=True)
        assert retriever is not None
        return retriever

    def _search(self, texts: Sequence[str], retriever: Retriever) -> Rows:
        """The best documents for each text."""
        retriever.put(self._documents)
        place = {document.id: index for index, document in enumerate(self._documents)}
        # An imported retriever may hold other documents, too.
        allowed = None if len(retriever) == len(place) else place.keys()
        rows = np.full((len(texts), self._depth), -1, dtype=np.int32)
        with progress_bar("retrieve", len(texts)) as bar:
            for first in range(0, len(texts), _BATCH):
                batch = texts[first : first + _BATCH]
                for row, hits in enumerate(retriever.retrieve(batch, self._depth, allowed=allowed), first):
                    rows[row, : len(hits)] = [place[hit.document_id] for hit in hits]
                bar.advance(len(batch))
        return rows

    def _key(self, described: str, texts: Sequence[str]) -> str:
        digest = hashlib.sha256(json.dumps([described, self._depth, len(self._documents)]).encode())
        for text in (*(text for document in self._documents for text in (document.id, document.text)), *texts):
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return digest.hexdigest()


def fingerprint(retriever: Retriever) -> str:
    """Text that differs between retrievers that may rank differently."""
    if isinstance(retriever, DenseRetriever):
        return retriever.encoder.fingerprint
    if isinstance(retriever, HybridRetriever):
        return json.dumps([retriever.weights, retriever.depth, *map(fingerprint, retriever.retrievers)])
    assert isinstance(retriever, BM25Retriever)
    versions = [version(package) for package in ("mac-rag", "PyStemmer")]
    return json.dumps([retriever.idf, retriever.tokenizer.describe(), versions])


def _read(file: Path, shape: tuple[int, int]) -> Rows | None:
    """The rows of a file; None if it is missing or damaged."""
    try:
        rows: Rows = load_arrays(file.read_bytes())["rows"]
    except (OSError, SafetensorError, KeyError):
        return None
    return rows if rows.shape == shape else None

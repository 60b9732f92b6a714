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

_PART = 4096  # questions in one file: what an interruption can cost
_BATCH = 256  # questions retrieved in one call

Rows = NDArray[np.int32]  # [questions, depth]: indices of documents, the best first; -1 for none


class Retrieved:
    """The best documents for each question of a data set.

    The cache folder holds the results, part by part, under a sha256 of everything that they depend on: the retriever's
    settings and weights, the documents, the questions and `depth`. So an interrupted retrieval goes on where it
    stopped, and later runs on the same data find it done. Processes that need the same results wait for the first.
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
        """Reads cached parts and retrieves the others."""
        rows = np.full((len(texts), self._depth), -1, dtype=np.int32)
        parts = [range(first, min(first + _PART, len(texts))) for first in range(0, len(texts), _PART)]
        retriever = self._retriever(None)
        if not needs_folder(self._name):
            self._fill(rows, texts, parts, retriever, None)
            return rows
        folder = cache_folder() / "retrieved" / self._key(fingerprint(retriever), texts)
        make_folder(folder)
        with FileLock(folder / "lock"):
            missing = [part for part in parts if not _read(_file(folder, part), rows[part.start : part.stop])]
            if missing:
                encoded = folder / "encoded"
                self._fill(rows, texts, missing, self._retriever(encoded), folder)
                shutil.rmtree(encoded, ignore_errors=True)
        return rows

    def _retriever(self, folder: Path | None) -> Retriever:
        retriever = make_retriever(self._name, folder=folder, progress=True)
        assert retriever is not None
        return retriever

    def _fill(
        self, rows: Rows, texts: Sequence[str], parts: Sequence[range], retriever: Retriever, folder: Path | None
    ) -> None:
        """Retrieves for some parts of the questions, and writes each part to the folder, if there is one."""
        retriever.put(self._documents)
        place = {document.id: index for index, document in enumerate(self._documents)}
        # An imported retriever may hold other documents, too.
        allowed = None if len(retriever) == len(place) else place.keys()
        with progress_bar("retrieve", len(texts), done=len(texts) - sum(map(len, parts))) as bar:
            for part in parts:
                for first in part[::_BATCH]:
                    batch = texts[first : min(first + _BATCH, part.stop)]
                    for row, hits in enumerate(retriever.retrieve(batch, self._depth, allowed=allowed), first):
                        rows[row, : len(hits)] = [place[hit.document_id] for hit in hits]
                    bar.advance(len(batch))
                if folder is not None:
                    write_file(_file(folder, part), [array_bytes({"rows": rows[part.start : part.stop]})])
                    sync_folder(folder)

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


def _read(file: Path, rows: Rows) -> bool:
    """Fills in the rows of one part; False if its file is missing or damaged."""
    try:
        part = load_arrays(file.read_bytes())["rows"]
    except (OSError, SafetensorError, KeyError):
        return False
    if part.shape != rows.shape:
        return False
    rows[:] = part
    return True


def _file(folder: Path, part: range) -> Path:
    return folder / f"{part.start:09d}.safetensors"

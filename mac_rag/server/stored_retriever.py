"""A retriever that is in its folder before a change of it counts."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from pathlib import Path

from mac_rag.data.types import Document
from mac_rag.retrieval.base import Hit, Retriever
from mac_rag.retrieval.registry import make_retriever

# What a bank of the server can have; each is kept in a folder.
RETRIEVERS = ("none", "bm25", "minilm", "hybrid")


class StoredRetriever(Retriever):
    """A retriever that is saved with every change, before the call returns.

    So the protocol of `mac_rag.sync` holds across processes: what a bank's commit says of the retriever is on the disk.

    Args:
        spec: its name; one of `RETRIEVERS` but `none`.
        folder: where it is kept; one that was saved there is loaded.
    """

    def __init__(self, spec: str, folder: Path) -> None:
        retriever = make_retriever(spec, folder=folder)
        assert retriever is not None, spec
        self._retriever = retriever
        self._folder = folder

    def add(self, documents: Sequence[Document]) -> None:
        self._retriever.add(documents)
        self._retriever.save(self._folder)

    def put(self, documents: Sequence[Document]) -> None:
        self._retriever.put(documents)
        self._retriever.save(self._folder)

    def delete(self, document_id: str) -> None:
        self._retriever.delete(document_id)
        self._retriever.save(self._folder)

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        return self._retriever.retrieve(questions, k, allowed=allowed)

    def __len__(self) -> int:
        return len(self._retriever)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._retriever

    def held(self, document_ids: Iterable[str]) -> list[str]:
        return self._retriever.held(document_ids)

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        return self._retriever.content_hashes(document_ids)

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        return self._retriever.documents(document_ids)

    def save(self, folder: Path) -> None:
        self._retriever.save(folder)

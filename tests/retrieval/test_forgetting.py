"""The folders of retrievers that are saved keep nothing of a deleted document."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_rag.data.types import Document
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever
from mac_rag.retrieval.base import Retriever
from tests.retrieval.helpers import WordEncoder, documents

TEXT = "quizzaciously quizzaciously"


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_a_saved_folder_has_no_byte_of_a_deleted_document(tmp_path: Path, kind: str) -> None:
    def dense(folder: Path) -> DenseRetriever:
        return DenseRetriever(WordEncoder(), folder=folder)

    retriever: Retriever = BM25Retriever() if kind == "bm25" else dense(tmp_path)
    if kind == "hybrid":
        retriever = HybridRetriever([BM25Retriever(), dense(tmp_path / "1")])
    retriever.add([*documents("plain words", "more words"), Document("secret", TEXT, {"note": "private"})])
    retriever.save(tmp_path)
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    vector = WordEncoder().documents([TEXT]).tobytes()
    words = (b"quizzaciously", b"secret", b"private", *(() if kind == "bm25" else (vector,)))
    for word in words:
        assert any(word in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()), word
    retriever.delete("secret")
    retriever.save(tmp_path)
    for word in words:
        assert not any(word in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()), word
    assert len({file.name for file in tmp_path.rglob("*") if file.is_file()}) == len(names)

"""What all retrievers have in common: limits, refusals that change nothing, changes that leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever, Retriever
from mac_rag.retrieval.chroma import ChromaRetriever
from tests.retrieval.helpers import RETRIEVERS, WordEncoder, documents


@pytest.fixture(params=[*RETRIEVERS, "chroma"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Retriever:
    if request.param == "chroma":
        return ChromaRetriever(tmp_path, WordEncoder())
    return RETRIEVERS[request.param]()


def test_an_empty_one_finds_nothing_also_after_a_deletion(empty: Retriever) -> None:
    assert empty.retrieve(["storm", "sun"], 2) == [[], []]
    empty.add([])
    empty.add(documents("storm"))
    empty.delete("d0")
    assert empty.retrieve(["storm"], 2) == [[]]
    assert len(empty) == 0


def test_hits_carry_text_and_metadata_and_k_is_bounded_below(empty: Retriever) -> None:
    empty.add(documents("storm", "sun", ""))
    hit = empty.retrieve(["sun"], 100)[0][0]
    assert (hit.document_id, hit.text, hit.metadata) == ("d1", "sun", {"place": 1})
    assert empty.retrieve([], 3) == []
    for k in (0, -1):
        with pytest.raises(ConfigError, match=f"at least 1, got {k}"):
            empty.retrieve(["storm"], k)


def test_ids_that_are_taken_or_unknown_are_refused_and_change_nothing(empty: Retriever) -> None:
    empty.add(documents("storm in May"))
    with pytest.raises(BankError, match="'d0' is already"):
        empty.add([Document("new", "storm"), Document("d0", "storm")])
    with pytest.raises(BankError, match="'twin' comes 2 times"):
        empty.add([Document("twin", "storm"), Document("twin", "storm")])
    with pytest.raises(BankError, match="no document 'd1' in this index of 1"):
        empty.delete("d1")
    assert len(empty) == 1
    assert "new" not in empty
    assert "twin" not in empty
    assert [hit.document_id for hit in empty.retrieve(["storm in May"], 5)[0]] == ["d0"]


@pytest.mark.parametrize("make", [BM25Retriever, lambda: DenseRetriever(WordEncoder())], ids=["bm25", "dense"])
def test_many_changes_leave_no_trace(make: Callable[[], Retriever]) -> None:
    """Rows are closed up again and again while documents come and go."""
    rng = random.Random(5)
    retriever, kept = make(), {}
    words = [f"w{i}" for i in range(200)]
    for step in range(6):
        added = [Document(f"{step}-{i}", " ".join(rng.choices(words, k=8))) for i in range(800)]
        retriever.add(added)
        kept |= {document.id: document for document in added}
        for gone in rng.sample(sorted(kept), 700):
            retriever.delete(gone)
            del kept[gone]
    fresh = make()
    fresh.add(list(kept.values()))
    assert retriever.retrieve(words, 5) == fresh.retrieve(words, 5)


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

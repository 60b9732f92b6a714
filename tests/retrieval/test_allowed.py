"""Documents that are not allowed leave no trace: results are those of a retriever that never held them, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.data.types import Document
from mac_rag.errors import DocumentError
from mac_rag.retrieval import DenseRetriever, Retriever
from mac_rag.retrieval.chroma import ChromaRetriever
from mac_rag.retrieval.dense import Vectors
from tests.retrieval.helpers import RETRIEVERS, UnevenEncoder, WordEncoder

WORDS = [f"w{number}" for number in range(7)]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


@pytest.mark.parametrize("name", RETRIEVERS)
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=14),
    later=st.lists(TEXTS, max_size=3),
    questions=st.lists(TEXTS, min_size=1, max_size=3),
    k=st.integers(1, 20),
    data=st.data(),
)
def test_hits_scores_and_ties_are_those_of_a_retriever_without_the_others(
    name: str, texts: list[str], later: list[str], questions: list[str], k: int, data: st.DataObject
) -> None:
    first = [Document(f"d{number}", text) for number, text in enumerate(texts)]
    more = [Document(f"later{number}", text) for number, text in enumerate(later)]
    everything = [*first, *more]
    ids = st.sampled_from([document.id for document in everything])
    deleted = data.draw(st.sets(ids.filter(lambda name: name.startswith("d"))))
    allowed = data.draw(st.sets(ids))
    retriever, fresh = RETRIEVERS[name](), RETRIEVERS[name]()
    retriever.add(first)
    for document_id in deleted:
        retriever.delete(document_id)
    retriever.add(more)
    fresh.add([document for document in everything if document.id in allowed - deleted])
    expected = fresh.retrieve(questions, k)
    assert retriever.retrieve(questions, k, allowed={*allowed, "nobody"}) == expected
    assert all(len(hits) <= len(allowed - deleted) for hits in expected)


def test_matrix_products_in_several_parts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.retrieval.dense._ROWS", 5)
    retriever, fresh = DenseRetriever(UnevenEncoder()), DenseRetriever(UnevenEncoder())
    documents = [Document(f"d{number}", f"text {number}") for number in range(50)]
    allowed = {document.id for document in documents if document.id[-1] in "3456789"}
    retriever.add(documents)
    fresh.add([document for document in documents if document.id in allowed])
    questions = ["text 3", "text 14"]
    assert retriever.retrieve(questions, 50, allowed=allowed) == fresh.retrieve(questions, 50)
    exact = fresh.encoder.questions(questions).astype(np.float64) @ fresh.encoder.questions(
        [document.text for document in documents]
    ).T.astype(np.float64)
    for hits, row in zip(fresh.retrieve(questions, 50), exact):
        assert {hit.document_id for hit in hits} == allowed
        for hit in hits:
            assert hit.score == pytest.approx(row[int(hit.document_id[1:])], rel=1e-4, abs=1e-5)


def test_chroma_compares_allowed_documents_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_rag.retrieval.chroma._IDS", 7)  # so that hidden ids would move the borders of pages
    documents = [Document(f"d{number}", f"text {number % 20}") for number in range(40)]
    allowed = {f"d{number}" for number in (*range(3, 33, 2), 4, 24)}
    chroma, fresh = (ChromaRetriever(tmp_path / name, UnevenEncoder()) for name in ("all", "allowed"))
    chroma.add(documents)
    chroma.delete("d5")
    fresh.add([document for document in documents if document.id in allowed - {"d5"}])
    questions = ["text 3", "text 4", "text 19"]
    for k in (1, 4, 100):
        found = chroma.retrieve(questions, k, allowed=allowed)
        assert found == fresh.retrieve(questions, k, allowed=allowed)
        for ours, searched in zip(found, fresh.retrieve(questions, k)):  # the graph rounds in its own way
            assert [hit.score for hit in ours] == pytest.approx([hit.score for hit in searched], rel=1e-5, abs=1e-5)
    assert chroma.retrieve(questions, 3, allowed=set()) == [[], [], []]


class NotFinite(WordEncoder):
    """An encoder that overflows on one word."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def questions(self, texts: Sequence[str]) -> Vectors:
        vectors = super().questions(texts)
        for row, text in enumerate(texts):
            if "bad" in text:
                vectors[row, 3] = self.value
        return vectors


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["dense", "chroma"])
def test_a_vector_that_is_not_finite_is_refused_by_name(kind: str, value: float, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    retriever: Retriever = (
        DenseRetriever(NotFinite(value), folder=folder)
        if kind == "dense"
        else ChromaRetriever(tmp_path, NotFinite(value))
    )
    with pytest.raises(DocumentError, match=r"vector for document 'ill' is not finite.*check the encoder's weights"):
        retriever.add([Document("well", "good"), Document("ill", "bad"), Document("other", "fine")])
    assert len(retriever) == 0
    assert not list(folder.glob("*.part.safetensors"))  # nor does the next attempt find it there
    retriever.add([Document("well", "good")])
    with pytest.raises(DocumentError, match="vector for question 'a bad one' is not finite"):
        retriever.retrieve(["good", "a bad one"], 1)

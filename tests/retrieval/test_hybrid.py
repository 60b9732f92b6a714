"""Reciprocal-rank fusion against the formula, its weights, and keeping several retrievers in step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.retrieval import BM25Retriever, DenseRetriever, Hit, HybridRetriever, Retriever
from tests.retrieval.helpers import WordEncoder, documents


class Ranked(Retriever):
    """Finds documents in a given order."""

    def __init__(self, *order: str) -> None:
        self.order = list(order)
        self.asked = 0

    def add(self, documents: Sequence[Document]) -> None:
        self.order += [document.id for document in documents]

    def delete(self, document_id: str) -> None:
        self.order.remove(document_id)

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        self.asked += 1
        found = [name for name in self.order if allowed is None or name in allowed][:k]
        return [[Hit(name, name, 0.0) for name in found] for _ in questions]

    def __len__(self) -> int:
        return len(self.order)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self.order


NAMES = "abcdefgh"


RANKINGS = st.lists(st.sampled_from(NAMES), unique=True)


@given(rankings=st.lists(RANKINGS, min_size=1, max_size=4), data=st.data())
def test_scores_are_weighted_sums_of_reciprocal_ranks(rankings: list[list[str]], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.5, 1, 2, 7]), min_size=len(rankings), max_size=len(rankings)))
    depth, k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    scores: dict[str, float] = {}
    for ranking, weight in zip(rankings, weights):
        for rank, name in enumerate(ranking[: max(depth, k)], 1):
            scores[name] = scores.get(name, 0.0) + weight / (60 + rank)
    [hits] = HybridRetriever([Ranked(*ranking) for ranking in rankings], weights, depth=depth).retrieve(["?"], k)
    assert [hit.score for hit in hits] == sorted(scores.values(), reverse=True)[:k]
    assert all(scores[hit.document_id] == hit.score for hit in hits)


def test_a_retriever_of_weight_zero_is_not_asked() -> None:
    silent = Ranked("b", "c")
    [hits] = HybridRetriever([Ranked("a"), silent], [1, 0]).retrieve(["?"], 5)
    assert [hit.document_id for hit in hits] == ["a"]
    assert silent.asked == 0


def real() -> HybridRetriever:
    return HybridRetriever([BM25Retriever(), DenseRetriever(WordEncoder())])


def test_it_follows_changes_and_honours_filters(tmp_path: Path) -> None:
    hybrid = real()
    hybrid.add(documents("storm in May", "storm and sun", "sun in June", "snow"))
    hybrid.delete("d0")
    assert [hit.document_id for hit in hybrid.retrieve(["storm"], 1)[0]] == ["d1"]
    [hits] = hybrid.retrieve(["storm sun"], 2, allowed={"d0", "d2", "d3"})
    assert [hit.document_id for hit in hits] == ["d2", "d3"]
    assert hits[0].metadata == {"place": 2}
    assert len(hybrid) == 3
    assert "d0" not in hybrid
    hybrid.save(tmp_path)
    again = HybridRetriever([BM25Retriever.load(tmp_path / "0"), DenseRetriever.load(tmp_path / "1", WordEncoder())])
    assert again.retrieve(["storm sun"], 3) == hybrid.retrieve(["storm sun"], 3)


def test_what_one_refuses_none_takes() -> None:
    hybrid = real()
    hybrid.add(documents("storm"))
    hybrid.retrievers[1].add([Document("only", "here")])
    with pytest.raises(BankError, match="'only' is already"):
        hybrid.add([Document("new", "x"), Document("only", "y")])
    assert "new" not in hybrid
    assert "only" not in hybrid.retrievers[0]
    hybrid.delete("only")  # wherever it is
    assert "only" not in hybrid
    with pytest.raises(BankError, match="no document 'only'"):
        hybrid.delete("only")


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")], [1, float("inf")], []])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="do not fit 2 retrievers"):
        HybridRetriever([Ranked(), Ranked()], weights)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="give it at least one"):
        HybridRetriever([])
    with pytest.raises(ConfigError, match="depth must be at least 1, got 0"):
        HybridRetriever([Ranked()], depth=0)
    with pytest.raises(ConfigError, match="Ranked keeps no documents itself; save the index"):
        HybridRetriever([Ranked()]).save(Path("unused"))

"""Retrievers by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mac_rag.errors import BankError, ConfigError, ModelLoadError
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever, encoders, make_retriever
from tests.retrieval.helpers import documents

SHARED = BM25Retriever()
NUMBER = 7


def test_names() -> None:
    assert make_retriever("none") is None
    assert isinstance(make_retriever("bm25"), BM25Retriever)
    assert make_retriever(f"{__name__}:SHARED") is SHARED
    assert isinstance(make_retriever("mac_rag.retrieval:BM25Retriever"), BM25Retriever)
    with pytest.raises(ModelLoadError, match="'facebook/contriever-msmarco'"):
        make_retriever("contriever-msmarco")
    with pytest.raises(ModelLoadError, match="'facebook/dpr-ctx_encoder-single-nq-base'"):
        make_retriever("dpr")


NAMES = "none, bm25, contriever, contriever-msmarco, dpr, minilm, hybrid"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((spec, NAMES) for spec in ("google", "", "bm25:", ":x", "BM25")),
        *(
            (spec, "cannot import retriever")
            for spec in ("no_such_module:x", "mac_rag.retrieval:nothing", "mac_rag.nothing:x", "..:x")
        ),
        (f"{__name__}:NUMBER", "is int, neither a mac_rag Retriever nor a LlamaIndex retriever"),
    ],
)
def test_what_names_no_retriever_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_retriever(spec)


def test_hybrid_of_bm25_and_minilm_is_kept_in_a_folder(tmp_path: Path) -> None:
    hybrid = make_retriever("hybrid", folder=tmp_path)
    assert isinstance(hybrid, HybridRetriever)
    hybrid.add(documents("A storm hit the coast.", "Cats and dogs.", "A hurricane near the sea."))
    found = hybrid.retrieve(["storm", "pets"], 2)
    assert [hits[0].document_id for hits in found] == ["d0", "d1"]
    hybrid.save(tmp_path)
    again = make_retriever("hybrid", folder=tmp_path)
    assert again.retrieve(["storm", "pets"], 2) == found
    with pytest.raises(BankError, match="holds a retriever of kind 'bm25'"):
        make_retriever("minilm", folder=tmp_path / "0")


def test_a_dense_retriever_is_opened_where_it_was_saved(
    tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = encoders.contriever(str(model_folder("bert")), device="cpu")
    monkeypatch.setattr(encoders, "contriever", lambda place: tiny)
    retriever = make_retriever("contriever", folder=tmp_path)
    assert isinstance(retriever, DenseRetriever)
    retriever.add(documents("storm", "sun"))
    retriever.save(tmp_path)
    assert len(make_retriever("contriever", folder=tmp_path)) == 2

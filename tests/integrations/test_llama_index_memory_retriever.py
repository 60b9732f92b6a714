"""MemoryRetriever returns the documents in the order of their attention."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core import VectorStoreIndex

from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.integrations.llama_index import MemoryRetriever
from mac_rag.memory import MemoryBank
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS

QUESTION = "Who opened the bridge of Norrland?"


def engine_of(model: MACModel, keep_texts: bool) -> MACEngine:
    engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=keep_texts))
    engine.adapt(Document(name, text, {"date": f"{2000 + i}"}) for i, (name, text) in enumerate(FACTS.items()))
    return engine


@pytest.mark.parametrize("keep_texts", [True, False])
def test_documents_come_by_attention(tiny_model: MACModel, index: VectorStoreIndex, keep_texts: bool) -> None:
    engine = engine_of(tiny_model, keep_texts)
    retriever = MemoryRetriever(engine, None if keep_texts else index, similarity_top_k=2)
    ids, mass = engine.document_attention([QUESTION])
    best = mass[0].topk(2)
    expected = [(FACTS[ids[place]], score) for place, score in zip(best.indices.tolist(), best.values.tolist())]
    for found in (retriever.retrieve(QUESTION), asyncio.run(retriever.aretrieve(QUESTION))):
        assert [(scored.text, scored.score) for scored in found] == expected
    first = next(iter(FACTS))
    for restricted in (
        MemoryRetriever(engine, index, allowed={first}),
        MemoryRetriever(engine, index, as_of="2000"),
    ):
        assert [scored.node.ref_doc_id for scored in restricted.retrieve(QUESTION)] == [first]


def test_what_cannot_be_retrieved(tiny_model: MACModel, index: VectorStoreIndex) -> None:
    assert MemoryRetriever(MACEngine(tiny_model), index).retrieve(QUESTION) == []
    with pytest.raises(ConfigError, match="keep_texts=True"):
        MemoryRetriever(engine_of(tiny_model, False))
    with pytest.raises(ConfigError):
        MemoryRetriever(engine_of(tiny_model, True), similarity_top_k=0)

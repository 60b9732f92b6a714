"""What answers from memory alone name as their sources in LlamaIndex."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode

from mac_rag.bank import MemoryBank
from mac_rag.config import AttentionConfig
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.integrations.llama_index import MACLLM, MACSynthesizer
from mac_rag.model import MACModel
from mac_rag.model.calibration import Calibration
from tests.integrations.helpers import FACTS, QUESTION


def llm_of(model: MACModel, keep_texts: bool = False) -> MACLLM:
    engine = MACEngine(model, MemoryBank(model.fingerprint, keep_texts=keep_texts))
    engine.adapt(Document(name, text, {"date": "2004"}) for name, text in FACTS.items())
    return MACLLM(engine=engine, sources=2)


def by_attention(llm: MACLLM) -> dict[str, float]:
    ids, mass = llm.engine.document_attention([QUESTION])
    return dict(sorted(zip(ids, mass[0].tolist()), key=lambda pair: -pair[1])[:2])


def test_nodes_of_the_index(tiny_model: MACModel, index: VectorStoreIndex) -> None:
    llm = llm_of(tiny_model)
    response = MACSynthesizer(llm, sources=2, source=index).synthesize(QUESTION, [])
    assert {scored.node.ref_doc_id: scored.score for scored in response.source_nodes} == by_attention(llm)
    assert [scored.text for scored in response.source_nodes] == [FACTS[name] for name in by_attention(llm)]
    assert [one["document_id"] for one in response.metadata["mac_sources"]] == list(by_attention(llm))


def test_kept_texts_and_none(tiny_model: MACModel) -> None:
    llm = llm_of(tiny_model, keep_texts=True)
    response = asyncio.run(MACSynthesizer(llm, sources=2).asynthesize(QUESTION, []))
    assert [scored.node.ref_doc_id for scored in response.source_nodes] == list(by_attention(llm))
    assert response.source_nodes[0].node.metadata == {"date": "2004"}
    bare = MACSynthesizer(llm_of(tiny_model), sources=2).synthesize(QUESTION, [])
    assert bare.source_nodes == []
    assert [one["date"] for one in bare.metadata["mac_sources"]] == ["2004-01-01"] * 2


def test_a_streamed_answer_has_sources_too(tiny_model: MACModel) -> None:
    llm = llm_of(tiny_model, keep_texts=True)
    response = MACSynthesizer(llm, streaming=True, sources=2).synthesize(QUESTION, [])
    assert isinstance(response, StreamingResponse)
    assert len(response.source_nodes) == 2
    assert [one["sentence"] for one in response.metadata["mac_sources"]] == [None, None]


def test_what_names_no_sources(tiny_model: MACModel) -> None:
    llm = llm_of(tiny_model)
    given = [NodeWithScore(node=TextNode(text="Anna Berg opened the bridge."), score=1.0)]
    assert "mac_sources" not in MACSynthesizer(llm).synthesize(QUESTION, given).metadata
    assert "mac_sources" not in MACSynthesizer(llm, sources=0).synthesize(QUESTION, []).metadata
    coarse = MACEngine(tiny_model, llm.engine.bank, attention=AttentionConfig(strategy="hierarchical"))
    assert "mac_sources" not in MACSynthesizer(MACLLM(engine=coarse)).synthesize(QUESTION, []).metadata


@pytest.mark.parametrize("ask", ["complete", "acomplete", "chat", "achat"])
def test_raw_names_them(tiny_model: MACModel, ask: str) -> None:
    llm = llm_of(tiny_model)
    given = QUESTION if "complete" in ask else [ChatMessage(content=QUESTION)]
    response = getattr(llm, ask)(given)
    raw = (asyncio.run(response) if ask.startswith("a") else response).raw
    assert [one["document_id"] for one in raw["mac_sources"]] == list(by_attention(llm))
    assert llm.model_copy(update={"sources": 0}).complete(QUESTION).raw is None


def test_doubt_is_in_raw_and_in_metadata(tiny_model: MACModel) -> None:
    llm = llm_of(tiny_model).model_copy(update={"min_confidence": 0.5})
    plain = llm.model_copy(update={"min_confidence": None}).complete(QUESTION).text
    for bias, text in ((-9.0, "I don't know"), (9.0, plain)):
        fitted = {"weights": {}, "bias": bias, "questions": 1, "data": "made up"}
        values = {"fingerprint": tiny_model.fingerprint, "modes": {"memory": fitted}}
        tiny_model.calibration = Calibration.model_validate(values)
        response = llm.complete(QUESTION)
        assert response.text == text
        assert (response.raw["mac_confidence"] < 0.5) == (bias < 0)
        assert response.raw.get("mac_guess") == (plain if bias < 0 else None)
        assert "".join(piece.delta or "" for piece in llm.stream_complete(QUESTION)) == text
        told = MACSynthesizer(llm, sources=1).synthesize(QUESTION, [])
        later = asyncio.run(MACSynthesizer(llm, sources=1).asynthesize(QUESTION, []))
        assert str(told) == str(later) == text
        for metadata in (told.metadata, later.metadata):
            assert metadata["mac_confidence"] == response.raw["mac_confidence"]
            assert metadata.get("mac_guess") == response.raw.get("mac_guess")
            assert len(metadata["mac_sources"]) == 1

"""MACSynthesizer keeps nodes apart, shortens documents and never the question, and names the sources of its answers."""

from __future__ import annotations

import asyncio
import logging

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.schema import NodeWithScore, TextNode

from mac_rag.bank import MemoryBank
from mac_rag.config import AttentionConfig
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.integrations.llama_index import MACLLM, MACSynthesizer
from mac_rag.model import MACModel
from mac_rag.model.calibration import Calibration
from tests.integrations.helpers import FACTS, QUESTION, EventLog, RecordingEngine, reference

LONG = "Anna Berg opened the bridge of Norrland. " * 80


def nodes(*texts: str) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(id_=f"n{i}", text=text, metadata={}), score=1.0) for i, text in enumerate(texts)
    ]


def every_way(llm: MACLLM, given: list[NodeWithScore]) -> list[str]:
    """The answer of each way of asking."""
    plain, streaming = MACSynthesizer(llm), MACSynthesizer(llm, streaming=True)

    async def asked() -> list[str]:
        response = await streaming.asynthesize(QUESTION, given)
        assert isinstance(response, AsyncStreamingResponse)
        return [
            str(await plain.asynthesize(QUESTION, given)),
            "".join([t async for t in response.async_response_gen()]),
        ]

    response = streaming.synthesize(QUESTION, given)
    assert isinstance(response, StreamingResponse)
    return [str(plain.synthesize(QUESTION, given)), "".join(response.response_gen), *asyncio.run(asked())]


def test_each_node_is_a_document_of_one_prompt(llm: MACLLM, engine: RecordingEngine) -> None:
    expected = reference(engine, *FACTS.values())
    assert every_way(llm, nodes(*FACTS.values())) == [expected] * 4
    assert engine.asked == [(QUESTION, tuple(FACTS.values()))] * 4
    texts = MACSynthesizer(llm).get_response(QUESTION, list(FACTS.values()))
    assert texts == asyncio.run(MACSynthesizer(llm).aget_response(QUESTION, list(FACTS.values()))) == expected


def test_query_engines_keep_nodes_and_metadata(index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine) -> None:
    queries = index.as_query_engine(llm=llm, response_synthesizer=MACSynthesizer(llm), similarity_top_k=3)
    response = queries.query(QUESTION)
    assert isinstance(response, Response)
    assert str(response) == reference(engine, *(node.text for node in response.source_nodes))
    assert response.metadata["mac_truncated"] is False
    assert {node.node_id for node in response.source_nodes} == set(response.metadata) - {"mac_truncated"}


def test_documents_are_shortened_and_the_user_is_told(
    llm: MACLLM, engine: RecordingEngine, event_log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [FACTS["museum"], LONG, FACTS["river"]]
    given = nodes(*texts)
    expected = reference(engine, *texts, overflow="truncate")
    with caplog.at_level(logging.WARNING):
        assert every_way(llm, given) == [expected] * 4
    assert caplog.text.count("documents were shortened, and 1 of them left out") == 1
    assert event_log.names().count("DocumentsTruncatedEvent") == 4
    ((question, contexts), *_) = engine.asked
    assert question == QUESTION
    museum, long = contexts
    assert museum == FACTS["museum"]
    assert LONG.startswith(long[:-1])
    (event, *_) = [event for event in event_log.events if event.class_name() == "DocumentsTruncatedEvent"]
    assert (event.query_str, event.given, event.used) == (QUESTION, texts, list(contexts))
    response = MACSynthesizer(llm).synthesize(QUESTION, given, additional_source_nodes=nodes("more"))
    assert response.metadata["mac_truncated"] is True
    assert [node.text for node in response.source_nodes] == [*texts, "more"]


def test_without_nodes_memory_answers(llm: MACLLM, engine: RecordingEngine) -> None:
    expected = reference(engine)
    assert every_way(llm, []) == [expected] * 4
    engine.forget("bridge"), engine.forget("museum"), engine.forget("river")
    assert every_way(llm, []) == ["Empty Response"] * 4


def test_it_is_announced(llm: MACLLM, event_log: EventLog) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    synthesizer = MACSynthesizer(llm, callback_manager=CallbackManager([debug]))
    expected = [
        "SynthesizeStartEvent",
        "LLMPredictStartEvent",
        "LLMCompletionStartEvent",
        "LLMCompletionEndEvent",
        "LLMPredictEndEvent",
        "SynthesizeEndEvent",
    ]
    response = synthesizer.synthesize(QUESTION, nodes(FACTS["bridge"]))
    assert event_log.names() == expected
    assert event_log.events[-1].response.metadata == response.metadata
    asyncio.run(synthesizer.asynthesize(QUESTION, nodes(FACTS["bridge"])))
    assert event_log.names() == expected * 2
    assert len(debug.get_event_pairs(CBEventType.SYNTHESIZE)) == len(debug.get_event_pairs(CBEventType.LLM)) == 2


def test_another_llm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with a MACLLM, not with MockLLM.*response_mode"):
        MACSynthesizer(MockLLM())


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

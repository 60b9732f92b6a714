"""MACSynthesizer keeps nodes apart and shortens documents, never the question."""

from __future__ import annotations

import asyncio
import logging

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import MockLLM
from llama_index.core.schema import NodeWithScore, TextNode

from mac_rag.errors import ConfigError
from mac_rag.integrations.llama_index import MACLLM, MACSynthesizer
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

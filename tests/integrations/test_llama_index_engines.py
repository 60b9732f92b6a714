"""Query and chat engines of LlamaIndex on top of MACLLM: what the engine is asked, and what reaches the user."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.memory import Memory

from mac_rag.bank.bank import MemoryBank
from mac_rag.errors import FingerprintError
from mac_rag.integrations.llama_index import MACLLM, MACNodePostprocessor, MACSynthesizer
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, QUESTION, RecordingEngine, forget_warnings, reference

MODES = ["compact", "refine", "tree_summarize", "simple_summarize"]


# -- response modes --


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "simple_summarize"])
def test_one_prompt_has_several_nodes(index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine, mode: str) -> None:
    response = index.as_query_engine(llm=llm, similarity_top_k=3, response_mode=mode).query(QUESTION)
    ((question, contexts),) = engine.asked
    assert question == QUESTION
    texts = [node.text for node in response.source_nodes]
    assert sorted(texts) == sorted(FACTS.values())
    assert "".join(contexts).split() == " ".join(texts).split()


def test_refine_keeps_the_best_node_s_answer(index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine) -> None:
    expected = reference(engine, FACTS["bridge"])
    for streaming in (False, True):
        forget_warnings()
        queries = index.as_query_engine(llm=llm, similarity_top_k=3, response_mode="refine", streaming=streaming)
        with pytest.warns(UserWarning, match="keeps the answer to the first context"):
            assert str(queries.query(QUESTION)) == expected
    assert engine.asked == [(QUESTION, (FACTS["bridge"],))] * 2


def test_accumulate_asks_for_each_node(index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine) -> None:
    queries = index.as_query_engine(llm=llm, similarity_top_k=3, response_mode="accumulate")
    response = str(queries.query(QUESTION))
    assert sorted(engine.asked) == sorted((QUESTION, (text,)) for text in FACTS.values())
    for question, contexts in list(engine.asked):
        assert question == QUESTION
        assert reference(engine, *(contexts or ())) in response


def test_generation_asks_the_memory_alone(index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine) -> None:
    expected = engine.answer([QUESTION])[0].text
    engine.asked.clear()
    assert str(index.as_query_engine(llm=llm, response_mode="generation").query(QUESTION)) == expected
    assert engine.asked == [(QUESTION, None)]


# -- streaming, threads --


@pytest.mark.parametrize("mode", MODES)
def test_question_and_context_reach_the_engine_as_they_are(
    index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reference(engine, FACTS["bridge"])
    queries, streaming = (
        index.as_query_engine(llm=llm, similarity_top_k=1, response_mode=mode, streaming=streaming)
        for streaming in (False, True)
    )

    async def streamed() -> list[str]:
        response = await streaming.aquery(QUESTION)
        assert isinstance(response, AsyncStreamingResponse)
        return [token async for token in response.async_response_gen()]

    with caplog.at_level(logging.WARNING):
        response = streaming.query(QUESTION)
        assert isinstance(response, StreamingResponse)
        tokens = list(response.response_gen)
        assert len(tokens) > 1
        whole = [str(queries.query(QUESTION)), str(asyncio.run(queries.aquery(QUESTION)))]
        assert [*whole, "".join(tokens), "".join(asyncio.run(streamed()))] == [expected] * 4
    assert engine.asked == [(QUESTION, (FACTS["bridge"],))] * 4
    assert not caplog.records  # refine logs what it swallows


# -- errors --


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ask", ["query", "aquery", "stream"])
def test_a_foreign_bank_reaches_the_user(
    index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine, other_model: MACModel, mode: str, ask: str
) -> None:
    engine.bank = MemoryBank(other_model.fingerprint)
    with pytest.raises(FingerprintError, match="written by model"):
        run(index.as_query_engine(llm=llm, response_mode=mode, streaming=ask == "stream"), ask)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("ask", "documents"), [("query", 1), ("aquery", 1), ("stream", 1), ("query", 8)]
)  # eight are beyond even LlamaIndex's window
def test_the_user_is_told_of_a_context_beyond_the_window(
    index_of: Callable[..., VectorStoreIndex],
    llm: MACLLM,
    mode: str,
    ask: str,
    documents: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    index = index_of(*(f"Number {i}. " + "Anna Berg opened the bridge of Norrland. " * 90 for i in range(documents)))
    with caplog.at_level(logging.WARNING):
        run(index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=8, streaming=ask == "stream"), ask)
    assert "exceed the LM's window, so documents were shortened" in caplog.text


def run(queries: Any, ask: str) -> None:
    if ask == "aquery":
        asyncio.run(queries.aquery(QUESTION))
    elif ask == "query":
        queries.query(QUESTION)
    else:
        list(queries.query(QUESTION).response_gen)


# -- chat engines --


@pytest.mark.parametrize("mode", ["context", "condense_plus_context", "simple"])
def test_chats_ask_questions_alone_and_say_so_once(
    index: VectorStoreIndex, llm: MACLLM, engine: RecordingEngine, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {} if mode == "simple" else {"similarity_top_k": 1, "skip_condense": True}
    museum, bridge = ((), ()) if mode == "simple" else ((FACTS["museum"],), (FACTS["bridge"],))
    expected = reference(engine, *bridge)
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, **options)
    question = "Who leads the {museum} of Sola? Answer YES or NO"
    with caplog.at_level(logging.WARNING):
        first = chat.chat(question)
        assert engine.asked == [(question, museum or None)]
        engine.asked.clear()
        assert str(chat.chat(QUESTION)) == expected
        assert str(asyncio.run(chat.achat(QUESTION))) == expected
        assert "".join(chat.stream_chat(QUESTION).response_gen) == expected
    assert engine.asked == [(QUESTION, bridge or None)] * 3
    assert [message.content for message in chat.chat_history][:4] == [question, str(first), QUESTION, expected]
    [warning] = caplog.messages
    assert "complete by itself" in warning


def test_long_chats_do_not_eat_the_window(index: VectorStoreIndex, llm: MACLLM) -> None:
    """LlamaIndex counts the history against the window, though the LM never reads it."""
    memory = Memory.from_defaults(token_limit=llm.metadata.context_window - 256)  # as the chat engines make it
    chat = index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=1, memory=memory)
    answer = "A long answer about bridges, museums and ferries that leaves nothing out. " * 40
    tokens = []
    for _ in range(8):
        assert str(chat.chat(QUESTION)) != "Empty Response"
        memory.put(ChatMessage(role="assistant", content=answer))
        tokens.append(sum(memory._estimate_token_count(message) for message in memory.get()))
    assert max(tokens) > 0.6 * memory.token_limit


# -- in a crowd --

CROWD = [f"{QUESTION} And what about number {number}?" for number in range(12)]


@pytest.fixture(params=["compact", "ours"])
def engines(request: pytest.FixtureRequest, index: VectorStoreIndex, llm: MACLLM) -> tuple[Any, Any]:
    """A query engine, and one that streams."""
    rank = [MACNodePostprocessor(llm.engine)]

    def build(streaming: bool) -> Any:
        if request.param == "compact":
            return index.as_query_engine(llm=llm, node_postprocessors=rank, streaming=streaming)
        synthesizer = MACSynthesizer(llm, streaming=streaming)
        return index.as_query_engine(llm=llm, node_postprocessors=rank, response_synthesizer=synthesizer)

    return build(False), build(True)


def test_slow_consumers_stall_nobody(engines: tuple[Any, Any]) -> None:
    plain, streaming = engines
    expected = [str(plain.query(question)) for question in CROWD[:6]]
    waiting = [iter(streaming.query(question).response_gen) for question in CROWD[:4]]
    begun = [next(tokens) for tokens in waiting]  # nobody reads on

    async def asked() -> tuple[list[str], int]:
        slow = [(await streaming.aquery(question)).async_response_gen() for question in CROWD]
        first = [await anext(tokens) for tokens in slow]  # more than there are threads
        ticks, done = 0, False

        async def tick() -> None:
            nonlocal ticks
            while not done:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        others = [str(text) for text in await asyncio.gather(*map(plain.aquery, CROWD[:6]))]
        done = True
        await ticking
        rest = ["".join([head] + [token async for token in tail]) for head, tail in zip(first, slow)]
        assert rest[:6] == expected
        return others, ticks

    others, ticks = asyncio.run(asked())
    assert others == expected
    assert ticks > 2  # a loop that is stalled turns once at most, and a busy machine is slow
    assert ["".join([head, *tail]) for head, tail in zip(begun, waiting)] == expected[:4]

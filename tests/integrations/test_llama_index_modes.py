"""Every response mode and chat mode of LlamaIndex runs with MACLLM as with any LLM, alone and in a crowd."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.response_synthesizers import ResponseMode

from mac_rag.integrations.llama_index import MACLLM, MACNodePostprocessor, MACSynthesizer
from tests.integrations.helpers import QUESTION


def outcome(run: Any) -> Any:
    """What a query gives: kind of response and source nodes, or the error."""
    try:
        response = run()
        if hasattr(response, "response_gen"):
            assert "".join(response.response_gen)
        return type(response).__name__, [node.node_id for node in response.source_nodes]
    except (ValueError, NotImplementedError) as error:
        return type(error).__name__, str(error)


@pytest.mark.filterwarnings("ignore:a later step of refine")
@pytest.mark.parametrize("mode", list(ResponseMode))
@pytest.mark.parametrize("streaming", [False, True])
def test_response_modes_are_those_of_any_llm(
    index: VectorStoreIndex, llm: MACLLM, monkeypatch: pytest.MonkeyPatch, mode: ResponseMode, streaming: bool
) -> None:
    def ask(which: Any) -> list[Any]:
        monkeypatch.setattr(Settings, "_llm", which)  # some modes resolve it, whatever they are given
        queries = index.as_query_engine(llm=which, response_mode=mode, streaming=streaming, similarity_top_k=2)
        return [outcome(lambda: queries.query(QUESTION))] + (
            [] if streaming else [outcome(lambda: asyncio.run(queries.aquery(QUESTION)))]
        )

    assert ask(llm) == ask(MockLLM(max_tokens=4))


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

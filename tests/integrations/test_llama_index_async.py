"""MACLLM among threads and in an event loop, and the events that it fires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler

from mac_rag.errors import BankError
from mac_rag.integrations.llama_index import MACLLM
from tests.integrations.helpers import QUESTION, EventLog, RecordingEngine, reference, user

TEMPLATE = PromptTemplate("Answer {query_str} from {context_str}, please.")


@pytest.mark.parametrize("ask", ["acomplete", "achat", "apredict"])
def test_async_calls_leave_the_event_loop_free(remembering: RecordingEngine, ask: str) -> None:
    llm = MACLLM(engine=remembering)
    calls: dict[str, Callable[[], Any]] = {
        "acomplete": lambda: llm.acomplete(QUESTION),
        "achat": lambda: llm.achat([user(QUESTION)]),
        "apredict": lambda: llm.apredict(TEMPLATE, query_str=QUESTION, context_str="Context."),
    }

    async def held_up() -> None:
        remembering.gate.clear()
        task = asyncio.create_task(calls[ask]())
        while not remembering.asked:
            await asyncio.sleep(0.001)
        assert not task.done()
        remembering.gate.set()
        await task

    asyncio.run(held_up())


def test_async_calls_that_wait_share_one_pass(remembering: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is larger than asyncio's own threads are many."""
    llm = MACLLM(engine=remembering, max_new_tokens=2)
    questions = [f"{QUESTION} And number {number}?" for number in range(32)]
    expected = [llm.complete(question).text for question in questions]
    passes: list[int] = []
    generate, queue = remembering.model.generate, remembering._queue

    def counting(prompts: Sequence[Any], **options: Any) -> list[str]:
        passes.append(len(prompts))
        return generate(prompts, **options)

    monkeypatch.setattr(remembering.model, "generate", counting)

    async def crowd() -> list[str]:
        with queue.turn():
            tasks = [asyncio.create_task(llm.acomplete(question)) for question in questions]
            while len(queue._waiting) < len(questions):
                await asyncio.sleep(0.001)
        return [(await task).text for task in tasks]

    assert asyncio.run(crowd()) == expected
    assert passes == [32]


def test_async_tokens_come_while_the_answer_is_being_made(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering)

    async def tokens() -> str:
        remembering.gate.clear()
        stream = await llm.astream(TEMPLATE, query_str=QUESTION, context_str="Context.")
        first = await anext(stream)
        remembering.gate.set()
        return first + "".join([token async for token in stream])

    assert asyncio.run(tokens()) == reference(remembering, "Context.")


def test_predict_fires_what_other_llms_fire(remembering: RecordingEngine, event_log: EventLog) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = MACLLM(engine=remembering, callback_manager=CallbackManager([debug]))
    answer = llm.predict(TEMPLATE, query_str=QUESTION, context_str="Context.")
    sync = event_log.names()
    assert sync == [
        "LLMPredictStartEvent",
        "LLMCompletionStartEvent",
        "LLMCompletionEndEvent",
        "LLMPredictEndEvent",
    ]
    assert event_log.events[-1].output == answer
    assert event_log.events[1].prompt == QUESTION
    assert event_log.events[1].model_dict["model_name"] == llm.model
    asyncio.run(llm.apredict(TEMPLATE, query_str=QUESTION, context_str="Context."))
    assert event_log.names()[len(sync) :] == sync
    assert {pair[0].event_type for pair in debug.get_event_pairs()} == {CBEventType.TEMPLATING, CBEventType.LLM}


def test_streams_fire_progress_and_their_end(remembering: RecordingEngine, event_log: EventLog) -> None:
    tokens = list(MACLLM(engine=remembering).stream(TEMPLATE, query_str=QUESTION, context_str="Context."))
    names = event_log.names()
    assert names[:2] == ["LLMPredictStartEvent", "LLMCompletionStartEvent"]
    assert names[2:] == ["LLMCompletionInProgressEvent"] * len(tokens) + ["LLMCompletionEndEvent"]


def test_failures_reach_the_callbacks(engine: RecordingEngine, event_log: EventLog) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = MACLLM(engine=engine, callback_manager=CallbackManager([debug]))
    with pytest.raises(BankError):
        llm.predict(TEMPLATE, query_str=QUESTION, context_str="")
    assert isinstance(debug.get_event_pairs(CBEventType.LLM)[0][1].payload["exception"], BankError)
    assert "SpanDropEvent" in event_log.names()

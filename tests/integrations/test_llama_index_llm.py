"""MACLLM by itself and among threads: questions in, answers out, events, and what it refuses."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError, DocumentError, MACError, ModelLoadError
from mac_rag.integrations.llama_index import MACLLM
from mac_rag.model import MACModel
from tests.integrations.helpers import FACTS, QUESTION, EventLog, RecordingEngine, reference, user

TEMPLATE = PromptTemplate("Answer {query_str} from {context_str}, please.")


# -- answers --


def test_every_way_of_asking_gives_the_same_answer(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering)
    expected = reference(remembering)
    said = [user("Hello"), ChatMessage(role="assistant", content="Hi"), user(QUESTION)]  # of which the last is asked

    async def asked() -> list[str | None]:
        streamed = [piece async for piece in await llm.astream_complete(QUESTION)]
        chatted = [piece async for piece in await llm.astream_chat(said)]
        return [
            (await llm.acomplete(QUESTION)).text,
            (await llm.achat(said)).message.content,
            streamed[-1].text,
            "".join(piece.delta or "" for piece in streamed),
            chatted[-1].message.content,
        ]

    streamed = list(llm.stream_complete(QUESTION))
    chatted = list(llm.stream_chat(said))
    assert len(streamed) > 1
    chat = llm.chat(said).message
    assert chat.role == chatted[-1].message.role == MessageRole.ASSISTANT
    answers = [streamed[-1].text, "".join(piece.delta or "" for piece in streamed), chatted[-1].message.content]
    assert [llm.complete(QUESTION).text, chat.content, *answers, *asyncio.run(asked())] == [expected] * 10
    assert set(remembering.asked) == {(QUESTION, None)}


def test_predict_reads_slots_and_never_the_wording(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering)
    expected = reference(remembering, "Some context.")

    async def asked() -> list[str]:
        streamed = [t async for t in await llm.astream(TEMPLATE, query_str=QUESTION, context_str="Some context.")]
        return [await llm.apredict(TEMPLATE, query_str=QUESTION, context_str="Some context."), "".join(streamed)]

    partial = TEMPLATE.partial_format(query_str=QUESTION)
    answers = [
        llm.predict(TEMPLATE, query_str=QUESTION, context_str="Some context."),
        llm.predict(partial, context_str=["Some context."]),
        "".join(llm.stream(partial, context_msg="Some context.")),
        *asyncio.run(asked()),
    ]
    assert answers == [expected] * 5
    assert remembering.asked == [(QUESTION, ("Some context.",))] * 5


def test_braces_and_template_words_in_a_question_are_left_alone(remembering: RecordingEngine) -> None:
    question = "What does {context_str} mean in Query: {query_str}?"
    MACLLM(engine=remembering).predict(TEMPLATE, query_str=question, context_str="a {brace}")
    assert remembering.asked == [(question, ("a {brace}",))]


def test_an_existing_answer_stands(remembering: RecordingEngine) -> None:
    refine = PromptTemplate("{query_str} {existing_answer} {context_msg}")
    llm = MACLLM(engine=remembering)
    slots = {"query_str": QUESTION, "existing_answer": "Anna Berg", "context_msg": "Something else."}

    async def asked() -> list[str]:
        return [await llm.apredict(refine, **slots), *[token async for token in await llm.astream(refine, **slots)]]

    with pytest.warns(UserWarning, match="does not read the others"):
        assert llm.predict(refine, **slots) == "Anna Berg"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning is not repeated
        assert [*llm.stream(refine, **slots), *asyncio.run(asked())] == ["Anna Berg"] * 3
    assert remembering.asked == []


def test_an_empty_existing_answer_is_answered_again(remembering: RecordingEngine) -> None:
    refine = PromptTemplate("{query_str} {existing_answer} {context_msg}")
    MACLLM(engine=remembering).predict(refine, query_str=QUESTION, existing_answer="", context_msg="More.")
    assert remembering.asked == [(QUESTION, ("More.",))]


# -- memory --


def test_memory_is_used_when_there_is_some(engine: RecordingEngine) -> None:
    llm = MACLLM(engine=engine)
    alone = reference(engine, "Context.", use_memory=False)
    assert llm.complete(QUESTION, contexts=["Context."]).text == alone
    engine.adapt([Document("bridge", FACTS["bridge"])])
    assert llm.complete(QUESTION, contexts=["Context."]).text == reference(engine, "Context.")
    without = MACLLM(engine=engine, use_memory=False)
    assert without.complete(QUESTION, contexts=["Context."]).text == alone
    assert without.complete(QUESTION).text == reference(engine, use_memory=False)


@pytest.mark.parametrize(("use_memory", "contexts"), [(None, None), (True, None), (True, ["Context."])])
def test_empty_banks_are_errors(engine: RecordingEngine, use_memory: bool | None, contexts: list[str] | None) -> None:
    with pytest.raises(BankError, match="the memory bank is empty"):
        MACLLM(engine=engine, use_memory=use_memory).complete(QUESTION, contexts=contexts)


# -- limits --


def test_the_end_of_a_context_beyond_the_window_is_left_out_and_the_user_is_told(
    remembering: RecordingEngine, event_log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    llm = MACLLM(engine=remembering)
    contexts = ["Rain fell.", "Anna Berg opened a bridge. " * remembering.model.context_window, "Nothing else."]
    (expected,) = remembering.answer([QUESTION], contexts=[contexts], overflow="truncate")
    assert len(expected.contexts) == 2
    with caplog.at_level(logging.WARNING):
        assert llm.complete(QUESTION, contexts=contexts).text == expected.text
        assert list(llm.stream_complete(QUESTION, contexts=contexts))[-1].text == expected.text
    assert remembering.asked[-2:] == [(QUESTION, expected.contexts)] * 2
    assert caplog.text.count("shortened, and 1 of them left out") == 1
    assert event_log.names().count("DocumentsTruncatedEvent") == 2


def test_a_question_beyond_the_window_is_refused(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering)
    for contexts in (None, ["Context."]):
        with pytest.raises(DocumentError):
            llm.complete("Who? " * remembering.model.context_window, contexts=contexts)


# -- what it refuses --


class Person(BaseModel):
    name: str


def test_structured_output_and_tools_are_refused(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering)
    tool = FunctionTool.from_defaults(lambda x: x, name="same", description="The same.")
    refused: list[Callable[[], Any]] = [
        lambda: llm.structured_predict(Person, TEMPLATE),
        lambda: llm.stream_structured_predict(Person, TEMPLATE),
        lambda: llm.as_structured_llm(Person),
        lambda: llm.predict_and_call([tool], "hi"),
        lambda: asyncio.run(llm.astructured_predict(Person, TEMPLATE)),
        lambda: asyncio.run(llm.astream_structured_predict(Person, TEMPLATE)),
        lambda: asyncio.run(llm.apredict_and_call([tool], "hi")),
        lambda: llm.predict(PromptTemplate("{query_str}", output_parser=PydanticOutputParser(Person)), query_str="x"),
    ]
    for call in refused:
        with pytest.raises(MACError, match=r"plain text .*another LLM \(llm="):
            call()


@pytest.mark.parametrize("option", [{"logprobs": True}, {"max_tokens": 0}, {"max_tokens": "9"}, {"tools": []}])
def test_options_it_does_not_know_are_refused_by_name(remembering: RecordingEngine, option: dict[str, Any]) -> None:
    ((name, value),) = option.items()
    llm = MACLLM(engine=remembering)
    for call in (llm.complete, llm.stream_complete):
        with pytest.raises(MACError, match=re.escape(f"{name}={value!r}")):
            call(QUESTION, **option)
    with pytest.raises(MACError, match=name):
        llm.chat([user(QUESTION)], **option)


def test_options_that_say_how_it_answers_anyway_are_taken(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering)
    whole, short = reference(remembering), reference(remembering, max_new_tokens=2)
    assert whole != short
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 2}
    assert llm.complete(QUESTION, temperature=0.0).text == whole
    assert llm.complete(QUESTION, **options).text == short
    assert llm.chat([user(QUESTION)], **options).message.content == short
    assert list(llm.stream_complete(QUESTION, **options))[-1].text == short
    assert asyncio.run(llm.acomplete(QUESTION, **options)).text == short
    context = "Anna Berg opened a bridge. " * remembering.model.context_window  # more room for it by a short answer
    fitted = llm.fit_to_window(QUESTION, [context], max_new_tokens=1)
    assert len(fitted.ids) > len(llm.fit_to_window(QUESTION, [context]).ids)


def test_templates_without_a_question_are_refused(remembering: RecordingEngine) -> None:
    with pytest.raises(MACError, match="its slots: topic"):
        MACLLM(engine=remembering).predict(PromptTemplate("A poem on {topic}"), topic="rain")


def test_chats_without_a_readable_question_are_refused(remembering: RecordingEngine) -> None:
    llm = MACLLM(engine=remembering)
    with pytest.raises(MACError, match="last user message"):
        llm.chat([ChatMessage(role="assistant", content="Hi")])
    with pytest.raises(MACError, match="image"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])


def test_model_and_engine_together_are_refused(engine: RecordingEngine, tiny_model: MACModel) -> None:
    with pytest.raises(ConfigError, match="not both"):
        MACLLM(tiny_model, engine=engine)
    with pytest.raises(TypeError):
        MACLLM(engine=engine, temperature=0.5)  # type: ignore[call-arg]
    with pytest.raises(ModelLoadError, match="no-such-model"):
        MACLLM(model="./no-such-model")


# -- copies --


def test_copies_share_the_engine_and_pickles_are_refused(tiny_model: MACModel) -> None:
    llm = MACLLM(tiny_model, max_new_tokens=3)
    for copied in (copy.copy(llm), copy.deepcopy(llm), llm.model_copy()):
        assert copied.engine is llm.engine
        assert copied.max_new_tokens == 3
    with pytest.raises(MACError, match="cannot be pickled"):
        pickle.dumps(llm)


def test_dictionaries_rebuild_the_llm_by_name(tiny_model: MACModel, tmp_path: Any) -> None:
    tiny_model.save_pretrained(tmp_path / "model")
    llm = MACLLM(model=str(tmp_path / "model"), use_memory=False)
    values = llm.to_dict()
    assert values["class_name"] == "MACLLM"
    again = MACLLM.from_dict(values)
    assert (again.model, again.use_memory) == (llm.model, False)
    assert again.complete(QUESTION).text == llm.complete(QUESTION).text


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
    begin, queue = remembering.model.begin, remembering._queue

    def counting(batch: Any, prompts: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        passes.append(len(prompts))
        return begin(batch, prompts, *arguments, **options)

    monkeypatch.setattr(remembering.model, "begin", counting)

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
    assert sync == ["LLMPredictStartEvent", "LLMCompletionStartEvent", "LLMCompletionEndEvent", "LLMPredictEndEvent"]
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

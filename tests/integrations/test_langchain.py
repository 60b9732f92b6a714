"""ChatMAC and MACRetriever beside the engine, which is the oracle, in chains, and in LangChain's own suites."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnablePassthrough
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import ValidationError

from mac_rag import Document as MACDocument
from mac_rag import MACEngine, MemoryBank
from mac_rag.errors import BankError, ConfigError, DocumentError, InstructionError, MACError, PromptError
from mac_rag.integrations.langchain import ChatMAC, MACRetriever, WhereMetadata, create_documents_chain, to_documents
from mac_rag.lm.chat import Message
from mac_rag.lm.decoding import Sampling
from mac_rag.model.calibration import Calibration, Logistic
from mac_rag.retrieval import BM25Retriever
from tests.helpers import wait_until
from tests.integrations.helpers import NEWS

WORKERS = "How many workers does Rainga Press have?"
BRIDGE = "Who opened Basalt Bridge?"
STORM = "Where did the storm hit?"
QUESTIONS = [WORKERS, BRIDGE, STORM]


@pytest.fixture
def llm(mac_tiny: MACEngine) -> ChatMAC:
    return ChatMAC(engine=mac_tiny)


@pytest.fixture(scope="module")
def dated(mac_tiny: MACEngine) -> MACEngine:
    """An engine with documents of two years, and a retriever of them."""
    engine = MACEngine(mac_tiny.model, retriever=BM25Retriever(), k=2)
    metadata = {"press": {"date": "2005", "year": 2005}, "bridge": {"date": "2004", "year": 2004}}
    engine.adapt(MACDocument(name, NEWS[name], more) for name, more in metadata.items())
    return engine


def joined(chunks: Iterator[BaseMessage]) -> AIMessageChunk:
    whole: Any = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessageChunk)
    return whole


def named(message: BaseMessage) -> list[tuple[Any, ...]]:
    """The sources that a message names."""
    keys = ("document_id", "attention", "sentence")
    return [tuple(source[key] for key in keys) for source in message.response_metadata["mac_sources"]]


class TestAnswers:
    @pytest.mark.parametrize("question", QUESTIONS)
    def test_answers_and_streams_are_the_engine_s(self, llm: ChatMAC, mac_tiny: MACEngine, question: str) -> None:
        [expected] = mac_tiny.answer([question], sources=2)
        message, streamed = llm.invoke(question, sources=2), joined(llm.stream(question, sources=2))
        assert message.content == streamed.content == expected.text
        assert named(message) == [(source.document_id, source.share, source.sentence) for source in expected.sources]
        assert message.response_metadata["model_name"] == llm.model
        assert streamed.response_metadata == message.response_metadata
        prompt, answer = len(mac_tiny.model.fit_to_window(question).ids), len(llm.get_token_ids(expected.text))
        usage = {"input_tokens": prompt, "output_tokens": answer, "total_tokens": prompt + answer}
        assert message.usage_metadata == streamed.usage_metadata == usage

    def test_a_batch_equals_single_questions_and_is_one_batch_of_the_engine(
        self, llm: ChatMAC, mac_tiny: MACEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = QUESTIONS * 4
        single = [llm.invoke(question).content for question in asked]
        batches: list[int] = []
        monkeypatch.setattr(mac_tiny, "on_batch", batches.append)
        queue = mac_tiny._queue

        async def all_at_once() -> list[Any]:
            return await llm.abatch(asked)

        with ThreadPoolExecutor(1) as pool:
            for ask in (lambda: llm.batch(asked), lambda: asyncio.run(all_at_once())):
                with queue.turn():
                    answers = pool.submit(ask)
                    wait_until(lambda: len(queue._waiting) == len(asked))
                assert [message.content for message in answers.result()] == single
        assert batches == [len(asked), len(asked)]

    def test_a_batch_keeps_configurations_and_errors(self, llm: ChatMAC) -> None:
        found = llm.batch([WORKERS, "Answer:", BRIDGE], config={"max_concurrency": 2}, return_exceptions=True)
        assert [type(one) for one in found] == [AIMessage, InstructionError, AIMessage]

    async def test_async_answers_leave_the_event_loop_free(self, llm: ChatMAC, mac_tiny: MACEngine) -> None:
        with ThreadPoolExecutor(1) as pool:
            turn = mac_tiny._queue.turn()
            await asyncio.get_running_loop().run_in_executor(pool, turn.__enter__)
            answer = asyncio.create_task(llm.ainvoke(WORKERS))
            await asyncio.sleep(0.05)
            assert not answer.done()
            await asyncio.get_running_loop().run_in_executor(pool, turn.__exit__, None, None, None)
            assert (await answer).content == "180"

    def test_doubt_replaces_a_guess(self, llm: ChatMAC, mac_tiny: MACEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        even = Logistic(weights={}, bias=0.0, questions=1, data="none")
        fitted = Calibration(fingerprint=mac_tiny.model.fingerprint, modes={"memory": even})
        monkeypatch.setattr(mac_tiny.model, "calibration", fitted)
        sure = llm.invoke(WORKERS, min_confidence=0.4)
        assert (sure.content, sure.response_metadata["mac_confidence"]) == ("180", 0.5)
        for doubt in (llm.invoke(WORKERS, min_confidence=0.6), joined(llm.stream(WORKERS, min_confidence=0.6))):
            assert (doubt.content, doubt.response_metadata["mac_guess"]) == ("I don't know", "180")


class TestOptions:
    def test_of_the_constructor_and_of_a_call(self, mac_tiny: MACEngine) -> None:
        warm = ChatMAC(engine=mac_tiny, temperature=1.5, top_p=0.9, seed=3)
        [expected] = mac_tiny.answer([BRIDGE], sampling=Sampling(1.5, 0.9, 3))
        assert warm.invoke(BRIDGE).content == expected.text
        cold = ChatMAC(engine=mac_tiny).bind(temperature=1.5, top_p=0.9, seed=3)
        assert cold.invoke(BRIDGE).content == joined(cold.stream(BRIDGE)).content == expected.text

    def test_a_configuration_of_langchain_sets_them(self, mac_tiny: MACEngine) -> None:
        field = ConfigurableField(id="heat")
        llm = ChatMAC(engine=mac_tiny, seed=3).configurable_fields(temperature=field)
        warm = llm.with_config(configurable={"heat": 1.5})
        [expected] = mac_tiny.answer([BRIDGE], sampling=Sampling(1.5, seed=3))
        assert warm.invoke(BRIDGE).content == expected.text
        assert len([chunk for chunk in warm.stream(BRIDGE) if chunk.content]) > 1
        assert llm.invoke(BRIDGE).content == mac_tiny.answer([BRIDGE])[0].text

    def test_stop_and_length_end_an_answer(self, mac_tiny: MACEngine) -> None:
        assert ChatMAC(engine=mac_tiny, stop=["8"]).invoke(WORKERS).content == "1"
        assert ChatMAC(engine=mac_tiny).invoke(WORKERS, stop=["0"]).content == "18"
        cut = ChatMAC(engine=mac_tiny, max_tokens=1).invoke(BRIDGE)
        assert cut.response_metadata["finish_reason"] == "length"
        assert ChatMAC(engine=mac_tiny).invoke(WORKERS).response_metadata["finish_reason"] == "stop"

    def test_filters_and_moments_hide_documents(self, dated: MACEngine) -> None:
        llm = ChatMAC(engine=dated, sources=5)
        for hidden in ({"filters": {"year": [1999, 2004]}}, {"as_of": "2004-06"}):
            for message in (llm.invoke(WORKERS, **hidden), joined(llm.stream(WORKERS, **hidden))):
                assert "press" not in message.response_metadata["mac_retrieved"]
                assert [one["document_id"] for one in message.response_metadata["mac_sources"]] == ["bridge"]
        [expected] = dated.answer([WORKERS], allowed={"bridge"})
        assert llm.invoke(WORKERS, filters={"year": 2004}).content == expected.text
        assert ChatMAC(engine=dated, filters={"year": 2004}).invoke(WORKERS).content == expected.text
        assert llm.invoke(WORKERS, k=1).response_metadata["mac_retrieved"] == ["press"]

    def test_equal_filters_share_a_batch(self, dated: MACEngine) -> None:
        first, second = (WhereMetadata(dated, {"year": 2004}) for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)
        assert first != WhereMetadata(dated, {"year": 2005})
        assert WhereMetadata(dated, {"year": 1}) != WhereMetadata(dated, {"year": True})
        assert (list(first._current()), len(first)) == (["bridge"], 1)

    def test_filters_follow_the_bank_and_the_call(self, mac_tiny: MACEngine) -> None:
        engine = MACEngine(mac_tiny.model, MemoryBank(mac_tiny.model.fingerprint, keep_texts=True))
        retriever, years = MACRetriever(engine=engine), {"year": [2004]}
        engine.adapt([MACDocument("press", NEWS["press"], {"year": 2005})])
        assert retriever.invoke(WORKERS, filters=years) == []
        years["year"].append(2005)
        assert [document.id for document in retriever.invoke(WORKERS, filters=years)] == ["press"]
        engine.adapt([MACDocument("storm", NEWS["storm"], {"year": 2004})])
        assert len(retriever.invoke(WORKERS, filters=years)) == 2
        since = {"year": {"$gte": 2005}}
        assert [document.id for document in retriever.invoke(WORKERS, filters=since)] == ["press"]
        with pytest.raises(ConfigError, match=r"\$like"):
            retriever.invoke(WORKERS, filters={"year": {"$like": "2%"}})

    def test_memory_can_be_left_out(self, dated: MACEngine) -> None:
        [expected] = dated.answer([WORKERS], use_memory=False)
        message = ChatMAC(engine=dated, sources=2).invoke(WORKERS, use_memory=False)
        assert message.content == expected.text
        assert {source["attention"] for source in message.response_metadata["mac_sources"]} == {None}

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"model": "gpt-4"}, "model='gpt-4'"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"max_tokens": 0}, "max_tokens=0"),
            ({"contexts": "a text"}, "a list of texts"),
            ({"contexts": [Document("a text")]}, "page_content"),
            ({"top_p": 2.0}, "top_p is 2.0"),
            ({"min_confidence": 2.0}, "min_confidence is 2.0"),
        ],
    )
    def test_what_would_have_no_effect_is_refused(self, llm: ChatMAC, options: dict[str, Any], named: str) -> None:
        for ask in (llm.invoke, lambda *question, **more: joined(llm.stream(*question, **more))):
            with pytest.raises(MACError, match=named):
                ask(WORKERS, **options)

    def test_a_wrong_argument_is_named(self, mac_tiny: MACEngine) -> None:
        with pytest.raises(ConfigError, match="min_confidance"):
            ChatMAC(engine=mac_tiny, min_confidance=0.5)  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="top_k"):
            MACRetriever(engine=mac_tiny, top_k=5)  # type: ignore[call-arg]
        with pytest.raises(ValidationError):
            ChatMAC(engine=mac_tiny, memory_weight=2.0)

    def test_a_cache_of_langchain_follows_the_bank(self, mac_tiny: MACEngine) -> None:
        llm = ChatMAC(engine=MACEngine(mac_tiny.model), cache=InMemoryCache())
        llm.engine.adapt([MACDocument("press", NEWS["press"])])
        assert llm.invoke(WORKERS).content == llm.invoke(WORKERS).content == "180"
        llm.engine.adapt([MACDocument("press", NEWS["press"].replace("180", "240"))])
        assert llm.invoke(WORKERS).content == "240"


class TestQuestions:
    """What a checkpoint that reads question and context makes of messages."""

    def test_the_last_message_is_the_question(self, llm: ChatMAC, caplog: pytest.LogCaptureFixture) -> None:
        messages = [HumanMessage(BRIDGE), AIMessage("ines kaur"), HumanMessage(WORKERS)]
        assert llm.invoke(messages).content == "180"
        assert "does not read the earlier messages" in caplog.text

    def test_text_in_parts_is_text(self, llm: ChatMAC) -> None:
        assert llm.invoke([HumanMessage([{"type": "text", "text": WORKERS}])]).content == "180"

    def test_nothing_to_answer_from_is_an_error(self, mac_tiny: MACEngine) -> None:
        empty = ChatMAC(engine=MACEngine(mac_tiny.model))
        with pytest.raises(BankError, match="nothing to answer from"):
            empty.invoke(WORKERS)
        assert empty.invoke(WORKERS, contexts=[NEWS["press"]]).content == "180"
        with pytest.raises(BankError, match="nothing to answer from"):
            ChatMAC(engine=mac_tiny).invoke(WORKERS, filters={"year": 1066})


class TestConversations:
    """What a checkpoint whose prompt format is a chat makes of messages."""

    def test_the_lm_reads_all_of_it(self, chatting: MACEngine) -> None:
        messages = [SystemMessage("Be brief."), HumanMessage("Who?"), AIMessage("Ada."), HumanMessage("Where?")]
        said = [Message("system", "Be brief."), Message("user", "Who?"), Message("assistant", "Ada.")]
        fitted = chatting.model.fit_conversation([*said, Message("user", "Where?")], question="Where?")
        [expected] = chatting.answer([fitted])
        llm = ChatMAC(engine=chatting, sources=1)
        for message in (llm.invoke(messages), joined(llm.stream(messages))):
            assert message.content == expected.text
            assert message.usage_metadata["input_tokens"] == len(fitted.ids)
            [best] = chatting.sources("Where?", expected.text, most=1)
            assert named(message) == [(best.document_id, best.share, best.sentence)]

    def test_contexts_stand_in_front_of_the_last_message(self, chatting: MACEngine) -> None:
        documents = "".join(map(chatting.model.base_lm.prompts.written_document, [NEWS["storm"]]))
        turn = Message("user", f"{documents}Where?")
        fitted = chatting.model.fit_conversation([turn], question="Where?", contexts=[NEWS["storm"]])
        [expected] = chatting.answer([fitted])
        message = ChatMAC(engine=chatting).invoke("Where?", contexts=[NEWS["storm"]])
        assert message.content == expected.text
        assert message.usage_metadata["input_tokens"] == len(fitted.ids)


@pytest.mark.parametrize(
    ("engine", "messages", "error", "named"),
    [
        ("mac_tiny", [SystemMessage("Be brief."), HumanMessage(WORKERS)], InstructionError, "system message"),
        (
            "mac_tiny",
            [HumanMessage(f"Context: a storm\n\nQuestion: {WORKERS}\nAnswer:")],
            InstructionError,
            "contexts=",
        ),
        (
            "mac_tiny",
            [HumanMessage(WORKERS), ToolMessage("180", tool_call_id="1")],
            InstructionError,
            "result of a tool",
        ),
        ("mac_tiny", [HumanMessage([{"type": "image_url", "image_url": {"url": "a.png"}}])], MACError, "image_url"),
        ("mac_tiny", [AIMessage("180")], MACError, "last user message, but the chat has none"),
        ("mac_tiny", [HumanMessage(" ")], DocumentError, "empty"),
        ("chatting", [HumanMessage("Who?"), AIMessage("Ada.")], PromptError, "end with a message of the user"),
        ("chatting", [], PromptError, "nobody"),
        ("chatting", [HumanMessage("Who?"), ToolMessage("Ada", tool_call_id="1")], MACError, "'tool'"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(
    request: pytest.FixtureRequest, engine: str, messages: list[BaseMessage], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        ChatMAC(engine=request.getfixturevalue(engine)).invoke(messages)


class TestRetriever:
    @pytest.mark.parametrize("question", QUESTIONS)
    def test_documents_are_ranked_by_attention(self, mac_tiny: MACEngine, question: str) -> None:
        ids, attention = mac_tiny.document_attention([question])
        shares = dict(zip(ids, attention[0].tolist()))
        found = MACRetriever(engine=mac_tiny, k=3).invoke(question)
        assert [document.metadata["mac_attention"] for document in found] == sorted(shares.values())[:0:-1]
        for document in found:
            assert document.page_content == NEWS[str(document.id)]
            assert document.metadata["mac_attention"] == shares[str(document.id)]

    def test_texts_may_be_the_retriever_s_and_filters_hide(self, dated: MACEngine) -> None:
        retriever = MACRetriever(engine=dated)
        [first, _] = retriever.invoke(WORKERS)
        assert (first.page_content, first.metadata["year"]) == (NEWS["press"], 2005)
        for hidden in ({"filters": {"year": 2004}}, {"as_of": "2004-06"}):
            assert [document.id for document in retriever.invoke(WORKERS, **hidden)] == ["bridge"]
            assert [document.id for document in MACRetriever(engine=dated, **hidden).invoke(WORKERS)] == ["bridge"]

    def test_there_must_be_texts_and_there_may_be_no_documents(self, mac_tiny: MACEngine) -> None:
        with pytest.raises(ConfigError, match="keeps no texts"):
            MACRetriever(engine=MACEngine(mac_tiny.model))
        kept = MACEngine(mac_tiny.model, MemoryBank(mac_tiny.model.fingerprint, keep_texts=True))
        assert MACRetriever(engine=kept).invoke(WORKERS) == []
        assert MACRetriever(engine=mac_tiny).invoke(WORKERS, filters={"year": 1066}) == []


class TestDocuments:
    def test_the_same_documents_cost_nothing_again(self, mac_tiny: MACEngine) -> None:
        engine = MACEngine(mac_tiny.model, MemoryBank(mac_tiny.model.fingerprint, keep_texts=True))
        pieces = [Document("It rained.", metadata={"page": 1}), Document("It rained.", metadata={"page": 2})]
        documents = [Document(NEWS["press"], id="press", metadata={"year": 2005}), *pieces, pieces[0]]
        assert engine.adapt(to_documents(documents)).added == 3
        assert engine.adapt(to_documents(MACRetriever(engine=engine).invoke(WORKERS))).unchanged == 3
        assert engine.bank["press"].members[0].metadata == {"year": 2005}

    def test_blank_pages_are_left_out_and_dates_are_kept(
        self, mac_tiny: MACEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        blank = [Document(text, id=id_) for text, id_ in ((" \n", "page"), ("", None), ("\u200b", "invisible"))]
        rain = Document("It rained.", metadata={"date": date(2004, 5, 3)})
        with caplog.at_level(logging.WARNING):
            documents = to_documents([*blank, rain])
        assert [(one.text, dict(one.metadata)) for one in documents] == [("It rained.", {"date": "2004-05-03"})]
        assert "3 documents without text were left out" in caplog.text
        assert to_documents([Document("It rained.", metadata={"date": "2004-05-03"})]) == documents

    @pytest.mark.parametrize("value", [{1, 2}, float("nan"), object()])
    def test_metadata_must_fit_into_json(self, value: object) -> None:
        with pytest.raises(DocumentError, match="It rained"):
            to_documents([Document("It rained.", metadata={"pages": value})])


class TestChains:
    @pytest.fixture
    def chain(self, mac_tiny: MACEngine) -> Runnable[Any, Any]:
        """What `langchain.chains.create_retrieval_chain` builds."""
        retriever = itemgetter("input") | MACRetriever(engine=mac_tiny, k=2)
        answer = create_documents_chain(ChatMAC(engine=mac_tiny)) | StrOutputParser()
        return RunnablePassthrough.assign(context=retriever).assign(answer=answer)

    def expected(self, engine: MACEngine, question: str) -> str:
        texts = [str(source.text) for source in engine.sources(question, most=2)]
        return engine.answer([question], contexts=[texts])[0].text

    def test_a_retrieval_chain(self, chain: Runnable[Any, Any], mac_tiny: MACEngine) -> None:
        result = chain.invoke({"input": WORKERS})
        assert result["context"][0].id == "press"
        assert result["answer"] == self.expected(mac_tiny, WORKERS) == "180"
        results = chain.batch([{"input": question} for question in QUESTIONS])
        assert [one["answer"] for one in results] == [self.expected(mac_tiny, question) for question in QUESTIONS]

    async def test_it_streams(self, chain: Runnable[Any, Any], mac_tiny: MACEngine) -> None:
        asked = {"input": BRIDGE}
        pieces = [chunk["answer"] for chunk in chain.stream(asked) if "answer" in chunk]
        assert len([piece for piece in pieces if piece]) > 1
        later = [chunk["answer"] async for chunk in chain.astream(asked) if "answer" in chunk]
        assert "".join(pieces) == "".join(later) == self.expected(mac_tiny, BRIDGE)

    def test_missing_keys_are_named(self, llm: ChatMAC) -> None:
        with pytest.raises(MACError, match="the keys here are: question"):
            create_documents_chain(llm).invoke({"question": WORKERS})

    def test_documents_beyond_the_window_are_told(self, llm: ChatMAC, caplog: pytest.LogCaptureFixture) -> None:
        texts = [NEWS["press"], "Insurers expect to pay. " * 500]
        message = create_documents_chain(llm).invoke({"input": WORKERS, "context": list(map(Document, texts))})
        [expected] = llm.engine.answer([WORKERS], contexts=[texts], overflow="truncate")
        assert (message.content, message.response_metadata["mac_truncated"]) == (expected.text, True)
        assert "exceed the LM's window" in caplog.text


@pytest.fixture
def benchmark() -> Callable[[Callable[[], None]], None]:
    """Runs what the suite measures elsewhere."""
    return lambda run: run()


@pytest.fixture
def snapshot() -> None:
    """Nothing of ours is serialized."""


@pytest.fixture
def vcr() -> None:
    """Nothing of ours is recorded."""


class Declared:
    """What ChatMAC can do, for LangChain's own suites.

    Tests of tools, structured output, images and the like skip themselves, because ChatMAC declares none of them.
    """

    engine: MACEngine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatMAC

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def supports_model_override(self) -> bool:
        return False


class TestStandardUnits(Declared, ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _take(self, mac_tiny: MACEngine) -> None:
        self.engine = mac_tiny


class TestStandardAnswers(Declared, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _take(self, mac_tiny: MACEngine) -> None:
        self.engine = mac_tiny

    @pytest.mark.xfail(
        reason="mac-tiny reads questions, and refuses system messages, because it would ignore them",
        raises=InstructionError,
        strict=True,
    )
    def test_double_messages_conversation(self, model: BaseChatModel) -> None:
        super().test_double_messages_conversation(model)


class TestStandardConversations(Declared, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _take(self, chatting: MACEngine) -> None:
        self.engine = chatting


class TestStandardRetriever(RetrieversIntegrationTests):
    engine: MACEngine

    @pytest.fixture(autouse=True)
    def _take(self, mac_tiny: MACEngine) -> None:
        self.engine = mac_tiny

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return MACRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def retriever_query_example(self) -> str:
        return "Where did the storm hit?"

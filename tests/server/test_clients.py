"""Clients that people use, against a server on loopback: LangChain's and LlamaIndex's."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from mac_rag.engine import MACEngine
from tests.server.conftest import QUESTION
from tests.server.helpers import Running

BRIDGE_QUESTION = "Who opened Basalt Bridge?"
OWN: Any = {"k": 1, "sources": 1, "as_of": "2006", "filters": {"year": [2005, 2006]}}


@pytest.fixture
def engine(running: Running) -> MACEngine:
    return running.service.catalog.get("news").engine


class TestChatOpenAI:
    def llm(self, running: Running, **more: Any) -> ChatOpenAI:
        return ChatOpenAI(model="tiny:news", base_url=f"{running.url}/v1", api_key="none", max_retries=0, **more)

    def test_answers_batches_and_async_ones(self, running: Running, engine: MACEngine) -> None:
        questions = [QUESTION, BRIDGE_QUESTION]
        expected = [answer.text for answer in engine.answer(questions)]
        llm = self.llm(running)
        message = llm.invoke(QUESTION)
        assert message.content == expected[0]
        assert message.usage_metadata["output_tokens"] == 2
        assert [one.content for one in llm.batch(questions)] == expected
        assert asyncio.run(llm.ainvoke(BRIDGE_QUESTION)).content == expected[1]


@pytest.mark.clients
class TestOpenAILike:
    """LlamaIndex's client, which needs an openai before 3: `make test-clients`."""

    @pytest.mark.parametrize("chats", [True, False])
    def test_answers_and_streams(self, running: Running, engine: MACEngine, chats: bool) -> None:
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        assert openai.__version__.startswith("2.")
        llm = OpenAILike(
            model="tiny:news",
            api_base=f"{running.url}/v1",
            api_key="none",
            is_chat_model=chats,
            max_retries=0,
            additional_kwargs={"extra_body": OWN},
        )
        [expected] = engine.answer([QUESTION], k=1, as_of="2006", allowed={"press"})
        answer = llm.complete(QUESTION)
        assert answer.text == expected.text == "180"
        assert answer.raw.sources[0]["document_id"] == "press"
        assert llm.chat([ChatMessage(QUESTION)]).message.content == expected.text
        assert "".join(part.delta or "" for part in llm.stream_complete(QUESTION)) == expected.text
        assert "".join(part.delta or "" for part in llm.stream_chat([ChatMessage(QUESTION)])) == expected.text
        assert asyncio.run(llm.acomplete(QUESTION)).text == expected.text

    def test_a_query_engine(self, running: Running) -> None:
        from llama_index.core import Document, SummaryIndex
        from llama_index.llms.openai_like import OpenAILike

        llm = OpenAILike(model="tiny:news", api_base=f"{running.url}/v1", api_key="none", is_chat_model=True)
        engine = SummaryIndex.from_documents([Document(text="A storm has hit Wunville.")]).as_query_engine(llm=llm)
        assert engine.query("What has hit Wunville?").response

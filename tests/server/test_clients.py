"""Clients that people use, against a server on loopback: OpenAI's async one, LangChain's, LlamaIndex's, and curl."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI

from mac_rag.engine import MACEngine
from tests.helpers import wait_until
from tests.server.conftest import QUESTION
from tests.server.helpers import Running, serving

BRIDGE_QUESTION = "Who opened Basalt Bridge?"
OWN: Any = {"k": 1, "sources": 1, "as_of": "2006", "filters": {"year": [2005, 2006]}}


@pytest.fixture
def engine(running: Running) -> MACEngine:
    return running.service.catalog.get("news").engine


class TestAsyncOpenAI:
    def test_questions_at_a_time_and_a_stream(self, running: Running, engine: MACEngine) -> None:
        questions = [QUESTION, BRIDGE_QUESTION]
        expected = [answer.text for answer in engine.answer(questions)]

        async def ask() -> tuple[list[str | None], str]:
            async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

                async def one(question: str) -> str | None:
                    answer = await client.chat.completions.create(
                        model="tiny:news", messages=[{"role": "user", "content": question}]
                    )
                    return answer.choices[0].message.content

                answers = await asyncio.gather(*map(one, questions))
                stream = await client.chat.completions.create(
                    model="tiny:news", messages=[{"role": "user", "content": BRIDGE_QUESTION}], stream=True
                )
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
                return answers, "".join(pieces)

        assert asyncio.run(ask()) == (expected, expected[1])


class TestChatOpenAI:
    def llm(self, running: Running, **more: Any) -> ChatOpenAI:
        return ChatOpenAI(model="tiny:news", base_url=f"{running.url}/v1", api_key="none", max_retries=0, **more)

    def test_answers_batches_and_async_ones(self, running: Running, engine: MACEngine) -> None:
        questions = [QUESTION, BRIDGE_QUESTION]
        expected = [answer.text for answer in engine.answer(questions)]
        llm = self.llm(running)
        message = llm.invoke(QUESTION)
        assert message.content == expected[0]
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == 1
        assert [one.content for one in llm.batch(questions)] == expected
        assert asyncio.run(llm.ainvoke(BRIDGE_QUESTION)).content == expected[1]

    def test_a_stream_with_usage(self, running: Running, engine: MACEngine) -> None:
        chunks = list(self.llm(running, stream_usage=True).stream(BRIDGE_QUESTION))
        assert "".join(str(chunk.content) for chunk in chunks) == engine.answer([BRIDGE_QUESTION])[0].text
        assert [chunk.usage_metadata["output_tokens"] > 0 for chunk in chunks if chunk.usage_metadata] == [True]

    def test_fields_of_the_server_go_into_the_body(self, running: Running, engine: MACEngine) -> None:
        hidden = self.llm(running, extra_body={"filters": {"year": 2004}}).invoke(QUESTION)
        assert hidden.content == engine.answer([QUESTION], allowed={"bridge"})[0].text
        with pytest.raises(openai.BadRequestError, match="no date that can be read"):
            self.llm(running, extra_body={"as_of": "spring"}).invoke(QUESTION)

    def test_tools_and_structured_output_are_refused(self, running: Running) -> None:
        llm = self.llm(running)
        with pytest.raises(openai.BadRequestError, match="tools are not supported"):
            llm.bind_tools([{"name": "add", "description": "Adds.", "parameters": {}}]).invoke(QUESTION)
        with pytest.raises(openai.BadRequestError, match="response_format"):
            llm.with_structured_output({"title": "Answer", "type": "object", "properties": {}}).invoke(QUESTION)


class TestCurl:
    def curl(self, *arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--noproxy", "*", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def ask(self, running: Running, *arguments: str, **more: Any) -> str:
        body = {"model": "tiny:news", "messages": [{"role": "user", "content": QUESTION}], **more}
        kind = "Content-Type: application/json"
        return self.curl("-H", kind, "-d", json.dumps(body), *arguments, f"{running.url}/v1/chat/completions")

    def test_an_answer_with_its_sources(self, running: Running) -> None:
        answer = json.loads(self.ask(running, **OWN))
        assert answer["choices"][0]["message"]["content"] == "180"
        assert answer["sources"][0]["document_id"] == "press"
        assert (answer["retrieved"], answer["confidence"]) == (["press"], None)

    def test_a_stream(self, running: Running) -> None:
        lines = [line for line in self.ask(running, "--no-buffer", stream=True).splitlines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
        assert "".join(pieces) == "180"

    def test_an_error_and_its_status(self, running: Running) -> None:
        said = self.ask(running, "--write-out", "\n%{http_code}", n=2).splitlines()
        assert (json.loads(said[0])["error"]["param"], said[1]) == ("n", "400")

    def test_a_file_with_a_key(self, running: Running, tmp_path: Path) -> None:
        (tmp_path / "storm.txt").write_text("A storm has hit Wunville.")
        with serving(tmp_path / "served", running.service.model, anyone=False) as guarded:
            banks, kind = f"{guarded.url}/v1/banks", "Content-Type: application/json"
            head = ["-H", f"Authorization: Bearer {guarded.service.keys.add('curl', 'admin', ['*'])}"]
            self.curl(*head, "-H", kind, "-d", '{"name": "news"}', banks)
            job = json.loads(self.curl(*head, "-F", f"file=@{tmp_path / 'storm.txt'}", f"{banks}/news/files"))
            place = f"{guarded.url}/v1/jobs/{job['id']}"
            wait_until(lambda: json.loads(self.curl(*head, place))["state"] == "done")
            listing = json.loads(self.curl(*head, f"{banks}/news/documents"))
            assert [document["id"] for document in listing["data"]] == ["storm.txt"]
            assert json.loads(self.curl(f"{guarded.url}/v1/models"))["error"]["code"] == "invalid_api_key"


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

"""Completions, as OpenAI's own client and plain HTTP see them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from mac_rag.engine import MACEngine
from mac_rag.lm.decoding import Sampling
from mac_rag.model.calibration import Calibration, Logistic
from mac_rag.server.catalog import ServedBank
from mac_rag.server.requests import ChatRequest, CompletionRequest, ResponsesRequest
from tests.helpers import wait_until
from tests.server.conftest import BRIDGE, QUESTION
from tests.server.helpers import Running, events, make

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def engine(running: Running) -> MACEngine:
    return running.service.catalog.get("news").engine


class TestOpenAIClient:
    def test_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["tiny", "tiny:news", "all-MiniLM-L6-v2"]
        assert client.models.retrieve("tiny:news").id == "tiny:news"

    def test_a_chat_answers_as_the_engine(self, client: openai.OpenAI, engine: MACEngine) -> None:
        answer = client.chat.completions.create(model="tiny:news", messages=MESSAGES)
        [expected] = engine.answer([QUESTION])
        assert answer.choices[0].message.content == expected.text == "180"
        assert answer.choices[0].finish_reason == "stop"
        prompt = engine.model.fit_to_window(QUESTION, expected.contexts)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt.ids), 2)  # a space, 180
        more: Any = answer.model_extra
        ids, attention = engine.document_attention([QUESTION])
        shares = {source["document_id"]: source["attention"] for source in more["sources"]}
        assert shares == pytest.approx(dict(zip(ids, attention[0].tolist())))
        assert more["retrieved"] == ["press"]
        first = more["sources"][0]
        assert (first["document_id"], first["retrieved"]) == ("press", True)
        assert [first["sentence"][slice(*place)] for place in first["highlights"]] == ["180"]

    def test_a_stream_joins_to_the_answer(self, client: openai.OpenAI, engine: MACEngine) -> None:
        question = "Who opened Basalt Bridge?"
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        messages: Any = [{"role": "user", "content": question}]
        chunks = list(client.chat.completions.create(model="tiny:news", messages=messages, **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == engine.answer([question])[0].text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens > 0

    def test_tokens_come_with_their_log_probabilities(self, client: openai.OpenAI, engine: MACEngine) -> None:
        ask: Any = client.chat.completions.create
        messages = [{"role": "user", "content": "Who opened Basalt Bridge?"}]
        options: Any = {"model": "tiny:news", "messages": messages, "logprobs": True, "top_logprobs": 2}
        whole = ask(**options)
        told = whole.choices[0].logprobs.content
        assert "".join(token.token for token in told).strip() == whole.choices[0].message.content
        assert whole.usage.completion_tokens == len(told) > 2
        [answer] = engine.answer(["Who opened Basalt Bridge?"], sampling=Sampling(log_probabilities=2))
        expected = [token.log_probability for token in answer.decoded.tokens]
        assert [token.logprob for token in told] == pytest.approx(expected, abs=1e-4)
        for token in told:
            assert bytes(token.bytes).decode() == token.token
            assert token.top_logprobs[0].logprob == token.logprob  # it is greedy
            assert len(token.top_logprobs) == 2
        chunks = [chunk.choices[0] for chunk in ask(**options, stream=True)]
        streamed = [token for one in chunks if one.logprobs for token in one.logprobs.content]
        assert [token.token for token in streamed] == [token.token for token in told]
        text = client.completions.create(model="tiny:news", prompt=messages[0]["content"], logprobs=1).choices[0]
        assert text.logprobs is not None
        assert text.logprobs.tokens == [token.token for token in told]
        for token, place in zip(text.logprobs.tokens, text.logprobs.text_offset, strict=True):
            assert text.text[place:].startswith(token if place else token.lstrip())
        response = client.responses.create(model="tiny:news", input=messages[0]["content"], top_logprobs=1)
        part: Any = response.output[0].content[0]  # type: ignore[union-attr]
        assert [token.token for token in part.logprobs] == [token.token for token in told]

    def test_several_answers_are_drawn_apart_and_again_alike(self, client: openai.OpenAI) -> None:
        ask: Any = client.chat.completions.create
        options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 2.0, "n": 4}
        texts = [[choice.message.content for choice in ask(**options, seed=5).choices] for _ in range(2)]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) > 1
        assert [ask(**{**options, "n": 1}, seed=5 + place).choices[0].message.content for place in range(4)] == texts[0]
        assert len({choice.message.content for choice in ask(**options).choices}) > 1
        streamed = [""] * 4
        for chunk in ask(**options, seed=5, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == texts[0]

    def test_completions_of_several_prompts(self, client: openai.OpenAI, engine: MACEngine) -> None:
        questions = [QUESTION, "Who opened Basalt Bridge?"]
        answer = client.completions.create(model="tiny:news", prompt=questions)
        assert [choice.text for choice in answer.choices] == [one.text for one in engine.answer(questions)]
        streamed = list(client.completions.create(model="tiny:news", prompt=questions, stream=True))
        for index, choice in enumerate(answer.choices):
            pieces = [chunk.choices[0].text for chunk in streamed if chunk.choices[0].index == index]
            assert "".join(pieces) == choice.text

    def test_embeddings(self, client: openai.OpenAI) -> None:
        from mac_rag.retrieval.encoders import minilm

        answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=["a bridge", "a press"])
        expected = minilm().questions(["a bridge", "a press"])
        for row, vector in zip(answer.data, expected, strict=True):  # the client asks for base64
            assert row.embedding == pytest.approx(vector.tolist(), abs=1e-6)

    def test_an_unknown_model_is_the_client_s_not_found(self, client: openai.OpenAI) -> None:
        for model in ("tiny:absent", "gpt-4", "tiny:../news", "tiny:"):
            with pytest.raises(openai.NotFoundError) as caught:
                client.chat.completions.create(model=model, messages=MESSAGES)
            assert caught.value.code == "model_not_found"

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"n": 9}, "n"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"stop": list("abcde")}, "stop"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
            ({"messages": [{"role": "tool", "content": "180"}]}, "messages"),
            ({"messages": [{"role": "assistant", "tool_calls": [{}]}, *MESSAGES]}, "messages"),
            ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"presence_penalty": 3.0}, "presence_penalty"),
            ({"logit_bias": {"99999999": 1}}, "logit_bias"),
            ({"modalities": ["text", "audio"]}, "modalities"),
            ({"guided_json": {"type": "object"}}, "guided_json"),
            ({"filter": {"year": 2004}}, "filter"),  # a misspelt restriction must not be lost
            ({"Filters": {"year": 2004}}, "Filters"),
            ({"k": 21}, "k"),
            ({"temperature": -1}, "temperature"),
            ({"min_confidence": 0.5}, None),  # mac-tiny has no calibration
            ({"min_confidence": 2}, None),
            ({"retriever": "hybrid"}, "retriever"),
            ({"bank": "other"}, "bank"),
            ({"as_of": "spring"}, None),
        ],
    )
    def test_what_would_have_no_effect_is_refused(self, running: Running, more: dict[str, Any], param: str) -> None:
        body = {"model": "tiny:news", "messages": MESSAGES, **more}
        response = running.client().post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param

    def test_what_has_no_effect_and_changes_nothing_is_taken(self, client: openai.OpenAI) -> None:
        harmless: Any = {
            "n": 1, "seed": 0, "stop": [], "tools": [], "tool_choice": "auto", "logprobs": False, "user": "a",
            "response_format": {"type": "text"}, "frequency_penalty": 0, "logit_bias": {}, "stream": None,
            "reasoning_effort": "low", "modalities": ["text"], "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.0,
            "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "verbosity": "low", "made_up": 1,
            "chat_template_kwargs": {"enable_thinking": False}, "stream_options": {"include_usage": False, "x": 1},
            "session_id": "a", "files": [], "features": {"web_search": False}, "tool_ids": None, "drop_params": True,
        }  # fmt: skip
        parts: Any = [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]
        messages: Any = [{"role": "user", "content": parts, "cache_control": {"type": "ephemeral"}, "name": "ada"}]
        for stop in ([], "", [""]):
            answer = client.chat.completions.create(
                model="tiny:news", messages=messages, extra_body={**harmless, "stop": stop}
            )
            assert answer.choices[0].message.content == "180"
            assert (answer.model_extra or {})["notes"] == []

    @pytest.mark.parametrize("text", ["A text part.", ""])
    def test_parts_of_a_message_stay_apart(self, client: openai.OpenAI, text: str) -> None:
        parts: Any = [{"type": "text", "text": text}, {"type": "text", "text": QUESTION}]
        ask: Any = client.chat.completions.create
        asked = [
            ask(model="tiny:news", messages=[{"role": "user", "content": said}])
            for said in (parts, f"{text}\n{QUESTION}")
        ]
        assert asked[0].choices[0].message.content == asked[1].choices[0].message.content
        assert asked[0].usage == asked[1].usage

    def test_null_says_nothing_in_every_field(self, running: Running) -> None:
        for request, body in (
            (ChatRequest, {"model": "tiny:news", "messages": MESSAGES}),
            (CompletionRequest, {"model": "tiny:news", "prompt": QUESTION}),
            (ResponsesRequest, {"model": "tiny:news", "input": QUESTION}),
        ):
            path = {"messages": "chat/completions", "prompt": "completions", "input": "responses"}[list(body)[1]]
            empty = dict.fromkeys([*request.model_fields, "n", "logprobs", "made_up"])
            response = running.client().post(f"/v1/{path}", json={**empty, **body})
            assert response.status_code == 200, response.text

    def test_a_message_of_an_answer_may_be_sent_back(self, client: openai.OpenAI) -> None:
        first = client.chat.completions.create(model="tiny:news", messages=MESSAGES)
        messages = [*MESSAGES, first.choices[0].message, {"role": "assistant", "content": None}, *MESSAGES]
        assert client.chat.completions.create(model="tiny:news", messages=messages).choices[0].message.content == "180"

    def test_only_the_last_chunk_has_usage_and_the_others_say_so(self, running: Running) -> None:
        body = {"model": "tiny:news", "messages": MESSAGES, "stream": True}
        for options, usage in (({}, []), ({"stream_options": {"include_usage": True}}, [None, None, "total"])):
            told = events(running.client().post("/v1/chat/completions", json=body | options))
            assert [event["usage"] and "total" for event in told if "usage" in event] == usage

    def test_faults_of_http_are_errors_that_clients_read(self, running: Running, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="nothing at this path"):
            client.moderations.create(input=QUESTION)
        with running.client() as plain:
            wrong = plain.get("/v1/chat/completions")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
            assert "openapi.json" in wrong.json()["error"]["message"]
            for content in (b"[]", json.dumps({"model": "tiny:news", "messages": MESSAGES}).encode()):
                form = plain.post("/v1/chat/completions", content=content)
                assert form.status_code == 400
                assert "Content-Type: application/json" in form.json()["error"]["message"]


class TestResponses:
    def test_an_answer(self, client: openai.OpenAI, engine: MACEngine) -> None:
        said: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
        for asked in (QUESTION, said):
            response = client.responses.create(model="tiny:news", input=asked, store=False)
            assert (response.output_text, response.status) == (engine.answer([QUESTION])[0].text, "completed")
            assert response.usage is not None
            assert response.usage.output_tokens == 2
            assert (response.model_extra or {})["retrieved"] == ["press"]
        cut = client.responses.create(model="tiny:news", input="Who opened Basalt Bridge?", max_output_tokens=1)
        assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )

    def test_a_stream(self, client: openai.OpenAI) -> None:
        question = "Who opened Basalt Bridge?"
        whole = client.responses.create(model="tiny:news", input=question)
        with client.responses.stream(model="tiny:news", input=question) as stream:
            told = list(stream)
            final = stream.get_final_response()
        deltas = [event.delta for event in told if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
        assert final.output_text == whole.output_text
        assert final.usage == whole.usage
        assert [event.sequence_number for event in told] == list(range(len(told)))
        assert [told[0].type, told[-1].type] == ["response.created", "response.completed"]

    @pytest.mark.parametrize(
        ("more", "param"),
        [
            ({"text": {"format": {"type": "json_schema"}}}, "text.format.type"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
                "input.0.content.0.type",
            ),
            ({"input": [{"role": "assistant", "content": "Hello."}]}, "messages"),
            ({"include": ["file_search_call.results"]}, "include.0"),
        ],
    )
    def test_what_it_has_not_is_named(self, running: Running, more: dict[str, Any], param: str) -> None:
        response = running.client().post("/v1/responses", json={"model": "tiny:news", "input": QUESTION, **more})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


class TestWire:
    SEPARATORS = "\u2028\u2029\x85"

    @pytest.mark.parametrize("path", ["chat/completions", "responses"])
    def test_an_event_of_a_stream_is_a_line_for_every_reader(self, running: Running, path: str) -> None:
        name = f"a{self.SEPARATORS}b"
        with running.client() as plain:
            make(plain, "lines", (name, BRIDGE))
            asked = "Who opened Basalt Bridge?"
            said: Any = {"messages": [{"role": "user", "content": asked}], "input": asked}
            del said["input" if path == "chat/completions" else "messages"]
            [*_, last] = events(plain.post(f"/v1/{path}", json={"model": "tiny:lines", "stream": True, **said}))
            plain.delete("/v1/banks/lines").raise_for_status()
        last = last.get("response", last)
        assert last["retrieved"] == [name]

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("embeddings", {"model": "all-MiniLM-L6-v2", "input": "?"}),
            ("embeddings", {"model": "all-MiniLM-L6-v2", "input": ["good", "?"]}),
            ("chat/completions", {"model": "tiny:news", "messages": [{"role": "user", "content": "?"}]}),
            ("completions", {"model": "tiny:news", "prompt": "?"}),
            ("responses", {"model": "tiny:news", "input": "?"}),
            ("banks/news/search", {"query": "?"}),
            ("banks/news/documents", {"documents": [{"id": "a", "text": "b", "metadata": {"?": 1}}]}),
            ("banks/news/documents/delete", {"ids": ["?"]}),
        ],
    )
    def test_half_of_a_surrogate_pair_is_refused(self, running: Running, path: str, body: Any) -> None:
        content = json.dumps(body).replace("?", "\\ud83d").encode()
        response = running.client().post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert "half of a surrogate pair" in response.json()["error"]["message"]

    def test_usage_counts_what_was_generated(
        self, running: Running, engine: MACEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not the words that replaced it."""
        even = Logistic(weights={}, bias=0.0, questions=1, data="none")
        fitted = Calibration(fingerprint=running.service.model.fingerprint, modes={"memory": even})
        monkeypatch.setattr(running.service.model, "calibration", fitted)
        body = {"model": "tiny:news", "messages": MESSAGES, "retriever": "none", "min_confidence": 0.6}
        answer = running.client().post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "I don't know"
        [generated] = engine.answer([QUESTION], use_retriever=False)
        assert answer["usage"]["completion_tokens"] == len(generated.decoded.tokens)


class TestOwnFields:
    def ask(self, running: Running, **more: Any) -> Any:
        body = {"model": "tiny", "bank": "news", "messages": MESSAGES, "sources": 5, **more}
        response = running.client().post("/v1/chat/completions", json=body)
        response.raise_for_status()
        return response.json()

    def test_doubt_replaces_a_guess(self, running: Running, engine: MACEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        model = running.service.model
        even = Logistic(weights={}, bias=0.0, questions=1, data="none")
        fitted = Calibration(fingerprint=model.fingerprint, modes={"memory": even})
        monkeypatch.setattr(model, "calibration", fitted)
        said = engine.answer([QUESTION], use_retriever=False)[0].text
        for least, text, guess in ((0.4, said, None), (0.6, "I don't know", said)):
            answer = self.ask(running, min_confidence=least, retriever="none")
            assert answer["choices"][0]["message"]["content"] == text
            assert (answer["confidence"], answer["guess"]) == (0.5, guess)
            body = {"model": "tiny:news", "messages": MESSAGES, "min_confidence": least, "retriever": "none"}
            told = events(running.client().post("/v1/chat/completions", json={**body, "stream": True}))
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in told) == text
            assert told[-1]["confidence"] == 0.5
        assert self.ask(running)["confidence"] is None
        # Confidence alone keeps no text back.
        body = {"model": "tiny:news", "messages": MESSAGES, "min_confidence": 0, "retriever": "none", "stream": True}
        monkeypatch.setattr(running.service.asking, "answer", None)
        assert events(running.client().post("/v1/chat/completions", json=body))[-1]["confidence"] == 0.5

    def test_filters_and_as_of_hide_documents(self, running: Running) -> None:
        for hidden in ({"filters": {"year": 2004}}, {"as_of": "2004-12"}, {"filters": {"year": [1999, 2004]}}):
            answer = self.ask(running, **hidden)
            assert [source["document_id"] for source in answer["sources"]] == ["bridge"]
            assert "press" not in answer["retrieved"]

    def test_memory_and_retriever_are_switched(self, running: Running, engine: MACEngine) -> None:
        alone = self.ask(running, memory=False, retriever="none")
        assert alone["sources"] == alone["retrieved"] == []
        assert (
            alone["choices"][0]["message"]["content"]
            == engine.answer([QUESTION], use_memory=False, use_retriever=False)[0].text
        )
        assert self.ask(running, retriever=False)["retrieved"] == []
        without = self.ask(running, memory=False)
        assert without["retrieved"] == ["press"]
        assert [(one["document_id"], one["attention"]) for one in without["sources"]] == [("press", None)]

    def test_the_model_alone_has_no_bank(self, running: Running) -> None:
        answer = self.ask(running, bank=None)
        assert answer["sources"] == answer["retrieved"] == []

    def test_sampling_is_that_of_the_request(self, running: Running) -> None:
        first, second = (self.ask(running, temperature=1.5, seed=-3) for _ in range(2))
        assert first["choices"] == second["choices"]
        assert self.ask(running, stop=["8"])["choices"][0]["message"]["content"] == "1"

    def test_a_short_answer_ends_by_length_and_a_long_one_is_told(self, running: Running) -> None:
        answer = self.ask(running, messages=[{"role": "user", "content": "Who opened Basalt Bridge?"}], max_tokens=1)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert "max_tokens" in self.ask(running, max_tokens=100_000)["notes"][0]

    def test_earlier_messages_are_told_to_have_no_influence(self, running: Running) -> None:
        before = [{"role": "system", "content": "Be brief."}, *MESSAGES]
        answer = self.ask(running, messages=before)
        assert answer["choices"][0]["message"]["content"] == "180"
        assert "only the last message" in answer["notes"][0]


def test_a_conversation_is_read_by_a_model_that_chats(chat_checkpoint: Any) -> None:
    from mac_rag.lm.chat import Message
    from mac_rag.model import MACModel
    from mac_rag.server.asking import Asking, Piece, ServedQuestion
    from mac_rag.server.metrics import Metrics

    class NoBanks:
        def served(self) -> list[ServedBank]:
            return []

    model = MACModel.from_pretrained(chat_checkpoint, device="cpu")
    alone = MACEngine(model)
    asking = Asking(alone, Metrics(NoBanks()))  # type: ignore[arg-type]
    before = (Message("system", "Be brief."), Message("user", "Who?"), Message("assistant", "Ada."))
    [reply] = asking.answer([ServedQuestion("Where?", None, before=before)])
    fitted = model.fit_conversation([*before, Message("user", "Where?")], question="Where?")
    assert reply.prompt_tokens == len(fitted.ids)
    assert reply.text == model.generate([fitted])[0]
    pieces = list(asking.stream(ServedQuestion("Where?", None, before=before)))
    assert "".join(piece.text for piece in pieces if isinstance(piece, Piece)) == reply.text


def test_questions_that_arrive_together_share_batches(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = running.service.catalog.get("news")
    batches: list[int] = []
    monkeypatch.setattr(bank.engine, "on_batch", batches.append)
    queue = bank.engine._queue
    monkeypatch.setattr(queue, "_last", {})  # keys of other tests' servers have asked the same model
    body = {"model": "tiny:news", "messages": MESSAGES, "sources": 0}
    with running.client() as client, ThreadPoolExecutor(12) as pool:
        with queue.turn():
            answers = [pool.submit(client.post, "/v1/chat/completions", json=body) for _ in range(12)]
            wait_until(lambda: len(queue._waiting) == 12)
        assert {answer.result().json()["choices"][0]["message"]["content"] for answer in answers} == {"180"}
    assert batches == [12]

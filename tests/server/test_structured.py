"""Tools and JSON in chat completions of an LM that follows instructions, through the client that people use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mac_rag.data.types import Decoded, Token
from mac_rag.lm.continuous_batch import Answers
from mac_rag.lm.decoding import GREEDY
from mac_rag.model import OwnKVModel
from mac_rag.server.requests import ChatRequest
from mac_rag.server.structured import wanted
from tests.helpers import Folder, own_kv
from tests.server.helpers import serving

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
CALL = '{"name": "weather", "arguments": {"town": "Łódź"}}'
USER = {"role": "user", "content": "What is the weather in Łódź?"}


class LM:
    """What the LM writes, and the prompts that it has read."""

    def __init__(self, model: OwnKVModel) -> None:
        self.model, self.says = model, ""
        self.read: list[str] = []

    def begin(self, batch: Any, ids: Any, *_: Any, tell: Callable[..., Any], **__: Any) -> Answers:
        self.read += [self.model.base_lm.tokenizer.decode(row) for row in ids]
        for row in range(len(ids)):
            tell(row, Decoded(self.says, [Token(1)], True))
        return Answers(
            len(ids), most=1, sampling=GREEDY, processors=[], ensemble=None, end_tokens=[], write=lambda _: []
        )


@pytest.fixture(scope="module")
def model(model_folder: Folder) -> OwnKVModel:
    return own_kv(model_folder("instruct"))


@pytest.fixture
def lm(model: OwnKVModel, monkeypatch: pytest.MonkeyPatch) -> LM:
    """In place of the LM's words, which are those of random weights."""
    made = LM(model)
    monkeypatch.setattr(model.base_lm, "begin", made.begin)
    return made


@pytest.fixture
def client(model: OwnKVModel, tmp_path: Path) -> Iterator[openai.OpenAI]:
    with serving(tmp_path, model) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as made:
        yield made


def test_a_call_of_a_tool_and_its_result(client: openai.OpenAI, lm: LM) -> None:
    lm.says = f"I will look.\n```json\n{CALL}\n```"
    ask: Any = client.chat.completions.create
    said: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    choice = ask(model="tiny", messages=said, tools=[WEATHER, CLOCK]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"town": "Łódź"})
    assert all(words in lm.read[-1] for words in ("Be brief.", "The weather of a town.", '"clock"'))
    lm.says = "It rains."
    said += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain, 7 °C"}]
    answer = ask(model="tiny", messages=said, tools=[WEATHER]).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("stop", "It rains.", None)
    assert "Result of the tool: rain, 7 °C" in lm.read[-1]
    assert "weather" in lm.read[-1]


@pytest.mark.parametrize(
    "says", ["It rains.", '{"name": "tide", "arguments": {}}', '{"name": "weather", "arguments": 7}']
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_come(client: openai.OpenAI, lm: LM, says: str, choice: Any) -> None:
    lm.says = says
    create: Any = client.chat.completions.create
    with pytest.raises(openai.UnprocessableEntityError, match="has called none of the tools"):
        create(model="tiny", messages=[USER], tools=[WEATHER, CLOCK], tool_choice=choice)
    assert create(model="tiny", messages=[USER], tools=[WEATHER]).choices[0].message.content == says
    assert "You must call one." not in lm.read[-1]
    create(model="tiny", messages=[USER], tools=[WEATHER], tool_choice="none")
    assert "The weather of a town." not in lm.read[-1]


def test_a_call_and_json_come_as_streams(client: openai.OpenAI, lm: LM) -> None:
    create: Any = client.chat.completions.create
    more: Any = {"stream": True, "stream_options": {"include_usage": True}}
    lm.says = CALL
    chunks = list(create(model="tiny", messages=[USER], tools=[WEATHER], **more))
    [call] = chunks[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name) == (0, "weather")
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[2].usage.completion_tokens > 0
    lm.says = 'So: {"town": "Łódź"}'
    chunks = list(create(model="tiny", messages=[USER], response_format={"type": "json_object"}, stream=True))
    assert json.loads(chunks[0].choices[0].delta.content) == {"town": "Łódź"}
    assert chunks[1].choices[0].finish_reason == "stop"


def test_json_is_json_or_an_error(client: openai.OpenAI, lm: LM) -> None:
    create: Any = client.chat.completions.create
    schema = {"type": "json_schema", "json_schema": {"name": "town", "schema": {"required": ["town"]}}}
    for wish in ({"type": "json_object"}, schema):
        lm.says = 'Here: {not} {"town": "Łódź"}.'
        content = create(model="tiny", messages=[USER], response_format=wish).choices[0].message.content
        assert json.loads(content) == {"town": "Łódź"}
        lm.says = "Łódź"
        with pytest.raises(openai.UnprocessableEntityError, match="is no JSON object"):
            create(model="tiny", messages=[USER], response_format=wish)
    assert '"required": ["town"]' in lm.read[-1]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "tide"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_what_cannot_be_had_is_named(client: openai.OpenAI, lm: LM, more: dict[str, Any], param: str) -> None:
    create: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", messages=[USER], **more)
    assert caught.value.param == param
    assert not lm.read


def test_open_braces_are_no_object() -> None:
    request = ChatRequest.model_validate(
        {"model": "tiny", "messages": [USER], "response_format": {"type": "json_object"}}
    )
    asked = wanted(request, is_chat=True)
    assert asked is not None
    with pytest.raises(Exception, match="is no JSON object"):
        asked.message('{"a":' * 3000)

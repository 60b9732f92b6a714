"""Tools and JSON in chat completions: the LM is asked for them in words, and its answer is read as what was asked for.

Only a chat LM follows such words. Nothing forces it to: an answer that is not JSON where JSON was required is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mac_rag.lm.chat import Message
from mac_rag.server.api_errors import APIError
from mac_rag.server.requests import ChatMessage, ChatRequest

_CALL = (
    'To call a tool, answer with {"name": its name, "arguments": {...}} and nothing else, by the schema of its '
    "parameters.\n\nTools:\n"
)
_JSON = "Answer with a JSON object and nothing else."


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=64)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class _Tool(BaseModel):
    type: str = Field(pattern="^function$")
    function: _Function


@dataclass(frozen=True)
class Wanted:
    """What a request wants in place of free text.

    Attributes:
        instructions: the words that ask for it, a system message.
        tools: names of the tools that may be called.
        required: True if the answer must be a call, or JSON.
    """

    instructions: str
    tools: frozenset[str]
    required: bool

    def message(self, text: str) -> dict[str, Any]:
        """The assistant's message: a call of a tool, JSON, or free text where that is allowed.

        Raises:
            APIError: for another answer where one of them is required.
        """
        found = _object_in(text)
        if self.tools:
            if found is not None and found.get("name") in self.tools and isinstance(found.get("arguments", {}), dict):
                arguments = json.dumps(found.get("arguments", {}), ensure_ascii=False)
                function = {"name": found["name"], "arguments": arguments}
                calls = [{"id": f"call_{token_hex(12)}", "type": "function", "function": function}]
                return {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
            if self.required:
                raise APIError(422, f"the LM has called none of the tools; it answered {text!r:.200}", param="tools")
        elif found is None:
            raise APIError(422, f"the LM's answer is no JSON object: {text!r:.200}", param="response_format")
        else:
            text = json.dumps(found, ensure_ascii=False)
        return {"role": "assistant", "content": text, "refusal": None}


def wanted(body: ChatRequest, *, is_chat: bool) -> Wanted | None:
    """What a request wants in place of free text; None for free text.

    Args:
        body: the request.
        is_chat: True if the LM reads conversations.

    Raises:
        APIError: for tools or formats that are unknown, or that this model or a stream cannot give.
    """
    if not is_chat and any(message.role == "tool" or message.tool_calls for message in body.messages):
        raise APIError(
            400, "this model calls no tools, so it reads no results of them; leave them out", param="messages"
        )
    kind, choice = (body.response_format or {}).get("type", "text"), body.tool_choice
    has_tools = bool(body.tools) and choice != "none"
    if kind not in ("text", "json_object", "json_schema"):
        raise APIError(
            400,
            f"response_format has the type {kind!r:.40}; give text, json_object or json_schema",
            param="response_format",
        )
    if not has_tools and choice not in (None, "none", "auto"):
        raise APIError(400, "tool_choice names a tool, and tools has none; leave it out", param="tool_choice")
    if not has_tools and kind == "text":
        return None
    param = "tools" if has_tools else "response_format"
    if not is_chat:
        raise APIError(400, f"this model follows no instructions, so it gives no {param}; leave it out", param=param)
    if not has_tools:
        schema = (body.response_format or {}).get("json_schema", {})
        written = json.dumps(schema.get("schema", {}), ensure_ascii=False) if kind == "json_schema" else ""
        return Wanted(f"{_JSON} It must conform to this schema: {written}" if written else _JSON, frozenset(), True)
    try:
        tools = [_Tool.model_validate(tool).function for tool in body.tools or ()]
    except ValidationError as error:
        fault = error.errors()[0]
        raise APIError(400, f"tools: {'.'.join(map(str, fault['loc']))}: {fault['msg']}", param="tools") from None
    named = choice["function"].get("name") if isinstance(choice, dict) and "function" in choice else None
    if named is not None:
        tools = [tool for tool in tools if tool.name == named]
    if not tools:
        raise APIError(400, f"tool_choice names {named!r:.40}, which is none of the tools", param="tool_choice")
    listed = "\n".join(json.dumps(tool.model_dump(), ensure_ascii=False) for tool in tools)
    required = choice == "required" or named is not None
    must = "You must call one. " if required else ""
    return Wanted(must + _CALL + listed, frozenset(tool.name for tool in tools), required)


def conversation(messages: Sequence[ChatMessage], asked: Wanted | None) -> list[Message]:
    """The messages of a request as a chat template takes them; what is wanted is a part of the system message.

    A result of a tool is said by the user, and a call by the assistant.
    """
    said = [Message("system", asked.instructions)] if asked is not None else []
    for message in messages:
        text = message.text
        if message.tool_calls:
            calls = [call.get("function", {}) for call in message.tool_calls if isinstance(call, dict)]
            text = "\n".join([*filter(None, [text]), *(json.dumps(call, ensure_ascii=False) for call in calls)])
        if message.role == "tool":
            said.append(Message("user", f"Result of the tool: {text}"))
        elif message.role == "assistant":
            said.append(Message("assistant", text))
        else:
            said.append(Message("user" if message.role == "user" else "system", text))
    if asked is None:
        return said
    system = "\n\n".join(message.text for message in said if message.role == "system")
    return [Message("system", system), *(message for message in said if message.role != "system")]


def _object_in(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, which may stand within other words; None if there is none."""
    start, decoder = text.find("{"), json.JSONDecoder()
    while start >= 0:
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        return found if isinstance(found, dict) else None
    return None

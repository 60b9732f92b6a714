"""`/v1/responses`, compatible with OpenAI's clients: text, as a whole and as a stream. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from secrets import token_hex
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mac_rag.lm.chat import Message
from mac_rag.server.asking import Piece, Reply
from mac_rag.server.completions import STREAMED, events_of, first_and_rest, own_fields, question_of
from mac_rag.server.requests import Reader, ResponsesMessage, ResponsesRequest, StrictRoute
from mac_rag.server.service import Service


def routes(service: Service) -> APIRouter:
    """The routes of one server."""
    router = APIRouter(prefix="/v1", route_class=StrictRoute)

    @router.post("/responses", response_model=None, responses=STREAMED)
    async def respond(body: ResponsesRequest, request: Request, who: Reader) -> Response:
        """Answers the last message."""
        sent = [Message("user", body.input)] if isinstance(body.input, str) else _said(body.input)
        before = [Message("system", body.instructions)] if body.instructions else []
        question, notes = await question_of(service, body, who, request, [*before, *sent])
        shape = _Shape(body, notes)
        if body.stream:
            pieces = service.questions.stream(partial(service.asking.stream, question))
            return events_of(shape.events(first_and_rest(await anext(pieces), pieces)), named=True)
        return await service.questions.respond(
            lambda gone: shape.whole(service.asking.answer([question], gone)[0]), request
        )

    return router


def _said(messages: Sequence[ResponsesMessage]) -> list[Message]:
    return [Message("system" if message.role == "developer" else message.role, message.text) for message in messages]


class _Shape:
    """Writes a reply as JSON, as a whole and as the events of a stream."""

    def __init__(self, body: ResponsesRequest, notes: list[str]) -> None:
        self._notes = notes
        self._item = f"msg_{token_hex(12)}"
        self._head: dict[str, Any] = {
            "id": f"resp_{token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "metadata": (body.model_extra or {}).get("metadata", {}),
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "error": None,
        }

    def whole(self, reply: Reply) -> dict[str, Any]:
        """The response."""
        status = "incomplete" if reply.is_cut else "completed"
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if reply.is_cut else None,
            "output": [self._message(status, [_part(reply)])],
            "usage": usage,
            **own_fields(reply, self._notes),
        }

    async def events(self, items: AsyncIterator[Piece | Reply]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream."""
        number = 0
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        yield event("output_item.added", output_index=0, item=self._message("in_progress", []))
        yield event("content_part.added", **place, part=_part(Reply()))
        async for item in items:
            if isinstance(item, Piece):
                yield event("output_text.delta", **place, delta=item.text, logprobs=item.logprobs or [])
                continue
            whole = self.whole(item)
            yield event("output_text.done", **place, text=item.text, logprobs=item.logprobs or [])
            yield event("content_part.done", **place, part=_part(item))
            yield event("output_item.done", output_index=0, item=whole["output"][0])
            yield event(whole["status"], response=whole)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(reply: Reply) -> dict[str, Any]:
    return {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": reply.logprobs or []}

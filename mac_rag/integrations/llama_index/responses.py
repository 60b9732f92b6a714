"""Answers in the forms that LlamaIndex's interfaces return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.types import TokenAsyncGen

from mac_rag.data.types import Answer
from mac_rag.sources import source_record

SOURCES = "mac_sources"  # key of `raw`, and of a response's metadata: the documents that an answer rests on


def accumulate(pieces: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yields the text so far and its newest piece."""
    text = ""
    for piece in pieces:
        text += piece
        yield text, piece


async def single(text: str) -> TokenAsyncGen:
    """Yields one text."""
    yield text


def completion_response(answer: Answer) -> CompletionResponse:
    """An answer as a completion."""
    return CompletionResponse(text=answer.text, raw=raw_of(answer))


def chat_response(text: str, delta: str | None = None, raw: dict[str, Any] | None = None) -> ChatResponse:
    """An answer as a message of the assistant."""
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta, raw=raw)


def raw_of(answer: Answer) -> dict[str, Any] | None:
    """What else is known of an answer, for `raw` of LlamaIndex's responses; None for nothing."""
    raw: dict[str, Any] = {}
    if answer.sources:
        raw[SOURCES] = [source_record(source) for source in answer.sources]
    return raw or None

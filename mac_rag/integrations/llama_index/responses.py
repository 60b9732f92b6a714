"""Answers in the forms that LlamaIndex's interfaces return."""

from __future__ import annotations

from collections.abc import Iterator

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.types import TokenAsyncGen


def accumulate(pieces: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yields the text so far and its newest piece."""
    text = ""
    for piece in pieces:
        text += piece
        yield text, piece


async def single(text: str) -> TokenAsyncGen:
    """Yields one text."""
    yield text


def chat_response(text: str, delta: str | None = None) -> ChatResponse:
    """An answer as a message of the assistant."""
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)

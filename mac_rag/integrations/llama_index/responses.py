"""Answers in the forms that LlamaIndex's interfaces return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.types import TokenAsyncGen

from mac_rag.data.types import Answer
from mac_rag.integrations.details import details_of

# LlamaIndex hands the text of a prediction on and nothing else. Who sets a list here finds the answers in it.
_noted: ContextVar[list[Answer] | None] = ContextVar("answers", default=None)


@contextmanager
def noting() -> Iterator[list[Answer]]:
    """A context in which every answer of a `MACLLM` is put into a list, also one from another thread."""
    answers: list[Answer] = []
    token = _noted.set(answers)
    try:
        yield answers
    finally:
        _noted.reset(token)


def note(answer: Answer) -> None:
    """Puts an answer into the list of the innermost `noting`, if there is one."""
    answers = _noted.get()
    if answers is not None:
        answers.append(answer)


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
    return details_of(answer) or None

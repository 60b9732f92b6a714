"""LangChain's messages as texts, and answers as LangChain's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage
from langchain_core.messages.ai import UsageMetadata

from mac_rag.integrations.framework import Framework, Said

FRAMEWORK = Framework(
    llm="ChatMAC",
    options=(
        "contexts, max_tokens (at least 1), temperature, top_p, seed and stop, and use_memory, filters, as_of, k, "
        "memory_weight, sources and min_confidence"
    ),
    other_llm="Give this step of the chain another chat model",
    behind_prompt="; to ask about texts, hand them over: llm.invoke(question, contexts=[...]), or by a "
    "create_documents_chain",
    behind_system="; or leave the system message out",
    behind_tools="",
)

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
}


def said(messages: Sequence[BaseMessage]) -> list[Said]:
    """The messages as texts."""
    return [Said(_role(message), str(message.text), _others(message)) for message in messages]


def _role(message: BaseMessage) -> str:
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    return _ROLES.get(name, name)


def _others(message: BaseMessage) -> tuple[str, ...]:
    """What a message holds beside text."""
    blocks = message.content if isinstance(message.content, list) else []
    kinds = [str(block.get("type")) for block in blocks if isinstance(block, dict) and block.get("type") != "text"]
    if isinstance(message, AIMessage) and message.tool_calls:
        kinds.append("calls of tools")
    return tuple(kinds)


def answer_message(text: str, usage: UsageMetadata, metadata: dict[str, Any]) -> AIMessage:
    """A whole answer."""
    return AIMessage(content=text, usage_metadata=usage, response_metadata=metadata)


def last_chunk(text: str, usage: UsageMetadata, metadata: dict[str, Any]) -> AIMessageChunk:
    """The end of an answer that comes piece by piece."""
    return AIMessageChunk(content=text, usage_metadata=usage, response_metadata=metadata, chunk_position="last")


def usage_of(prompt_tokens: int, answer_tokens: int) -> UsageMetadata:
    """Numbers of the LM's tokens."""
    total = prompt_tokens + answer_tokens
    return UsageMetadata(input_tokens=prompt_tokens, output_tokens=answer_tokens, total_tokens=total)

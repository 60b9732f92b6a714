"""Conversations and prompt templates of LlamaIndex as a checkpoint with the prompt format `chat` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate

from mac_rag.integrations.conversations import Said
from mac_rag.integrations.llama_index.instructions import Request
from mac_rag.lm.prompt import FittedPrompt

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
_QUESTION_SLOTS = ("query_str", "question", "query")  # as LlamaIndex's components name them
_CONTEXTS = ("context_msg", "context_str")


def said(messages: Sequence[ChatMessage]) -> list[Said]:
    """The messages as texts."""
    return [
        Said(
            _ROLES.get(message.role, message.role.value),
            message.content or "",
            tuple(block.block_type for block in message.blocks if not isinstance(block, TextBlock)),
        )
        for message in messages
    ]


def read_template(llm: LLM, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request | None:
    """A filled prompt template as a conversation with its wording; None for a template that is nothing but slots.

    The memory is asked the question in the slots, or else the last message. A context in the slots may be cut if the
    conversation is beyond the LM's window.
    """
    values = {**prompt.kwargs, **prompt_args}
    if _is_slots(llm, prompt) or any(isinstance(value, FittedPrompt) for value in values.values()):
        return None
    questions = [values[name] for name in _QUESTION_SLOTS if isinstance(values.get(name), str)]
    context = next((values[name] for name in _CONTEXTS if name in values), ())
    texts = [context] if isinstance(context, str) else [str(text) for text in context]
    messages = llm._get_messages(prompt, **prompt_args)
    return Request(next(iter(questions), ""), tuple(text for text in texts if text.strip()), messages=tuple(messages))


def _is_slots(llm: LLM, prompt: BasePromptTemplate) -> bool:
    wording: str = prompt.get_template(llm=llm)
    return "query_str" in prompt.template_vars and not re.sub(r"\{\w+\}", "", wording).strip()

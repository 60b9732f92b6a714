"""Reads question and context from the slots of a LlamaIndex prompt template, never from its text."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import BasePromptTemplate

from mac_rag.errors import InstructionError, MACError
from mac_rag.integrations.once import first_time
from mac_rag.lm.prompt import FittedPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `predict` or `stream`.

    Attributes:
        question: the question to answer.
        contexts: texts to answer from, or a `FittedPrompt`; None if the template has no slot for contexts.
        messages: the conversation that asks the question, whose wording the LM reads; None if the LM reads question and
            contexts only.
        settled: the reply, if it is known without the model; None if the model has to answer.
    """

    question: str
    contexts: tuple[str, ...] | FittedPrompt | None = None
    settled: str | None = None
    messages: tuple[ChatMessage, ...] | None = None


def read_slots(prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Request:
    """Reads a request from the slots that LlamaIndex's synthesizers and chat engines fill.

    - `query_str` is the question. The context is `context_str` (a text, or a list of texts in simple_summarize) or, in
      later steps of refine, `context_msg`. The words of the template are ignored: the LM reads question and context in
      the format that it was trained with.
    - A later step of refine has an `existing_answer`, which is returned. Nodes come best first, and a MAC model answers
      in a few tokens without saying that a context does not help, so a new answer would be the one from the worst
      node. A warning says that further contexts are not read.

    Args:
        prompt: the template.
        prompt_args: values of its slots.

    Raises:
        InstructionError: when the template asks for structured output.
        MACError: when no slot holds a question.
    """
    if prompt.output_parser is not None:
        raise InstructionError(
            "MACLLM answers in plain text and supports no output parser; take it off the prompt template, or give this "
            "step another LLM (llm=...)"
        )
    values = {**prompt.kwargs, **prompt_args}
    question = values.get("query_str")
    if not isinstance(question, str):
        raise MACError(
            f"MACLLM answers questions, and this prompt template has no text in a slot named query_str "
            f"(its slots: {', '.join(sorted(values)) or 'none'})"
        )
    existing = values.get("existing_answer")
    if existing:
        if first_time("refine"):
            warnings.warn(
                "a later step of refine keeps the answer to the first context and does not read the further ones; use "
                "response_mode='compact' without a prompt helper to have all nodes read in one prompt (this is said "
                "once)",
                stacklevel=4,
            )
        return Request(question, settled=str(existing))
    context = values.get("context_msg", values.get("context_str"))
    if context is None or isinstance(context, FittedPrompt):
        return Request(question, context)
    texts = [context] if isinstance(context, str) else [str(text) for text in context]
    return Request(question, tuple(text for text in texts if text.strip()))
